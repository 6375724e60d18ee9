"""The flags of zmpi.train, and which of them contradict each other."""

from zmpi.cli.model_flags import add_model_flags
from zmpi.cli.optimizer_flags import add_optimizer_flags
from zmpi.cli.options import auto_or, check_files, file_name, stage, whole
from zmpi.cli.shared_flags import OPTIMIZERS, STEP_FLAGS, WORLD_FLAGS, add_shared
from zmpi.numbers.precision import LOSS_SCALE, Policy
from zmpi.text.data import EVALUATED


def add_train_flags(flags):
    """Add all flags to the command's parser, in groups."""
    add_model_flags(flags.add_argument_group("model"))
    _training_flags(flags.add_argument_group("training"))
    add_optimizer_flags(flags.add_argument_group("optimizer"))
    run = flags.add_argument_group("execution")
    _state_flags(run)
    add_shared(run, *STEP_FLAGS, *WORLD_FLAGS)
    _output_flags(flags.add_argument_group("output"))


def _training_flags(group):
    add = group.add_argument
    add_shared(group, "--data", "--micro-batch", "--accumulate")
    add("--steps", type=whole(1), default=200, help="steps in total")
    add_shared(group, "--seed")
    add(
        "--eval-every",
        type=whole(0),
        default=0,
        help=f"steps between evaluations of up to {EVALUATED} sequences (0: only at the end)",
    )


def _state_flags(group):
    add = group.add_argument
    add(
        "--stage",
        type=stage,
        metavar="0|1|2|3|INSIDE,OUTSIDE",
        default=3,
        help="ZeRO stage: what is sharded; with --group, one inside the groups and one between",
    )
    add_shared(group, "--group")
    add_shared(group, "--precision")
    add(
        "--loss-scale",
        type=auto_or(LOSS_SCALE),
        default="auto",
        help="auto, or a fixed number (float16 only)",
    )
    add(
        "--loss-scale-window",
        type=whole(1),
        default=Policy.loss_scale_window,
        help="steps without overflow before the loss scale doubles (float16 only)",
    )


def _output_flags(group):
    add = group.add_argument
    add("--log", type=file_name, metavar="FILE", help="one JSON object per step (default: no log)")
    add(
        "--checkpoint",
        type=file_name,
        metavar="DIR",
        help="folder of checkpoints, one job at a time (default: none)",
    )
    add("--save-every", type=whole(1), help="steps between checkpoints (default: only at the end)")
    add("--keep", type=whole(1), help="number of checkpoints to keep (default: 3)")
    add(
        "--resume",
        action="store_true",
        help="continue from the newest complete checkpoint, with its training flags",
    )
    add(
        "--init-from",
        type=file_name,
        metavar="DIR",
        help="published GPT-2 to start from (default: fresh weights)",
    )
    trace = "timeline of the last 100 steps (.json, for Perfetto) or of one (.txt) (default: none)"
    add("--trace", type=file_name, metavar="FILE", help=trace)


def refuse(args):
    """Raise ValueError for flags that contradict each other, rather than ignore one."""
    if args.schedule == "constant" and args.decay_steps is not None:
        raise ValueError("--decay-steps: does not apply to --schedule constant")
    both = args.decay_steps is not None and args.optimizer in OPTIMIZERS
    if both and not args.resume and args.decay_steps <= args.warmup:
        raise ValueError(
            f"--decay-steps: expected more than --warmup {args.warmup}, got {args.decay_steps}"
        )
    for name in ("save_every", "keep", "resume"):
        if getattr(args, name) and not args.checkpoint:
            raise ValueError(f"--{name.replace('_', '-')}: needs --checkpoint DIR")
    if args.resume and args.init_from:
        raise ValueError(
            "--init-from: --resume takes the weights from the checkpoint; use only one of them"
        )


def check_outputs(args):
    """Raise ValueError, before the run, if a file cannot be written or is given twice."""
    others = {
        "--data": None if args.data == "builtin" else args.data,
        "--checkpoint": args.checkpoint,
    }
    for name in ("comm", "model", "optimizer"):
        if ":" in (getattr(args, name) or ""):
            others[f"--{name}"] = getattr(args, name).rpartition(":")[0]
    check_files({"--log": args.log, "--trace": args.trace}, others)
