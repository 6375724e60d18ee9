"""Pairs that leave the bias out of a linear map and give it to the GELU after it: on a GPU both are one launch."""

import numpy as np

from models.ops import add_product, flat_rows, gelu, gelu_backward
from models.twins import on_gpu


def product(x, w_CF):
    """y = x @ w, (..., C) -> (..., F)."""
    return np.matmul(flat_rows(x), w_CF).reshape(*x.shape[:-1], -1)


def product_backward(dy, x, w_CF, dw_CF):
    """Of y = x @ w: returns dx = dy @ w.T in new memory, adds x.T @ dy onto dw."""
    dy_NF = flat_rows(dy)
    add_product(dw_CF, flat_rows(x).T, dy_NF)
    return np.matmul(dy_NF, w_CF.T).reshape(x.shape)


@on_gpu
def bias_gelu(x, b_F):
    """y = gelu(x + b). x + b, which the backward needs, stays in x's memory."""
    x += b_F
    return gelu(x)


@on_gpu
def bias_gelu_backward(dy, x, db_F):
    """Of y = gelu(x + b), with x + b in x's place: returns dx in dy's memory, adds the sum of its rows onto db."""
    dx = gelu_backward(dy, x)
    db_F += flat_rows(dx).sum(axis=0)
    return dx
