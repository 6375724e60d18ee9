"""What every worker trains: model, weights, batches, hyperparameters. Imports no zmpi."""

from pydoc_data.topics import topics

import numpy as np

from models import GPT
from models.layer import key_for, unit_of, units

SEED = 0
ADAMW = {
    "lr": 2e-5,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
}  # as early in a warm-up: training is calm, and rounding does not grow
WEIGHT_DECAY = 0.1  # of tensors of two and more dimensions
CLIP = 1.0


def adamw_of_zmpi():
    """The arguments of zmpi's AdamW for the same."""
    beta1, beta2 = ADAMW["betas"]
    numbers = {"lr": ADAMW["lr"], "beta1": beta1, "beta2": beta2, "eps": ADAMW["eps"]}
    return {**numbers, "weight_decay": WEIGHT_DECAY, "clip": CLIP}


def model_of(shape):
    """The GPT of a Shape."""
    return GPT(shape.layers, shape.width, shape.heads, shape.context, shape.vocab)


def initial_weights(model):
    """(full name, array) of every parameter as zmpi initialises it, one unit at a time."""
    for name, spec in units(model).items():
        arrays = {local: np.zeros(shape, np.float32) for local, shape in spec.shapes.items()}
        for layer in model.layers:
            if unit_of(layer) == name:
                layer.init(arrays, key_for(SEED, spec.prefix))
        for local, array in arrays.items():
            yield spec.prefix + local, array


class Batches:
    """Windows of Python's help texts: bytes, or pairs of bytes spread over a larger vocabulary."""

    def __init__(self, shape, rank, size):
        self.shape, self.rank, self.size = shape, rank, size
        text = np.frombuffer(
            "".join(topics[key] for key in sorted(topics)).encode(), np.uint8
        ).astype(np.int64)
        self.tokens = text if shape.vocab <= 256 else (text[:-1] * 256 + text[1:]) % shape.vocab

    def of_step(self, step):
        """This rank's (inputs, targets), int64 (B, T) each, of the step (counted from 0)."""
        shape = self.shape
        draw = np.random.default_rng([SEED, step])
        starts = draw.integers(len(self.tokens) - shape.context, size=shape.micro_batch * self.size)
        mine = starts[self.rank * shape.micro_batch : (self.rank + 1) * shape.micro_batch]
        window_BT = self.tokens[mine[:, None] + np.arange(shape.context + 1)]
        return window_BT[:, :-1].copy(), window_BT[:, 1:].copy()
