"""mpirun -n 4 python -m zmpi.train: trains a language model with sharded state."""

import sys
from contextlib import ExitStack, closing
from math import isfinite
from statistics import median
from time import perf_counter

from tqdm import tqdm

from models.layer import one_target
from zmpi.cli import resume
from zmpi.cli.model_flags import DEFAULT_SIZES, build_model, refuse_beyond_memory
from zmpi.cli.optimizer_flags import HYPERPARAMETERS, build_optimizer
from zmpi.cli.options import Parser, named_as_flags
from zmpi.cli.own import FileClass, leave_defaults
from zmpi.cli.progress import NothingTrained, Progress
from zmpi.cli.report import opening, summary
from zmpi.cli.run_log import LogLost, RunLog, open_log
from zmpi.cli.start import WORLD, engine_of, refuse_different_texts, start_command
from zmpi.cli.train_flags import add_train_flags, check_outputs, refuse
from zmpi.core.step import Stopped
from zmpi.cost.memory_limit import refuse_beyond_limit
from zmpi.cost.trace import Trace, open_trace, write_trace
from zmpi.cost.watch import watched
from zmpi.messages.world import World
from zmpi.numbers.precision import Policy
from zmpi.process.errors import Agreed, UsageError
from zmpi.process.streams import check_printed
from zmpi.saving.checkpoint import Keeper, find, load
from zmpi.text.data import Batches, described, load_text

COMMAND = "zmpi.train"
KEEP = 3  # checkpoints


def parser():
    """All flags. The names are a contract."""
    flags = Parser(COMMAND, __doc__)
    add_train_flags(flags)
    return flags


def main(argv=None):
    """Run the command; an error ends all ranks with one line."""
    args, world = start_command(parser(), argv)
    with world.agreed():
        refuse(args)
    with ExitStack() as held:  # releases the folder of checkpoints, however the run ends
        _run(args, world, argv, held)


def _run(args, world, argv, held):
    """From the flags to the summary."""
    keeper = _keeper(args, world, held, make=False) if args.resume else None
    manifest = find(args.checkpoint, world) if args.resume else None
    group = args.group
    with world.agreed():
        _take_settings(args, world, argv, manifest)
    if args.group != group:  # the checkpoint's
        world = World(**{name: getattr(args, name) for name in WORLD})
    with world.agreed():
        model = build_model(args)
        text = load_text(args.data, model.context, model.vocab, world.rank, world.size)
    refuse_different_texts(world, text)
    with world.agreed():
        if manifest:
            resume.same_text(text, args, manifest)
        _refuse_no_evaluation(args, text)
        log, trace = _outputs(args, world, held) if world.rank == 0 else (None, None)
    zero = _engine(args, model, world)
    if manifest:
        load(zero, manifest.folder)
    if args.init_from:
        resume.init_from(zero, args.init_from)
    batches = Batches.on(world, text, args.micro_batch, one_target(model))
    if args.checkpoint and not keeper:
        keeper = _fresh(args, world, held)
    with world.agreed():
        log = RunLog(log, zero, args, argv, described(text, args.data))
    _say(world, opening(zero, args, text))
    if manifest:
        saved = (
            f"saved by {manifest['size']} ranks at stage {manifest['stage']}, {manifest['recipe']}"
        )
        _say(
            world,
            f"resumed from {manifest.folder}: {zero.step} of {args.steps} steps are done ({saved})",
        )
    _train(zero, batches, args, (log, trace), Saving(zero, keeper, args, text))


def _refuse_no_evaluation(args, text):
    if args.eval_every and not text.evaluated:
        tokens = len(text.train) + len(text.held_out)
        raise ValueError(f"--eval-every: none of the {tokens} tokens of {args.data} are held out")


def _outputs(args, world, held):
    """The Outputs of --log and --trace, or None. Rank 0 has them."""
    check_outputs(args)
    log = held.enter_context(closing(open_log(args.log))) if args.log else None
    trace = held.enter_context(closing(open_trace(args.trace))) if args.trace else None
    for output in (log, trace):
        if output and output.unlocked:
            fault = "this file system has no locks: make sure that no other job uses this file"
            _warn(world, f"{output.flag}: {output.path}: {fault}")
    return log, trace


def _take_settings(args, world, argv, manifest):
    """Take the flags not given from the checkpoint, or from the published weights."""
    given = parser().given(argv)
    leave_defaults(args, "model", DEFAULT_SIZES, given)
    leave_defaults(args, "optimizer", HYPERPARAMETERS, given)
    if manifest:
        saved = resume.saved_flags(manifest, parser())
        resume.take_settings(args, given, manifest, saved, world.size)
    elif args.init_from:
        resume.take_sizes(args, given)
    world.reduction = args.reduction


