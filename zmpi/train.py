"""mpirun -n 4 python -m zmpi.train: train a language model with its state kept apart, and say what that cost."""

import sys
from contextlib import ExitStack, closing
from dataclasses import fields
from statistics import median
from time import perf_counter

from tqdm import tqdm

from zmpi.checkpoint import Keeper, Stopped, find, load
from zmpi.cost.watch import watched
from zmpi.data import Batches, load_text
from zmpi.manners.guard import UsageError
from zmpi.manners.model_flags import SEEDS, build_model, model_flags, refuse_beyond_memory
from zmpi.manners.options import (
    Parser,
    auto_or_real,
    check_files,
    file_name,
    named_as_flags,
    real,
    whole,
)
from zmpi.manners.report import RunLog, opening, summary
from zmpi.manners.start import engine_of, start, world_flags
from zmpi.optim import SGD, AdamW
from zmpi.precision import RECIPES, Policy
from zmpi.saving import resume
from zmpi.trace import Trace, check_kind, write_trace

COMMAND = "zmpi.train"
OPTIMIZERS = {"adamw": AdamW, "sgd": SGD}
KEEP = 3  # checkpoints


def parser():
    """All flags. The names are a contract."""
    flags = Parser(COMMAND, __doc__)
    model_flags(flags.add_argument_group("model"))
    _training_flags(flags.add_argument_group("training"))
    _optimizer_flags(flags.add_argument_group("optimizer"))
    _run_flags(flags.add_argument_group("how it is run"))
    _output_flags(flags.add_argument_group("what is kept"))
    return flags


def _training_flags(group):
    add = group.add_argument
    add(
        "--data",
        type=file_name,
        default="builtin",
        help="builtin, a text file (tokens are bytes), or a .bin file (uint16)",
    )
    add("--micro-batch", type=whole(1), default=8, help="sequences per rank and micro-batch")
    add("--accumulate", type=whole(1), default=1, help="micro-batches per step and rank")
    add("--steps", type=whole(1), default=200, help="steps in total")
    add("--seed", type=whole(0, SEEDS), default=0, help="seed of weights and data")
    add(
        "--eval-every",
        type=whole(0),
        default=0,
        help="steps between evaluations (0: at the end only)",
    )


def _optimizer_flags(group):
    add = group.add_argument
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="update rule")
    add("--lr", type=real(0), default=3e-3, help="learning rate after the warm-up")
    add("--warmup", type=whole(0), default=20, help="steps over which the learning rate rises")
    add(
        "--schedule",
        choices=("cosine", "constant"),
        default="cosine",
        help="course of the learning rate after that",
    )
    add(
        "--decay-steps",
        type=whole(1),
        help="step at which cosine reaches a tenth of --lr (default: --steps)",
    )
    add("--clip", type=real(0), default=1.0, help="bound of the gradient's global norm (0: off)")
    add("--weight-decay", type=real(0), help="decoupled, on matrices only (default: 0.1; sgd: 0)")
    add("--beta1", type=real(0), help="decay of the first moment (default: 0.9; adamw only)")
    add("--beta2", type=real(0), help="decay of the second moment (default: 0.95; adamw only)")
    add(
        "--eps",
        type=real(0),
        help="added to the root of the second moment (default: 1e-8; adamw only)",
    )
    add(
        "--momentum", type=real(0), help="share of the last step's direction (default: 0; sgd only)"
    )


def _run_flags(group):
    add = group.add_argument
    add("--stage", type=int, choices=range(4), default=3, help="ZeRO stage: what is sharded")
    add(
        "--precision",
        choices=[name for name in RECIPES if name != "float64"],
        default="float32",
        help="number types",
    )
    add(
        "--loss-scale",
        type=auto_or_real(1),
        default="auto",
        help="auto, or a fixed number (float16 only)",
    )
    window = Policy.loss_scale_window
    add(
        "--loss-scale-window",
        type=whole(1),
        default=window,
        help="good steps before the loss scale doubles (float16 only)",
    )
    add(
        "--reduction",
        choices=("auto", "mpi", "ordered"),
        default="auto",
        help="who sums gradients: MPI, or the owner",
    )
    add(
        "--comm",
        type=file_name,
        metavar="FILE:CLASS",
        help="a Communicator or ZeRO of your own (default: zmpi, its own)",
    )
    add(
        "--prefetch",
        type=int,
        choices=(0, 1),
        default=1,
        help="gathers started before they are needed",
    )
    add(
        "--recompute",
        action="store_true",
        help="keep layer inputs only, and run each forward again",
    )
    world_flags(group)


