"""Flags shared by several commands, each declared once."""

from zmpi.cli.options import file_name, group, real, whole
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
        "help": "folder of checkpoints (uses the newest), or one checkpoint",
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
        "help": "adamw, sgd, or your own FILE:CLASS",
    },
    "--precision": {
        "choices": [name for name in RECIPES if name != "float64"],
        "default": "float32",
        "help": "number types",
    },
    "--reduction": {
        "choices": ("auto", "mpi", "ordered"),
        "default": "auto",
        "help": "what sums gradients: MPI, or their owner in rank order",
    },
    "--comm": {
        "type": own_or("zmpi"),
        "metavar": "FILE:CLASS",
        "help": "your own Communicator or ZeRO (default: zmpi's)",
    },
    "--prefetch": {
        "type": int,
        "choices": (0, 1),
        "default": 1,
        "help": "gathers started before they are needed",
    },
    "--recompute": {
        "action": "store_true",
        "help": "save only layers' inputs, and repeat each forward in the backward",
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
    "--group": {
        "type": group,
        "metavar": "G|node",
        "help": "ranks per group, or node: those that share memory (default: no groups)",
    },
    "--timeout": {
        "type": real(0, above=True),
        "default": 300,
        "help": "seconds after which a stuck collective ends the run",
    },
}

STEP_FLAGS = ("--reduction", "--comm", "--prefetch", "--recompute")  # how a step runs
WORLD_FLAGS = ("--device", "--transport", "--timeout")  # arguments of a World


def add_shared(group, *flags, what=None, **defaults):
    """Add flags of the table. `what`: the command's own help text; `defaults`: its own, by name."""
    for flag in flags:
        settings, name = SHARED_FLAGS[flag], flag.removeprefix("--").replace("-", "_")
        own = {"help": what} if what else {}
        own |= {"default": defaults[name]} if name in defaults else {}
        group.add_argument(flag, **{**settings, **own})
