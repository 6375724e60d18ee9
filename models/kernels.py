"""Fused CuPy twins of operations in ops.py: the same names and signatures; source in kernels.cu.

Weights, activations and results have 16 or 32 bits (or 64); sums, and gradients of parameters, are
made in float32 (float64 for float64).
"""

import math
from functools import partial
from pathlib import Path

import cupy
import numpy as np

from models import cached
from models.attention import by_head
from models.cuda import NOTHING, THREADS, contiguous, multiply, queue_kernel, wide
from models.ops import EPS, flat_rows

PARTS = 128  # parts of the rows in column sums: the same on every device

_launch = partial(queue_kernel, source=Path(__file__).with_name("kernels.cu"))


# ---- linear --------------------------------------------------------------------------------------


def add_product(dw_MN, a_MK, b_KN):
    multiply(a_MK[None], b_KN[None], dw_MN[None], accumulate=True)


def linear(x, w_CF, b_F):
    x_NC = flat_rows(x)
    y_NF = cupy.empty((len(x_NC), len(b_F)), x.dtype)
    _launch("fill_rows", x.dtype, y_NF.size, contiguous(b_F), y_NF, y_NF.size, len(b_F))
    multiply(x_NC[None], w_CF[None], y_NF[None], accumulate=True)
    return y_NF.reshape(*x.shape[:-1], -1)


def linear_backward(dy, x, w_CF, dw_CF, db_F):
    dy_NF = contiguous(flat_rows(dy))
    add_product(dw_CF, flat_rows(x).T, dy_NF)
    add_columns(dy_NF, db_F)
    return cupy.matmul(dy_NF, w_CF.T).reshape(x.shape)


def add_columns(x_NF, sum_F):
    """sum += x's rows, part by part."""
    N, F = x_NF.shape
    partial = cupy.empty((PARTS, F), wide(x_NF))
    _launch("column_sums", x_NF.dtype, PARTS * _whole_blocks(F), x_NF, partial, N, F, PARTS)
    _add_parts(partial, sum_F)