def _engine(args, model, world):
    """The engine of the flags, with initial weights."""
    with world.agreed():
        if args.precision != "float16" and args.loss_scale_window != Policy.loss_scale_window:
            raise ValueError(
                f"--loss-scale-window: applies to --precision float16 only, not to {args.precision}"
            )
        engine, optimizer = engine_of(args.comm), build_optimizer(args)
        refuse_beyond_memory(args, model, world, args.stage)
        with named_as_flags():
            policy = Policy(
                args.precision,
                args.prefetch,
                args.recompute,
                args.loss_scale,
                args.loss_scale_window,
            )
        if not any(
            isinstance(value, FileClass) for value in (args.model, args.optimizer, args.comm)
        ):
            batch = args.micro_batch, args.accumulate
            refuse_beyond_limit(model, world, args.stage, optimizer, policy, batch)
    engine = watched(engine, Trace) if args.trace else engine
    return engine(model, world, args.stage, optimizer, args.seed, policy)


class Saving:
    """Saves every --save-every steps and at the end; never without a folder."""

    def __init__(self, zero, keeper, args, text):
        self._zero, self._keeper, self._args, self._text = zero, keeper, args, text
        self._saved = zero.step if args.resume else None  # the step of the last checkpoint
        self._updates = zero.updates  # in that
        if keeper:
            zero.world.guard.finish_on_signal()

    def step(self):
        """Save if it is due, and a step since the last checkpoint updated something."""
        due = self._args.save_every and self._zero.step % self._args.save_every == 0
        if due and self._updates != self._zero.updates:
            self.now()

    def now(self):
        """Save, unless already done."""
        if self._keeper and self._saved != self._zero.step:
            run = resume.describe_run(self._args, self._zero, self._text)
            _say(self._zero.world, str(self._keeper.save(self._zero, run)))
            self._saved, self._updates = self._zero.step, self._zero.updates


def _train(zero, batches, args, outputs, saving):
    """The steps, the evaluations, the checkpoints and the summary."""
    world, (log, trace) = zero.world, outputs
    if zero.step == args.steps:
        return _say(
            world, f"all {args.steps} steps are done: nothing to train (--steps is the total)"
        )
    try:
        seconds, fault = _steps(zero, batches, args, log, saving)
        log.end(fault or "finished")
        log.settle()
    except Stopped as stop:
        saving.now()
        log.end(str(stop))
        _say(world, f"{stop} after step {zero.step} of {args.steps}; continue with --resume")
        sys.exit(stop.status)
    except LogLost as lost:
        _save_without_log(lost, saving)
        raise
    except Agreed as error:
        log.end(str(error))
        raise
    if not fault:
        saving.now()
    # below the progress bar, which another stream may still be drawing
    _say(world, "\n" + summary(zero, log, median(seconds)))
    _warn(world, _not_printed())
    if args.trace:
        write_trace(trace, zero)
    if fault:
        raise NothingTrained(fault)


def _save_without_log(lost, saving):
    try:
        saving.now()
    except UsageError as error:
        raise LogLost(f"{lost}; {error}") from None


def _steps(zero, batches, args, log, saving):
    """The remaining steps; returns (seconds of each, why they trained nothing or None)."""
    world, seconds, held_out, progress = zero.world, [], batches.held_out(), Progress(zero)
    bar = {"desc": "train", "unit": "step", "mininterval": 1, "ncols": 100}
    bar |= {"initial": zero.step, "total": args.steps, "disable": world.rank != 0}
    world.guard.line_start = "\n"  # a guard's message starts below the progress bar
    for _ in tqdm(range(zero.step, args.steps), **bar):
        began = perf_counter()
        zero.train_step(batches.of_step(args.seed, zero.step + 1, args.accumulate))
        seconds.append(perf_counter() - began)
        log.step(seconds[-1])
        _warn(world, progress.step())
        due = zero.step == args.steps or (args.eval_every and zero.step % args.eval_every == 0)
        if held_out and due:
            loss = zero.evaluate(held_out)
            log.evaluation(loss, batches.held_out_tokens)
            if not isfinite(loss):
                _warn(world, f"step {zero.step}: the validation loss is {loss}")
        saving.step()
    world.guard.line_start = ""
    return seconds, progress.fault()


def _keeper(args, world, held, make):
    return held.enter_context(closing(Keeper(args.checkpoint, world, args.keep or KEEP, make)))


def _fresh(args, world, held):
    """The folder of a new run: it must not have another run's checkpoints."""
    keeper = _keeper(args, world, held, make=True)
    newest = keeper.newest()
    if newest:
        raise UsageError(
            f"--checkpoint: {newest} already exists; continue it with --resume, or choose another"
            " folder"
        )
    return keeper


def _say(world, text):
    if world.rank == 0:
        tqdm.write(text)
        sys.stdout.flush()


def _not_printed():
    """A warning if the output is incomplete: training and files are not affected."""
    try:
        check_printed()
    except ValueError as error:
        return f"{error}; some output was lost"


def _warn(world, text):
    """A line on stderr, if there is a text."""
    if text and world.rank == 0:
        tqdm.write(f"{world.guard.program}: warning: {text}", file=sys.stderr)


if __name__ == "__main__":
    main()
