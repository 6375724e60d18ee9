"""The model of a command line."""

import os
from math import prod

from models import GPT, MLP
from models.layer import units
from zmpi.manners.options import named_as_flags, whole
from zmpi.manners.table import in_bytes
from zmpi.precision import RECIPES
from zmpi.stages import STAGES, state_bytes

SEEDS = 1 << 64


def model_flags(group):
    """Add the flags that choose the model."""
    add = group.add_argument
    add(
        "--model",
        choices=("transformer", "mlp"),
        default="transformer",
        help="GPT-2, or a multilayer perceptron",
    )
    add("--layers", type=whole(1), default=2, help="transformer blocks, or hidden layers")
    add("--width", type=whole(1), default=128, help="channels")
    add("--heads", type=int, help="attention heads (default: 4; transformer only)")
    add("--context", type=whole(1), default=64, help="tokens that a prediction sees at most")
    add("--vocab", type=whole(1), default=256, help="number of different tokens")


def build_model(args, **changed):
    """The model of the flags, some of them `changed`. Raises ValueError, which names the flag, for what does not fit."""
    get = {**vars(args), **changed}.get
    sizes = get("width"), get("context"), get("vocab")
    if get("model") == "mlp" and get("heads") is not None:
        raise ValueError(f"--heads: {get('heads')} given, but --model mlp has no attention")
    with named_as_flags():
        if get("model") == "mlp":
            return MLP(get("layers"), *sizes)
        width, context, vocab = sizes
        return GPT(
            get("layers"), width, 4 if get("heads") is None else get("heads"), context, vocab
        )


def refuse_beyond_memory(args, model, world, stage):
    """Raise ValueError, before a byte is taken, for what this machine cannot hold: Linux ends such processes much later."""
    if world.device.name != "cpu":
        return
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    parameters = sum(
        prod(shape) for unit in units(model).values() for shape in unit.shapes.values()
    )
    state = state_bytes(STAGES[stage], parameters, world.size, RECIPES[args.precision])
    tokens = args.micro_batch * (args.context + 1)
    needed = {
        f"--width: the state of {parameters:,} parameters": sum(state.values()),
        f"--micro-batch: a layer's input, {args.micro_batch} sequences,": 4 * tokens * model.width,
        f"--accumulate: the tokens of {args.accumulate} x {args.micro_batch} sequences": 8
        * tokens
        * args.accumulate,
    }
    for what, nbytes in needed.items():
        if nbytes > there:
            raise ValueError(
                f"{what} would take {in_bytes(nbytes)} on each rank, this machine has {in_bytes(there)}"
            )
