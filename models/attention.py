"""Causal attention, forward and backward: ROWS rows of a few sequences at a time, not T x T scores.

Shapes: B sequences, b of them at once, T positions, C channels, F = 3C, H heads, D = C / H, R rows
of one block, S keys visible to a block of rows. Conventions as in ops.py.
"""

import math

import numpy as np

from models.twins import on_gpu

ROWS = 64  # rows of scores at once: small blocks skip more of the future, large ones are faster
SCORES = 1 << 17  # the most at once, if one sequence has fewer: 512 KiB, half of a level 2 cache


def by_head(x_TF, heads):
    """(..., T, F) as (..., heads, T, F / heads), a view."""
    return x_TF.reshape(*x_TF.shape[:-1], heads, -1).swapaxes(-2, -3)


def queries_keys_values(qkv_BTF, heads):
    """(B, T, 3C) as three of (B, heads, T, D): views."""
    B, T, _ = qkv_BTF.shape
    return by_head(qkv_BTF, 3 * heads).reshape(B, 3, heads, T, -1).swapaxes(0, 1)


def future_mask(x, size):
    """(size, size) of x's type: minus infinity if the column is after the row, else 0."""
    position = np.arange(size, like=x)
    mask = np.zeros_like(x, shape=(size, size))
    mask[position > position[:, None]] = -math.inf
    return mask


def attention_scores(q_HRD, k_HSD, mask):
    """q k^T with the future masked, for a scaled q: (..., H, R, S), the last R of S positions."""
    scores_HRS = np.matmul(q_HRD, k_HSD.swapaxes(-1, -2))
    rows = scores_HRS.shape[-2]
    now_HRR = scores_HRS[..., -rows:]  # everything to the left is past
    now_HRR += mask[:rows, :rows]
    return scores_HRS


def attention_blocks(B, heads, T):
    """Yield slices (sequences, rows, visible keys): ROWS of a few sequences' rows, last first."""
    some = max(1, SCORES // (heads * min(T, ROWS) * T))
    for first in range(0, B, some):
        for start in reversed(range(0, T, ROWS)):
            yield slice(first, first + some), slice(start, start + ROWS), slice(start + ROWS)


@on_gpu
def attention(qkv_BTF, heads):
    """y = softmax(q k^T / sqrt(D) + mask) v for every head, (B, T, 3C) -> (B, T, C).

    Vaswani et al. 2017.
    Never holds all T x T scores. Returns y and lse (B, H, T, 1), each row's log-sum-exp, from which
    the backward gets the probabilities, p = exp(scores - lse) (Dao et al. 2022).
    """
    B, T, F = qkv_BTF.shape
    y_BTC = np.empty_like(qkv_BTF, shape=(B, T, F // 3))
    lse_BHT1 = np.empty_like(qkv_BTF, shape=(B, heads, T, 1))
    mask, scale = future_mask(qkv_BTF, min(T, ROWS)), 1 / math.sqrt(F // 3 // heads)
    (q_BHTD, k_BHTD, v_BHTD), y_BHTD = queries_keys_values(qkv_BTF, heads), by_head(y_BTC, heads)
    one_T1 = np.ones_like(qkv_BTF, shape=(T, 1))  # p @ one: rows' sums
    for b, rows, seen in attention_blocks(B, heads, T):
        p_bHRS = attention_scores(q_BHTD[b, :, rows] * scale, k_BHTD[b, :, seen], mask)
        highest_bHR1 = p_bHRS.max(axis=-1, keepdims=True)
        p_bHRS -= highest_bHR1
        np.exp(p_bHRS, out=p_bHRS)
        total_bHR1 = np.matmul(p_bHRS, one_T1[seen])
        y_bHRD = np.matmul(p_bHRS, v_BHTD[b, :, seen], out=y_BHTD[b, :, rows])
        y_bHRD /= total_bHR1  # D divisions per row instead of S
        np.add(highest_bHR1, np.log(total_bHR1), out=lse_BHT1[b, :, rows])
    return y_BTC, lse_BHT1


@on_gpu
def attention_backward(dy_BTC, qkv_BTF, y_BTC, lse_BHT1):
    """Of y = p v, p = softmax(s), s = q k^T / sqrt(D) + mask: returns dqkv in new memory.

    ds = p (dp - sum(p dp)) with dp = dy v^T; the sum over keys is the sum over D of dy * y, since
    y = p v.
    """
    B, heads, T, _ = lse_BHT1.shape
    dqkv_BTF = np.empty_like(qkv_BTF)
    mask, scale = future_mask(qkv_BTF, min(T, ROWS)), 1 / math.sqrt(y_BTC.shape[-1] // heads)
    (q_BHTD, k_BHTD, v_BHTD), dy_BHTD = queries_keys_values(qkv_BTF, heads), by_head(dy_BTC, heads)
    dq_BHTD, dk_BHTD, dv_BHTD = queries_keys_values(dqkv_BTF, heads)
    sum_BHT1 = by_head(dy_BTC * y_BTC, heads).sum(axis=-1, keepdims=True)
    for b, rows, seen in attention_blocks(B, heads, T):
        q_bHRD, dy_bHRD = q_BHTD[b, :, rows] * scale, dy_BHTD[b, :, rows]
        k_bHSD = k_BHTD[b, :, seen]
        dk_bHSD, dv_bHSD = dk_BHTD[b, :, seen], dv_BHTD[b, :, seen]
        p_bHRS = attention_scores(q_bHRD, k_bHSD, mask)
        p_bHRS -= lse_BHT1[b, :, rows]
        np.exp(p_bHRS, out=p_bHRS)
        ds_bHRS = np.matmul(dy_bHRD, v_BHTD[b, :, seen].swapaxes(-1, -2))  # dp
        ds_bHRS -= sum_BHT1[b, :, rows]
        ds_bHRS *= p_bHRS
        if seen.stop >= T:  # the last rows, which come first and see all keys
            np.matmul(p_bHRS.swapaxes(-1, -2), dy_bHRD, out=dv_bHSD)
            np.matmul(ds_bHRS.swapaxes(-1, -2), q_bHRD, out=dk_bHSD)
        else:
            dv_bHSD += np.matmul(p_bHRS.swapaxes(-1, -2), dy_bHRD)
            dk_bHSD += np.matmul(ds_bHRS.swapaxes(-1, -2), q_bHRD)
        dq_bHRD = np.matmul(ds_bHRS, k_bHSD, out=dq_BHTD[b, :, rows])
        dq_bHRD *= scale
    return dqkv_BTF
