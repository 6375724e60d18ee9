"""What a layer is, which layers share parameters, and the plain loop: a step without ZeRO."""

import hashlib
from dataclasses import dataclass
from math import prod

import numpy as np


class Layer:
    """A stateless recipe: it owns no arrays. Every call receives the weights, and never keeps them.

    name: "h.0". unit: the unit it shares with other layers; None: a unit of its own, called `name`.
    backward_needs_weights: False lets the caller pass an empty w to backward.

    `w` and `dw`: {local parameter name: array}, views of the unit's vectors, at any alignment.
    """

    name: str
    unit: str | None = None
    backward_needs_weights = True

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{local name: shape} of all parameters that forward or backward reads."""
        raise NotImplementedError

    def init(self, w, key) -> None:
        """Assign w[name][...] = ... from key(local name), each parameter's random generator."""
        raise NotImplementedError

    def forward(self, w, x):
        """Returns (y, saved): a new y, x unchanged; `saved` is for backward and has no weights."""
        raise NotImplementedError

    def backward(self, w, dw, saved, dy):
        """Add (`+=`) to dw; returns dx, or None from the first layer.

        May overwrite saved and dy, and return dy.
        """
        raise NotImplementedError


class Recomputed(Layer):
    """A layer that saves only its input, and repeats its forward in the backward."""

    def __init__(self, layer):
        self.layer = layer
        self.name, self.unit = layer.name, layer.unit

    def shapes(self):
        return self.layer.shapes()

    def forward(self, w, x):
        return self.layer.forward(w, x)[0], x

    def backward(self, w, dw, kept, dy):
        kept = self.layer.forward(w, kept)[1]  # replaces the input, which can be freed
        return self.layer.backward(w, dw, kept, dy)


@dataclass(frozen=True)
class UnitSpec:
    """One unit: {local name: shape}; `prefix` ("h.0." or "") + local name is the full name."""

    prefix: str
    shapes: dict[str, tuple[int, ...]]


def unit_of(layer) -> str:
    """The name of the unit that holds the layer's parameters."""
    return layer.unit or layer.name


def units(model) -> dict[str, UnitSpec]:
    """The model's units in order of first appearance, with the shapes of all layers that share one.

    Raises ValueError if layers disagree on a shape, or use one unit's name without sharing it.
    """
    specs = {}
    for i, layer in enumerate(model.layers):
        if layer in model.layers[:i]:
            raise ValueError(f"model: layer {layer.name} appears twice; make two layers")
        unit = unit_of(layer)
        prefix = "" if layer.unit else f"{layer.name}."
        spec = specs.setdefault(unit, UnitSpec(prefix, {}))
        if spec.prefix != prefix or (prefix and spec.shapes):
            raise ValueError(f"unit {unit}: two layers use this name, but not both share the unit")
        for name, shape in layer.shapes().items():
            if spec.shapes.setdefault(name, shape) != shape:
                shapes = f"shape {spec.shapes[name]} in one layer, {shape} in another"
                raise ValueError(f"unit {unit}: {name} has {shapes}")
    return specs


def parameter_count(model) -> int:
    """The model's parameters, those of tied layers once."""
    return sum(prod(shape) for unit in units(model).values() for shape in unit.shapes.values())


def key_for(seed: int, prefix: str):
    """Returns key(local name) -> NumPy Generator, which depends only on seed and full name."""

    def key(name):
        digest = hashlib.sha256(f"{seed} {prefix}{name}".encode()).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))

    return key


def init_normal(w, key, name, std):
    """Assign normal numbers to w[name], drawn in float32 so that all precisions start equal."""
    draw = key(name).standard_normal(w[name].shape, dtype=np.float32)
    draw *= std
    w[name][...] = draw


