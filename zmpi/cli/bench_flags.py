"""The flags of zmpi.bench."""

from zmpi.cli.model_flags import SEEDS, add_model_flags
from zmpi.cli.optimizer_flags import OPTIMIZERS
from zmpi.cli.options import file_name, real, whole
from zmpi.cli.own import own_or
from zmpi.cli.start import add_world_flags
from zmpi.cli.train_flags import add_step_flags
from zmpi.numbers.precision import RECIPES


def add_bench_flags(flags):
    """Add all flags to the command's parser, in groups."""
    add_model_flags(flags.add_argument_group("model and data"))
    _what(flags.add_argument_group("what is run").add_argument)
    run = flags.add_argument_group("how it is run")
    add_step_flags(run)
    add_world_flags(run)
    _outputs(flags.add_argument_group("what comes out").add_argument)


def _what(add):
    add(
        "--data",
        type=file_name,
        default="builtin",
        help="builtin, a text file (tokens are bytes), or a .bin file (uint16)",
    )
    add(
        "--optimizer",
        type=own_or(*OPTIMIZERS),
        metavar="|".join([*OPTIMIZERS, "FILE:CLASS"]),
        default="adamw",
        help="adamw or sgd, or FILE:CLASS, your own",
    )
    add("--stages", default="0,1,2,3", help="ZeRO stages, with commas between")
    add(
        "--precision",
        choices=[name for name in RECIPES if name != "float64"],
        default="float32",
        help="number types",
    )
    add("--micro-batch", type=whole(1), default=8, help="sequences per rank and micro-batch")
    add("--accumulate", type=whole(1), default=1, help="micro-batches per step and rank")
    add("--warm-up", type=whole(1), default=2, help="steps before the clock starts")
    add("--steps", type=whole(5), default=7, help="timed steps, the median of which counts")
    add("--seed", type=whole(0, SEEDS), default=0, help="seed of weights and data")
    add(
        "--sweep",
        choices=("ranks", "batch", "width"),
        help="repeat it over one axis (default: no sweep)",
    )


def _outputs(add):
    add(
        "--flops",
        type=real(0, above=True),
        help="FLOPs per second that a rank could reach, for utilisation (default: none)",
    )
    add("--json", type=file_name, metavar="FILE", help="all figures (default: none)")
    add(
        "--report",
        type=file_name,
        metavar="DIR",
        help="pictures, and one HTML page with them and the tables (default: none)",
    )
