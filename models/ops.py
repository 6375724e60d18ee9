"""Operations in pairs: forward, and directly below it the backward that quotes it.

Shapes: B sequences, T positions, C channels, F features of a linear map, N rows (B and T
flattened), V vocabulary, R rows of one block. `...` are any leading axes. Causal attention has its
own file.

A forward never writes to its inputs and returns new memory. A backward takes its output's gradient
first and adds (`+=`) to the gradients of parameters; its docstring says if it may overwrite `dy`.
Results have the inputs' dtype. All functions used dispatch on the array type: one source serves
NumPy and CuPy. Those marked `on_gpu` have a fused twin in kernels.py, used for CuPy arrays.
"""

import math

import numpy as np

from models.twins import on_gpu

BLOCK = 1 << 16  # elements: 256 KiB of float32, of which a few fit into a level 2 cache
PRODUCT = 1 << 20  # elements of a block of a matrix product: large enough for full speed
EPS = 1e-5  # layer norm, as in GPT-2
GELU_0, GELU_1 = math.sqrt(2 / math.pi), 0.044715 * math.sqrt(2 / math.pi)


def row_blocks(x_NF, elements=BLOCK):
    """Yield slices of rows, of about `elements`: elementwise chains run in place, in cache."""
    rows = max(1, elements // x_NF.shape[1])
    for start in range(0, len(x_NF), rows):
        yield slice(start, start + rows)


def flat_rows(x):
    """x of shape (..., F) as (N, F), a view if possible."""
    return x.reshape(-1, x.shape[-1])


def column_sums(x_NF):
    """The sum of x's rows, (F,), as a product: BLAS is several times faster than sum()."""
    return np.matmul(np.ones_like(x_NF, shape=len(x_NF)), x_NF)


# ---- linear --------------------------------------------------------------------------------------


@on_gpu
def add_product(dw_MN, a_MK, b_KN):
    """dw += a @ b. On a GPU dw may be wider than a and b, without rounding to their 16 bits."""
    for rows in row_blocks(dw_MN, PRODUCT):  # avoids a temporary as large as an embedding
        dw_RN = dw_MN[rows]
        dw_RN += np.matmul(a_MK[rows], b_KN)


@on_gpu
def linear(x, w_CF, b_F):
    """y = x @ w + b, (..., C) -> (..., F)."""
    y_NF = np.matmul(flat_rows(x), w_CF)
    y_NF += b_F
    return y_NF.reshape(*x.shape[:-1], -1)


@on_gpu
def linear_backward(dy, x, w_CF, dw_CF, db_F):
    """Of y = x @ w + b: returns a new dx = dy @ w.T, adds x.T @ dy to dw and dy's rows to db."""
    dy_NF = flat_rows(dy)
    add_product(dw_CF, flat_rows(x).T, dy_NF)
    db_F += column_sums(dy_NF)
    return np.matmul(dy_NF, w_CF.T).reshape(x.shape)


# ---- GELU ----------------------------------------------------------------------------------------


@on_gpu
def gelu(x):
    """y = x (1 + tanh u) / 2, u = sqrt(2/pi) (x + 0.044715 x^3).

    Hendrycks and Gimpel 2016, GPT-2's form.
    """
    y = np.empty_like(x)
    x_NF, y_NF = flat_rows(x), flat_rows(y)
    for rows in row_blocks(x_NF):
        x_RF, y_RF = x_NF[rows], y_NF[rows]
        np.multiply(x_RF, x_RF, out=y_RF)
        y_RF *= GELU_1
        y_RF += GELU_0
        y_RF *= x_RF  # u
        np.tanh(y_RF, out=y_RF)
        y_RF += 1.0
        y_RF *= x_RF
        y_RF *= 0.5
    return y


@on_gpu
def gelu_backward(dy, x):
    """Of y = x (1 + tanh u) / 2: returns dx, in dy's memory.

    With s = (1 + tanh u) / 2, which is the sigmoid of 2u, y = x s and ds/dx = 2 s (1 - s) u', so
    dy/dx = s (1 + (1 - s) 2 x u') with 2 x u' = 2 x sqrt(2/pi) (1 + 3 * 0.044715 x^2).
    """
    x_NF, dy_NF = flat_rows(x), flat_rows(dy)
    for rows in row_blocks(x_NF):
        x_RF = x_NF[rows]
        slope_RF = np.multiply(x_RF, x_RF)
        s_RF = np.multiply(slope_RF, GELU_1)
        s_RF += GELU_0
        s_RF *= x_RF
        np.tanh(s_RF, out=s_RF)
        s_RF *= -0.5
        s_RF += 0.5  # 1 - s
        slope_RF *= 6 * GELU_1
        slope_RF += 2 * GELU_0
        slope_RF *= x_RF  # 2 x u'
        slope_RF *= s_RF
        slope_RF += 1.0
        np.subtract(1.0, s_RF, out=s_RF)  # s
        slope_RF *= s_RF
        dy_NF[rows] *= slope_RF
    return dy_NF.reshape(x.shape)


# ---- layer norm ----------------------------------------------------------------------------------


@on_gpu
def layer_norm(x, gain_C, bias_C):
    """y = x_hat * gain + bias, x_hat = (x - mean) * rstd over the last axis.

    rstd = 1 / sqrt(variance + 1e-5). Returns y and (x_hat of x's shape, rstd (N, 1)). Ba, Kiros and
    Hinton 2016.
    """
    x_hat, y = np.empty_like(x), np.empty_like(x)
    x_NC, hat_NC, y_NC = flat_rows(x), flat_rows(x_hat), flat_rows(y)
    rstd_N1 = np.empty_like(x, shape=(len(x_NC), 1))
    mean_C1 = np.full_like(x, 1 / x.shape[-1], shape=(x.shape[-1], 1))  # x @ mean: rows' means
    for rows in row_blocks(x_NC):
        hat_RC, y_RC, rstd_R1 = hat_NC[rows], y_NC[rows], rstd_N1[rows]
        np.subtract(x_NC[rows], np.matmul(x_NC[rows], mean_C1), out=hat_RC)
        np.multiply(hat_RC, hat_RC, out=y_RC)
        np.sqrt(np.matmul(y_RC, mean_C1) + EPS, out=rstd_R1)
        np.divide(1.0, rstd_R1, out=rstd_R1)
        hat_RC *= rstd_R1
        np.multiply(hat_RC, gain_C, out=y_RC)
        y_RC += bias_C
    return y, (x_hat, rstd_N1)


@on_gpu
def layer_norm_backward(dy, saved, gain_C, dgain_C, dbias_C):
    """Of y = x_hat * gain + bias, x_hat = (x - mean) * rstd: returns dx, in dy's memory.

    `saved` is (x_hat, rstd). Mean and rstd depend on x too; with d_hat = dy * gain, and means over
    C (products with gain / C), dx = rstd (d_hat - mean(d_hat) - x_hat mean(d_hat x_hat)).
    """
    x_hat, rstd_N1 = saved
    dy_NC, hat_NC = flat_rows(dy), flat_rows(x_hat)
    mean_C1 = (gain_C * (1 / dy.shape[-1]))[:, None]
    for rows in row_blocks(dy_NC):
        d_RC, hat_RC = dy_NC[rows], hat_NC[rows]
        product_RC = np.multiply(d_RC, hat_RC)
        dbias_C += column_sums(d_RC)
        dgain_C += column_sums(product_RC)
        mean_R1, mean_product_R1 = np.matmul(d_RC, mean_C1), np.matmul(product_RC, mean_C1)
        d_RC *= gain_C  # d_hat
        d_RC -= mean_R1
        d_RC -= np.multiply(hat_RC, mean_product_R1, out=product_RC)
        d_RC *= rstd_N1[rows]
    return dy_NC.reshape(x_hat.shape)


# ---- embedding -----------------------------------------------------------------------------------


def embedding(tokens, w_VC):
    """y = w[tokens], (...) -> (..., C). The caller checks that tokens are in 0 ... V-1."""
    return w_VC[tokens]


@on_gpu
def embedding_backward(dy, tokens, dw_VC):
    """Of y = w[tokens]: adds to each token's row of dw the sum of dy's rows at its positions.

    Rows are first sorted by token (stably), so that every sum has a fixed order and every row of dw
    is written once.
    """
    tokens_N = tokens.reshape(-1)
    order_N = np.argsort(tokens_N, kind="stable")
    sorted_N = tokens_N[order_N]
    is_first_N = np.ones_like(sorted_N, dtype=bool)
    is_first_N[1:] = sorted_N[1:] != sorted_N[:-1]
    firsts = np.flatnonzero(is_first_N)
    dw_VC[sorted_N[firsts]] += np.add.reduceat(flat_rows(dy)[order_N], firsts, axis=0)


# ---- cross entropy -------------------------------------------------------------------------------


@on_gpu
def cross_entropy(logits_NV, targets_N, divisor):
    """loss_sum = sum of -log p[target] over the targets that are not negative, p = softmax(logits).

    Forward and backward in one, since both use p: returns loss_sum, a Python float summed in
    float64, and d(loss_sum / divisor) / d logits = (p - onehot(target)) / divisor in the logits'
    memory, with 0 in rows that do not count. Without counted targets the loss is 0.0, for any
    divisor.
    """
    counted_N = targets_N >= 0
    targets_N = np.where(counted_N, targets_N, 0)
    counted_N1 = counted_N.astype(logits_NV.dtype)[:, None]
    weight = float(1 / divisor) if divisor else 0.0  # a NumPy scalar would widen float32
    losses_N1 = np.empty_like(counted_N1)
    for rows in row_blocks(logits_NV):
        z_RV = logits_NV[rows]
        z_RV -= z_RV.max(axis=1, keepdims=True)
        at_target = (np.arange(len(z_RV), like=z_RV), targets_N[rows])
        z_target_R1 = z_RV[at_target][:, None]
        np.exp(z_RV, out=z_RV)
        total_R1 = z_RV.sum(axis=1, keepdims=True)
        np.subtract(np.log(total_R1), z_target_R1, out=losses_N1[rows])
        weight_R1 = counted_N1[rows] * weight
        z_RV *= weight_R1 / total_R1
        z_RV[at_target] -= weight_R1[:, 0]
    losses_N1 *= counted_N1
    return float(losses_N1.sum(dtype=np.float64)), logits_NV
