"""Builds the model from the command line."""

import os

from models import GPT, MLP
from models.layer import parameter_count, units
from zmpi.cli.options import named_as_flags, whole
from zmpi.cli.own import FileClass, accepts, call, load_class, own_or
from zmpi.core.formulas import state_bytes
from zmpi.core.stages import placement
from zmpi.numbers.domains import Domain
from zmpi.numbers.precision import RECIPES
from zmpi.process.launch import ranks_on_this_node
from zmpi.process.machine import node_memory
from zmpi.process.table import in_bytes

MODEL_KINDS = ("transformer", "mlp")
DEFAULT_SIZES = {"layers": 2, "width": 128, "heads": 4, "context": 64, "vocab": 256}
# sizes that the data depends on; a model without them gets the flags'
DATA_SIZES = ("context", "vocab")
LAYER = ("name", "unit", "backward_needs_weights", "shapes", "init", "forward", "backward")


def add_model_flags(group, own=True):
    """Add the flags that choose the model; `own`: allow FILE:CLASS."""
    add = group.add_argument
    names = (
        {"type": own_or(*MODEL_KINDS), "metavar": "|".join([*MODEL_KINDS, "FILE:CLASS"])}
        if own
        else {"choices": MODEL_KINDS}
    )
    kinds = "transformer (GPT-2) or mlp (a multilayer perceptron)"
    add(
        "--model",
        **names,
        default="transformer",
        help=f"{kinds}, or your own FILE:CLASS" if own else kinds,
    )
    sizes = {
        "layers": "transformer blocks, or hidden layers",
        "width": "channels",
        "heads": "attention heads (default: 4; transformer only)",
        "context": "maximum tokens that a prediction sees",
        "vocab": "number of different tokens",
    }
    for name, what in sizes.items():
        default = None if name == "heads" else DEFAULT_SIZES[name]
        add(f"--{name}", type=whole(1), default=default, help=what)


def build_model(args, **changed):
    """The model of the flags, with some `changed`; ValueError, naming the flag, on conflict."""
    get = {**vars(args), **changed}.get
    if isinstance(get("model"), FileClass):
        sizes = {name: get(name) for name in DEFAULT_SIZES}
        return _own_model(
            get("model"), sizes, {name: sizes[name] or DEFAULT_SIZES[name] for name in DATA_SIZES}
        )
    sizes = get("width"), get("context"), get("vocab")
    if get("model") == "mlp" and get("heads") is not None:
        raise ValueError(f"--heads: {get('heads')} given, but --model mlp has no attention")
    with named_as_flags():
        if get("model") == "mlp":
            return MLP(get("layers"), *sizes)
        width, context, vocab = sizes
        heads = DEFAULT_SIZES["heads"] if get("heads") is None else get("heads")
        return GPT(get("layers"), width, heads, context, vocab)


def own_model(place, *tried):
    """Your own model, with the first of several {name: size} that it accepts.

    It gets the sizes that are its parameters. Raises the last ValueError if it accepts none.
    """
    found = load_class("--model", place)
    for sizes in tried:
        try:
            taken = {name: size for name, size in sizes.items() if accepts(found, name)}
            return _own_model(place, taken, sizes)
        except ValueError as error:
            fault = error
    raise fault


def _own_model(place, sizes, window):
    """Your own model, called with the sizes that are not None; `window`: its default data sizes."""
    model = call("--model", place, load_class("--model", place), sizes, DEFAULT_SIZES)
    layers, loss = getattr(model, "layers", None), getattr(model, "loss", None)
    if not isinstance(layers, (list, tuple)) or not layers or not callable(loss):
        raise ValueError(f"--model: {place} needs `layers`, a list, and `loss`, a method")
    for layer in layers:
        missing = [name for name in LAYER if not hasattr(layer, name)]
        if missing:
            kind = type(layer).__name__
            raise ValueError(
                f"--model: {place}: layer {kind} has no {missing[0]}; make it a models.Layer"
            )
    try:
        units(model)
        for name in DATA_SIZES:
            size = Domain(1, whole=True).of(name, getattr(model, name, window[name]))
            object.__setattr__(model, name, size)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"--model: {place}: {error}") from None
    return model


def refuse_beyond_memory(args, model, world, stage):
    """Raise ValueError, before allocating, if memory is too small: Linux would kill it later."""
    if world.device.name != "cpu":
        return
    ranks, (there, bound) = ranks_on_this_node(os.environ), node_memory()
    parameters = parameter_count(model)
    sizes = [axis.size for axis in world.axes]
    state = state_bytes(placement(stage, len(sizes)), parameters, sizes, RECIPES[args.precision])
    tokens = args.micro_batch * (model.context + 1)
    needed = {
        f"--width: the state of {parameters:,} parameters": sum(state.values()),
        f"--micro-batch: a layer's input, {args.micro_batch} sequences,": (
            4 * tokens * getattr(model, "width", 1)
        ),
        f"--accumulate: the tokens of {args.accumulate} x {args.micro_batch} sequences": (
            8 * tokens * args.accumulate
        ),
    }
    for what, nbytes in needed.items():
        if ranks * nbytes > there:
            each = f" on each of {ranks} ranks" if ranks > 1 else ""
            raise ValueError(
                f"{what} would take {in_bytes(nbytes)}{each}; {bound} {in_bytes(there)}"
            )
