"""A linear map without bias, and a GELU that adds it: one pass over memory does both."""

import numpy as np

from models.ops import GELU_0, GELU_1, add_product, column_sums, flat_rows, row_blocks
from models.twins import on_gpu


def product(x, w_CF):
    """y = x @ w, (..., C) -> (..., F)."""
    return np.matmul(flat_rows(x), w_CF).reshape(*x.shape[:-1], -1)


def product_backward(dy, x, w_CF, dw_CF):
    """Of y = x @ w: returns a new dx = dy @ w.T, adds x.T @ dy to dw."""
    dy_NF = flat_rows(dy)
    add_product(dw_CF, flat_rows(x).T, dy_NF)
    return np.matmul(dy_NF, w_CF.T).reshape(x.shape)


@on_gpu
def bias_gelu(x, b_F):
    """y = gelu(x + b), leaving dy/dx in x's memory for the backward: tanh is computed only once.

    As in ops.gelu_backward: y = x s, s = (1 + tanh u) / 2, ds/dx = 2 s (1 - s) u', so
    dy/dx = s + y (1 - s) 2 u'.
    """
    y = np.empty_like(x)
    x_NF, y_NF = flat_rows(x), flat_rows(y)
    s_SF, slope_SF = np.empty_like(x_NF, shape=(2, *x_NF[next(row_blocks(x_NF))].shape))
    for rows in row_blocks(x_NF):
        x_RF = x_NF[rows]
        s_RF, slope_RF = s_SF[: len(x_RF)], slope_SF[: len(x_RF)]
        x_RF += b_F
        np.multiply(x_RF, x_RF, out=slope_RF)
        np.multiply(slope_RF, GELU_1, out=s_RF)
        s_RF += GELU_0
        s_RF *= x_RF  # u
        np.tanh(s_RF, out=s_RF)
        s_RF *= 0.5
        s_RF += 0.5
        y_RF = np.multiply(x_RF, s_RF, out=y_NF[rows])
        slope_RF *= 6 * GELU_1
        slope_RF += 2 * GELU_0  # 2 u'
        slope_RF *= y_RF
        slope_RF *= np.subtract(1.0, s_RF, out=x_RF)
        np.add(slope_RF, s_RF, out=x_RF)
    return y


@on_gpu
def bias_gelu_backward(dy, slope, db_F):
    """Of y = gelu(x + b), with its slope: returns dx in dy's memory, adds its rows to db."""
    dy *= slope
    db_F += column_sums(flat_rows(dy))
    return dy
