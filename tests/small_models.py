"""Small models for finite differences, with weights and a batch; and all arrays of nested dicts."""

import numpy as np
import pytest

from models import GPT, MLP, plain_weights

SMALL_GPT = {"layers": 2, "width": 6, "heads": 3, "context": 5, "vocab": 11}
SMALL_MLP = {"layers": 2, "width": 6, "context": 5, "vocab": 11}


def gpt_case(dtype=np.float64):
    """A model, weights that give no tiny gradients, and a batch with repeated tokens."""
    model = GPT(**SMALL_GPT)
    inputs = np.array([[3, 1, 3, 10, 0], [7, 7, 2, 1, 3], [0, 9, 9, 9, 1]])
    targets = np.array([[1, 3, 10, 0, -1], [7, 2, -1, 3, 5], [9, 9, 9, 1, 0]])
    return model, spread(plain_weights(model, 0, dtype)), (inputs, targets)


def mlp_case(dtype=np.float64):
    model = MLP(**SMALL_MLP)
    inputs = np.array([[3, 1, 3, 10, 0], [7, 7, 2, 1, 3], [0, 9, 9, 9, 1]])
    return model, spread(plain_weights(model, 0, dtype)), (inputs, np.array([4, -1, 4]))


def spread(weights):
    rng = np.random.default_rng(0)
    for w in weights.values():
        for array in w.values():
            array += 0.3 * rng.standard_normal(array.shape)
    return weights


both_models = pytest.mark.parametrize("case", [gpt_case, mlp_case])


def arrays_of(nested):
    """All arrays in nested dicts, tuples and lists, with their place."""
    if hasattr(nested, "dtype"):
        yield "", nested
    else:
        items = nested.items() if isinstance(nested, dict) else enumerate(nested)
        for key, value in items:
            for place, array in arrays_of(value):
                yield f"{key} {place}", array
