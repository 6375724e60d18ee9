"""The flags of zmpi.bench."""

from zmpi.cli.model_flags import add_model_flags
from zmpi.cli.options import file_name, real, whole
from zmpi.cli.shared_flags import STEP_FLAGS, WORLD_FLAGS, add_shared


def add_bench_flags(flags):
    """Add all flags to the command's parser, in groups."""
    add_model_flags(flags.add_argument_group("model and data"))
    _what(flags.add_argument_group("workload"))
    run = flags.add_argument_group("execution")
    add_shared(run, *STEP_FLAGS, *WORLD_FLAGS, "--group")
    _outputs(flags.add_argument_group("output").add_argument)


def _what(group):
    add = group.add_argument
    add_shared(group, "--data", "--optimizer")
    add(
        "--stages",
        help="ZeRO stages, separated by commas; with --group, INSIDE,OUTSIDE pairs, separated by"
        " spaces (default: 0,1,2,3; 0,0 3,0 3,1 3,3)",
    )
    add_shared(group, "--precision", "--micro-batch", "--accumulate")
    add("--warm-up", type=whole(1), default=2, help="steps before the clock starts")
    add("--steps", type=whole(5), default=7, help="timed steps (their median counts)")
    add_shared(group, "--seed")
    add(
        "--sweep",
        choices=("ranks", "batch", "width"),
        help="repeat along one axis (default: no sweep)",
    )


def _outputs(add):
    add(
        "--flops",
        type=real(0, above=True),
        help="peak FLOPs per second of a rank, for utilisation (default: none)",
    )
    add("--json", type=file_name, metavar="FILE", help="all figures (default: none)")
    add(
        "--report",
        type=file_name,
        metavar="DIR",
        help="folder for pictures, and an HTML page with them and the tables (default: none)",
    )