def _output_flags(group):
    add = group.add_argument
    add("--log", type=file_name, metavar="FILE", help="one JSON object per step (default: no log)")
    add(
        "--checkpoint",
        type=file_name,
        metavar="DIR",
        help="folder of checkpoints, one job at a time (default: none)",
    )
    add("--save-every", type=whole(1), help="steps between checkpoints (default: at the end only)")
    add("--keep", type=whole(1), help="checkpoints that are kept (default: 3)")
    add(
        "--resume",
        action="store_true",
        help="go on from the newest complete checkpoint, with its training flags",
    )
    add(
        "--init-from",
        type=file_name,
        metavar="DIR",
        help="published GPT-2 to start from (default: fresh weights)",
    )
    trace = "timeline of the last 100 steps (.json, for Perfetto) or of one (.txt) (default: none)"
    add("--trace", type=file_name, metavar="FILE", help=trace)


def main(argv=None):
    """Run the command; what is wrong with it ends all ranks with one line."""
    args, world = start(parser(), argv)
    with world.agreed():
        _refuse(args)
    with (
        ExitStack() as held
    ):  # the folder of checkpoints: another job may have it when this one ends, however it does
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
            _check_files(args)
        text = load_text(args.data, args.context, args.vocab, world.rank, world.size)
        if manifest:
            resume.same_text(text, args, manifest)
    zero = _engine(args, world)
    if manifest:
        load(zero, manifest.folder)
    if args.init_from:
        with world.agreed():
            resume.init_from(zero, args.init_from)
    batches = Batches(text, world.rank, world.size, args.micro_batch, last_only=args.model == "mlp")
    if args.checkpoint and not keeper:
        keeper = _fresh(args, world, held)
    with world.agreed():
        log = RunLog(args.log, zero, args, argv)
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
    if manifest:
        resume.take_settings(args, parser().given(argv), manifest, world.size)
    elif args.init_from:
        resume.take_sizes(args, parser().given(argv))
    world.reduction = args.reduction


def _engine(args, world):
    """The engine of the flags, with fresh weights."""
    with world.agreed():
        if args.precision != "float16" and args.loss_scale_window != Policy.loss_scale_window:
            raise ValueError(
                f"--loss-scale-window: applies to --precision float16 only, not to {args.precision}"
            )
        engine, model, optimizer = engine_of(args.comm), build_model(args), _optimizer(args)
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


def _check_files(args):
    others = {
        "--data": None if args.data == "builtin" else args.data,
        "--checkpoint": args.checkpoint,
    }
    if args.comm and ":" in args.comm:
        others["--comm"] = args.comm.rpartition(":")[0]
    check_files({"--log": args.log, "--trace": args.trace}, others)


def _refuse(args):
    """Flags that contradict each other: never quietly ignored."""
    if args.schedule == "constant" and args.decay_steps is not None:
        raise ValueError("--decay-steps: --schedule constant has none")
    for name in ("save_every", "keep", "resume"):
        if getattr(args, name) and not args.checkpoint:
            raise ValueError(f"--{name.replace('_', '-')}: needs --checkpoint DIR")
    if args.resume and args.init_from:
        raise ValueError(
            "--init-from: --resume takes the weights from the checkpoint; give one of the two"
        )


def _optimizer(args):
    """The optimizer of the flags. A flag of the other kind is an error."""
    kind = OPTIMIZERS[args.optimizer]
    own = {field.name for field in fields(kind)}
    given = {
        name: getattr(args, name) for name in ("weight_decay", "beta1", "beta2", "eps", "momentum")
    }
    given = {name: value for name, value in given.items() if value is not None}
    foreign = [name for name in given if name not in own]
    if foreign:
        raise ValueError(
            f"--{foreign[0].replace('_', '-')}: does not apply to --optimizer {args.optimizer}"
        )
    shared = {"lr": args.lr, "warmup": args.warmup, "schedule": args.schedule, "clip": args.clip}
    with named_as_flags():
        return kind(**shared, decay_steps=args.decay_steps or args.steps, **given)


if __name__ == "__main__":
    main()
