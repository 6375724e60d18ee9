"""mpirun -n 4 python -m zmpi.train: train a language model with its state kept apart, and say what that cost."""

import sys
from contextlib import ExitStack, closing
from statistics import median
from time import perf_counter

from tqdm import tqdm

from zmpi.checkpoint import Keeper, Stopped, find, load
from zmpi.cost.watch import watched
from zmpi.data import Batches, described, load_text
from zmpi.manners.guard import UsageError
from zmpi.manners.model_flags import SIZES, build_model, one_target, refuse_beyond_memory, window_of
from zmpi.manners.optimizer_flags import HYPERPARAMETERS, build_optimizer
from zmpi.manners.options import Parser, named_as_flags
from zmpi.manners.own import leave_defaults
from zmpi.manners.report import RunLog, opening, summary
from zmpi.manners.start import engine_of, start
from zmpi.manners.train_flags import check_outputs, refuse, train_flags
from zmpi.precision import Policy
from zmpi.saving import resume
from zmpi.trace import Trace, check_kind, write_trace

COMMAND = "zmpi.train"
KEEP = 3  # checkpoints


def parser():
    """All flags. The names are a contract."""
    flags = Parser(COMMAND, __doc__)
    train_flags(flags)
    return flags


def main(argv=None):
    """Run the command; what is wrong with it ends all ranks with one line."""
    args, world = start(parser(), argv)
    with world.agreed():
        refuse(args)
    with ExitStack() as held:  # the folder of checkpoints, given back however this run ends
        _run(args, world, argv, held)


def _run(args, world, argv, held):
    """From the flags to the summary."""
    keeper = _keeper(args, world, held, make=False) if args.resume else None
    manifest = find(args.checkpoint, world) if args.resume else None
    with world.agreed():
        if args.trace:
            check_kind(args.trace)
        _take_settings(args, world, argv, manifest)
        if world.rank == 0:
            check_outputs(args)
        model = build_model(args)
        text = load_text(args.data, *window_of(model, args), world.rank, world.size)
        if manifest:
            resume.same_text(text, args, manifest)
    zero = _engine(args, model, world)
    if manifest:
        load(zero, manifest.folder)
    if args.init_from:
        with world.agreed():
            resume.init_from(zero, args.init_from)
    batches = Batches(text, world.rank, world.size, args.micro_batch, one_target(model))
    if args.checkpoint and not keeper:
        keeper = _fresh(args, world, held)
    with world.agreed():
        log = RunLog(args.log, zero, args, argv, described(text, args.data))
    _say(world, opening(zero, args, text))
    if manifest:
        saved = (
            f"saved by {manifest['size']} ranks at stage {manifest['stage']}, {manifest['recipe']}"
        )
        _say(
            world,
            f"resumed from {manifest.folder}: {zero.step} of {args.steps} steps are done ({saved})",
        )
    _train(zero, batches, args, log, Saving(zero, keeper, args, text))


def _take_settings(args, world, argv, manifest):
    """What the command line leaves open comes from what the run goes on from."""
    given = parser().given(argv)
    leave_defaults(args, "model", SIZES, given)
    leave_defaults(args, "optimizer", HYPERPARAMETERS, given)
    if manifest:
        resume.take_settings(args, given, manifest, world.size)
    elif args.init_from:
        resume.take_sizes(args, given)
    world.reduction = args.reduction


def _engine(args, model, world):
    """The engine of the flags, with fresh weights."""
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
    engine = watched(engine, Trace) if args.trace else engine
    return engine(model, world, args.stage, optimizer, args.seed, policy)


class Saving:
    """When a run saves: every --save-every steps and at its end. Without a folder, never."""

    def __init__(self, zero, keeper, args, text):
        self._zero, self._keeper, self._args, self._text = zero, keeper, args, text
        self._saved = zero.step if args.resume else None  # the step of the last checkpoint
        if keeper:
            zero.world.guard.finish_on_signal()

    def step(self):
        """Save if it is time."""
        if self._args.save_every and self._zero.step % self._args.save_every == 0:
            self.now()

    def now(self):
        """Save, unless that is done."""
        if self._keeper and self._saved != self._zero.step:
            saved = self._keeper.save(
                self._zero, resume.describe_run(self._args, self._zero, self._text)
            )
            self._saved = self._zero.step
            _say(self._zero.world, str(saved))


def _train(zero, batches, args, log, saving):
    """The steps, the evaluations, the checkpoints and the summary."""
    if zero.step == args.steps:
        return _say(
            zero.world, f"all {args.steps} steps are done: nothing to train (--steps is the total)"
        )
    try:
        seconds = _steps(zero, batches, args, log, saving)
    except Stopped as stop:
        saving.now()
        _say(
            zero.world, f"{stop} after step {zero.step} of {args.steps}; --resume goes on from here"
        )
        sys.exit(stop.status)
    saving.now()
    if args.trace:
        write_trace(args.trace, zero)
    _say(
        zero.world, "\n" + summary(zero, log, median(seconds))
    )  # below the bar, which another stream may still be drawing


def _steps(zero, batches, args, log, saving):
    """The remaining steps; returns the seconds that each took."""
    seconds, held_out = [], batches.held_out()
    bar = {
        "desc": "train",
        "unit": "step",
        "mininterval": 1,
        "ncols": 100,
        "disable": zero.world.rank != 0,
    }
    zero.world.guard.line_start = "\n"  # a last word gets a line of its own, below the bar
    for _ in tqdm(range(zero.step, args.steps), initial=zero.step, total=args.steps, **bar):
        began = perf_counter()
        zero.train_step(batches.of_step(args.seed, zero.step + 1, args.accumulate))
        seconds.append(perf_counter() - began)
        log.step(seconds[-1])
        due = zero.step == args.steps or (args.eval_every and zero.step % args.eval_every == 0)
        if held_out and due:
            log.evaluation(zero.evaluate(held_out), batches.held_out_tokens)
        saving.step()
    zero.world.guard.line_start = ""
    return seconds


def _keeper(args, world, held, make):
    return held.enter_context(closing(Keeper(args.checkpoint, world, args.keep or KEEP, make)))


def _fresh(args, world, held):
    """The folder of a run that starts anew: it must not hold another run's checkpoints."""
    keeper = _keeper(args, world, held, make=True)
    newest = keeper.newest()
    if newest:
        raise UsageError(
            f"--checkpoint: {newest} is there already; --resume goes on from it, or name another folder"
        )
    return keeper


def _say(world, text):
    if world.rank == 0:
        tqdm.write(text)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
