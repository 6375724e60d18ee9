"""The flags that several commands share, each declared once."""

from zmpi.cli.options import file_name, real, whole
from zmpi.cli.own import own_or
from zmpi.numbers.optim import SGD, AdamW
from zmpi.numbers.precision import RECIPES

SEEDS = 1 << 64
OPTIMIZERS = {"adamw": AdamW, "sgd": SGD}

SHARED_FLAGS = {
    "--checkpoint": {
        "type": file_name,
        "metavar": "DIR",
        "required": True,
        "help": "folder of checkpoints (takes the newest), or one",
    },
    "--data": {
        "type": file_name,
        "default": "builtin",
        "help": "builtin, a text file (tokens are bytes), or a .bin file (uint16)",
    },
    "--micro-batch": {
        "type": whole(1),
        "default": 8,
        "help": "sequences per rank and micro-batch",
    },
    "--accumulate": {"type": whole(1), "default": 1, "help": "micro-batches per step and rank"},
    "--seed": {"type": whole(0, SEEDS), "default": 0, "help": "seed of weights and data"},
    "--optimizer": {
        "type": own_or(*OPTIMIZERS),
        "metavar": "|".join([*OPTIMIZERS, "FILE:CLASS"]),
        "default": "adamw",
        "help": "adamw or sgd, or FILE:CLASS, your own",
    },
    "--precision": {
        "choices": [name for name in RECIPES if name != "float64"],
        "default": "float32",
        "help": "number types",
    },
    "--reduction": {
        "choices": ("auto", "mpi", "ordered"),
        "default": "auto",
        "help": "who sums gradients: MPI, or the owner",
    },
    "--comm": {
        "type": own_or("zmpi"),
        "metavar": "FILE:CLASS",
        "help": "a Communicator or ZeRO of your own (default: zmpi, its own)",
    },
    "--prefetch": {
        "type": int,
        "choices": (0, 1),
        "default": 1,
        "help": "gathers started before they are needed",
    },
    "--recompute": {
        "action": "store_true",
        "help": "keep layer inputs only, and run each forward again",
    },
    "--device": {
        "choices": ("auto", "cpu", "cuda"),
        "default": "auto",
        "help": "where arrays live",
    },
    "--transport": {
        "choices": ("auto", "direct", "staged"),
        "default": "auto",
        "help": "how device memory reaches MPI",
    },
    "--timeout": {
        "type": real(0, above=True),
        "default": 300,
        "help": "seconds after which a stuck collective ends the run",
    },
}

STEP_FLAGS = ("--reduction", "--comm", "--prefetch", "--recompute")  # how a step is carried out
WORLD_FLAGS = ("--device", "--transport", "--timeout")  # what a World is made of


def add_shared(group, *flags, what=None, **defaults):
    """Add flags of the table. `what` is a command's own help text, `defaults` are its own, by name."""
    for flag in flags:
        settings, name = SHARED_FLAGS[flag], flag.removeprefix("--").replace("-", "_")
        own = {"help": what} if what else {}
        own |= {"default": defaults[name]} if name in defaults else {}
        group.add_argument(flag, **{**settings, **own})