def _whole_blocks(threads):
    return -(-threads // THREADS) * THREADS


def _add_parts(partial, first, second=NOTHING):
    parts, count = len(partial), 1 if second is NOTHING else 2
    arrays = partial, first, second
    _launch("add_parts", partial.dtype, partial[0].size, *arrays, parts, count, len(first))


# ---- GELU ----------------------------------------------------------------------------------------


def gelu(x):
    y, x = cupy.empty(x.shape, x.dtype), contiguous(x)
    _launch("gelu", x.dtype, x.size, x, NOTHING, y, x.size, 0)
    return y


def bias_gelu(x, b_F):
    y = cupy.empty(x.shape, x.dtype)
    _launch("gelu", x.dtype, x.size, _same(x), contiguous(b_F), y, x.size, len(b_F))
    return y


def gelu_backward(dy, x):
    _launch("gelu_backward", x.dtype, x.size, _same(dy), contiguous(x), x.size)
    return dy.reshape(x.shape)


def bias_gelu_backward(dy, slope, db_F):
    N, F = flat_rows(slope).shape
    partial = cupy.empty((PARTS, F), wide(slope))
    arrays = _same(dy), contiguous(slope), partial
    _launch("bias_gelu_backward", dy.dtype, PARTS * _whole_blocks(F), *arrays, N, F, PARTS)
    _add_parts(partial, db_F)
    return dy.reshape(slope.shape)


def _same(x):
    """x, to be overwritten: it must be contiguous."""
    if not x.flags.c_contiguous:
        got = f"shape {x.shape}, strides {x.strides}"
        raise ValueError(f"expected contiguous memory to overwrite, got {got}")
    return x


# ---- layer norm ----------------------------------------------------------------------------------


def layer_norm(x, gain_C, bias_C):
    x = contiguous(x)
    N, C = flat_rows(x).shape
    y, x_hat = cupy.empty(x.shape, x.dtype), cupy.empty(x.shape, x.dtype)
    rstd_N1 = cupy.empty((N, 1), wide(x))
    arrays = x, contiguous(gain_C), contiguous(bias_C), y, x_hat, rstd_N1
    _launch("layer_norm", x.dtype, 32 * N, *arrays, N, C, rstd_N1.dtype.type(EPS))
    return y, (x_hat, rstd_N1)


def layer_norm_backward(dy, saved, gain_C, dgain_C, dbias_C):
    x_hat, rstd_N1 = saved
    N, C = flat_rows(x_hat).shape
    partial = cupy.empty((PARTS, 2, C), rstd_N1.dtype)
    arrays = _same(dy), x_hat, rstd_N1, contiguous(gain_C), partial
    _launch("layer_norm_backward", dy.dtype, PARTS * THREADS, *arrays, N, C)
    _add_parts(partial, dgain_C, dbias_C)
    return dy.reshape(x_hat.shape)


# ---- causal attention ----------------------------------------------------------------------------


def _parts(x_TF, heads):
    """(T, 3C) as queries, keys and values, each (H, T, D): views."""
    all_ = by_head(x_TF, 3 * heads)
    return all_[:heads], all_[heads : 2 * heads], all_[2 * heads :]


def attention(qkv_BTF, heads):
    """As attention.attention, with all H x T x T scores of one sequence at a time."""
    (B, T, F), qkv_BTF = qkv_BTF.shape, contiguous(qkv_BTF)
    y_BTC = cupy.empty((B, T, F // 3), qkv_BTF.dtype)
    lse_BHT1 = cupy.empty((B, heads, T, 1), wide(qkv_BTF))
    scores_HTT, p_HTT = _squares(qkv_BTF, heads)
    scale = lse_BHT1.dtype.type(1 / math.sqrt(F // 3 // heads))
    for b in range(B):
        q_HTD, k_HTD, v_HTD = _parts(qkv_BTF[b], heads)
        multiply(q_HTD, k_HTD.swapaxes(1, 2), scores_HTT)
        arrays = scores_HTT, p_HTT, lse_BHT1[b]
        _launch("causal_softmax", y_BTC.dtype, 32 * heads * T, *arrays, heads * T, T, scale)
        multiply(p_HTT, v_HTD, by_head(y_BTC[b], heads))
    return y_BTC, lse_BHT1


def attention_backward(dy_BTC, qkv_BTF, y_BTC, lse_BHT1):
    B, heads, T, _ = lse_BHT1.shape
    dy_BTC, dqkv_BTF, D = contiguous(dy_BTC), cupy.empty_like(qkv_BTF), y_BTC.shape[-1] // heads
    scores_HTT, p_HTT = _squares(qkv_BTF, heads)
    dp_HTT, ds_HTT = _squares(qkv_BTF, heads)
    scale = lse_BHT1.dtype.type(1 / math.sqrt(D))
    for b in range(B):
        q_HTD, k_HTD, v_HTD = _parts(qkv_BTF[b], heads)
        dq_HTD, dk_HTD, dv_HTD = _parts(dqkv_BTF[b], heads)
        dy_HTD = by_head(dy_BTC[b], heads)
        multiply(q_HTD, k_HTD.swapaxes(1, 2), scores_HTT)
        multiply(dy_HTD, v_HTD.swapaxes(1, 2), dp_HTT)
        arrays = scores_HTT, dp_HTT, lse_BHT1[b], dy_BTC[b], y_BTC[b], p_HTT, ds_HTT
        _launch(
            "causal_softmax_backward", y_BTC.dtype, 32 * heads * T, *arrays, heads * T, T, D, scale
        )
        multiply(p_HTT.swapaxes(1, 2), dy_HTD, dv_HTD)
        multiply(ds_HTT.swapaxes(1, 2), q_HTD, dk_HTD)
        multiply(ds_HTT, k_HTD, dq_HTD)
    return dqkv_BTF


def _squares(x_BTF, heads):
    """Memory for one sequence's (H, T, T), in the type of sums and in x's: the same if they are."""
    shape = (heads, x_BTF.shape[1], x_BTF.shape[1])
    summed = cupy.empty(shape, wide(x_BTF))
    return summed, summed if summed.dtype == x_BTF.dtype else cupy.empty(shape, x_BTF.dtype)


def attention_to_all(q_HRD, k_HSD, v_HSD, y_HRD):
    """As cached.attention_to_all, in float32: CuPy's products of three axes lack bfloat16."""
    y = cupy.empty(y_HRD.shape, wide(y_HRD))
    cached.attention_to_all.__wrapped__(
        *(x.astype(y.dtype, copy=False) for x in (q_HRD, k_HSD, v_HSD)), y
    )
    y_HRD[...] = y


# ---- embedding and cross entropy -----------------------------------------------------------------


def embedding_backward(dy, tokens, dw_VC):
    dy_NC, tokens_N = (
        contiguous(flat_rows(dy)),
        contiguous(tokens.reshape(-1).astype(np.int64, copy=False)),
    )
    order_N = cupy.argsort(tokens_N).astype(np.int64, copy=False)  # CuPy's sort is stable
    _launch(
        "embedding_backward", dy.dtype, dy_NC.size, dy_NC, tokens_N, order_N, dw_VC, *dy_NC.shape
    )


def cross_entropy(logits_NV, targets_N, divisor):
    losses_N = cupy.empty(len(logits_NV), np.float64)
    weight = wide(logits_NV).type(1 / divisor if divisor else 0.0)
    arrays = _same(logits_NV), contiguous(targets_N.astype(np.int64, copy=False)), losses_N
    _launch(
        "cross_entropy", logits_NV.dtype, 32 * len(logits_NV), *arrays, *logits_NV.shape, weight
    )
    return float(losses_N.sum()), logits_NV