def check_sizes(**sizes):
    """The sizes as Python ints; ValueError, by name, for the first not a whole number from 1 on."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
            raise ValueError(f"{name}: expected a whole number of at least 1, got {size!r}")
        if size < 1:
            raise ValueError(f"{name}: expected a whole number of at least 1, got {size}")
    return map(int, sizes.values())


# ---- a model's inputs ----------------------------------------------------------------------------


def check_tokens(inputs, targets, vocab):
    """Raise ValueError for the first token outside the vocabulary, with its position.

    Inputs are in 0 ... vocab - 1, targets below vocab (below 0: not counted). A negative index
    would wrap on a CPU, any wrong one on a GPU. Arrays of any shape.
    """
    for name, tokens in (("inputs", inputs), ("targets", targets)):
        if tokens.dtype.kind not in "iu":
            raise ValueError(f"{name}: expected whole numbers, got {tokens.dtype}")
    for name, tokens, expected, wrong in (
        ("inputs", inputs, "0 to", (inputs < 0) | (inputs >= vocab)),
        ("targets", targets, "at most", targets >= vocab),
    ):
        if wrong.any():
            place = tuple(map(int, np.unravel_index(int(wrong.argmax()), wrong.shape)))
            raise ValueError(
                f"{name}{list(place)}: expected a token of {expected} {vocab - 1}"
                f" (vocabulary {vocab}), got {int(tokens[place])}"
            )


def refused(model, micro_batches):
    """The first error of the model's check(inputs, targets), if it has one, as a line, or None."""
    check = getattr(model, "check", None)
    for m, micro_batch in enumerate(micro_batches if check else ()):
        try:
            check(*micro_batch)
        except ValueError as error:
            return f"micro-batch {m}: {error}"
    return None


# ---- the plain loop ------------------------------------------------------------------------------


def plain_weights(model, seed, dtype):
    """The model's initial weights, {unit: {local name: array}}, as new arrays."""
    specs = units(model)
    weights = {unit: {} for unit in specs}
    for unit, spec in specs.items():
        for name, shape in spec.shapes.items():
            weights[unit][name] = np.zeros(shape, dtype)
    for layer in model.layers:
        unit = unit_of(layer)
        layer.init(weights[unit], key_for(seed, specs[unit].prefix))
    return weights


def plain_step(model, weights, micro_batches, update):
    """One step: the mean loss's gradient over all micro-batches, then update(weights, gradients).

    weights, gradients: {unit: {local name: array}}; micro_batches: [(inputs, targets), ...].
    Returns the mean loss before the update. Raises ValueError if no target counts (all are below
    0), or the model's check fails.
    """
    fault = refused(model, micro_batches)
    if fault:
        raise ValueError(fault)
    counted = sum(int((targets >= 0).sum()) for _, targets in micro_batches)
    if counted == 0:
        raise ValueError(
            f"targets: expected one of at least 0, got none in {len(micro_batches)} micro-batches"
        )
    gradients, loss_sum = zeros_like(weights), 0.0
    for inputs, targets in micro_batches:
        partial = zeros_like(weights)
        loss_sum += forward_backward(model, weights, partial, (inputs, targets), counted)
        for unit in gradients:
            for name in gradients[unit]:
                gradients[unit][name] += partial[unit][name]
    update(weights, gradients)
    return loss_sum / counted


def forward_backward(model, weights, gradients, micro_batch, divisor):
    """Add a micro-batch's gradient of (loss sum / divisor) to `gradients`; returns the loss sum."""
    (x, targets), kept = micro_batch, {}
    *layers, last = model.layers

    for layer in layers:
        w = weights[unit_of(layer)]
        x, kept[layer] = layer.forward(w, x)

    w, dw = weights[unit_of(last)], gradients[unit_of(last)]
    loss_sum, dx = turn(model, w, dw, x, targets, divisor)

    for layer in reversed(layers):
        w, dw = weights[unit_of(layer)], gradients[unit_of(layer)]
        dx = layer.backward(w, dw, kept.pop(layer), dx)
    return loss_sum


def turn(model, w, dw, x, targets, divisor):
    """Where forward becomes backward: the last layer's forward, the loss, and the layer's backward.

    Adds to dw; returns (loss sum, gradient of (loss sum / divisor) with respect to x).
    """
    last = model.layers[-1]
    y, saved = last.forward(w, x)
    loss_sum, dy = model.loss(y, targets, divisor)
    return loss_sum, last.backward(w, dw, saved, dy)


def zeros_like(weights):
    """Zeros with the same names and shapes."""
    return {
        unit: {name: np.zeros_like(array) for name, array in w.items()}
        for unit, w in weights.items()
    }


def one_target(model):
    """Whether a window has one target, its last token, instead of one per position."""
    return bool(getattr(model, "one_target", False))
