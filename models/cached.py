"""A key-value cache for generation: each block keeps all positions' keys and values.

Shapes: B sequences, R new positions, S positions including the new ones, T the context, H heads, D
channels of a head.
"""

import math
from functools import partial

import numpy as np

from models.attention import ROWS, attention_scores, by_head, future_mask
from models.transformer import Block, Embedding
from models.twins import on_gpu


class Cache:
    """The keys and values of B sequences of equal length, in every block of a model.

    `length`: tokens so far, at most the context. Memory: 2 x layers x B x T x width elements.
    """

    def __init__(self, model):
        self.model, self.length = model, 0
        self._kept = {}  # block's name -> (keys, values), each (B, H, T, D)

    def predict(self, tokens_BR, walk):
        """Append these tokens; returns the logits (B, V) of each sequence's next one.

        walk(x, apply): one pass through the layers with x = apply(layer, w, x); returns the last x.
        """
        logits_B1V = walk(tokens_BR, self._apply)
        self.length += tokens_BR.shape[1]
        return logits_B1V[:, -1]

    def _apply(self, layer, w, x):
        """The layer's forward, for the new positions only."""
        if isinstance(layer, Embedding):
            return layer.forward(w, x, start=self.length)[0]
        if isinstance(layer, Block):
            attend = partial(self._attend, layer.name)
            return layer.forward(w, x, attend=attend)[0]
        return layer.forward(w, x[:, -1:])[0]  # the head: only the last position is needed

    def _attend(self, name, qkv_BRF, heads):
        """Attention to all positions so far; keeps the new ones."""
        B, R, F = qkv_BRF.shape
        if name not in self._kept:
            shape = (2, B, heads, self.model.context, F // 3 // heads)
            self._kept[name] = np.empty_like(qkv_BRF, shape=shape)
        keys_BHTD, values_BHTD = self._kept[name]
        y_BRC = np.empty_like(qkv_BRF, shape=(B, R, F // 3))
        new = slice(self.length, self.length + R)
        for b in range(B):
            qkv_3HRD = by_head(qkv_BRF[b], 3 * heads).reshape(3, heads, R, -1)
            q_HRD, keys_BHTD[b, :, new], values_BHTD[b, :, new] = qkv_3HRD
            k_HSD, v_HSD = keys_BHTD[b, :, : new.stop], values_BHTD[b, :, : new.stop]
            attention_to_all(q_HRD, k_HSD, v_HSD, by_head(y_BRC[b], heads))
        return y_BRC, None


@on_gpu
def attention_to_all(q_HRD, k_HSD, v_HSD, y_HRD):
    """Write softmax(q k^T / sqrt(D) + mask) v to y; the R rows are the last of S positions."""
    R, before = q_HRD.shape[1], k_HSD.shape[1] - q_HRD.shape[1]
    mask, scale = future_mask(q_HRD, min(R, ROWS)), 1 / math.sqrt(q_HRD.shape[2])
    for start in range(0, R, ROWS):
        rows = slice(start, min(start + ROWS, R))
        seen = slice(before + rows.stop)
        p_HRS = attention_scores(q_HRD[:, rows] * scale, k_HSD[:, seen], mask)
        p_HRS -= p_HRS.max(axis=-1, keepdims=True)
        np.exp(p_HRS, out=p_HRS)
        np.matmul(p_HRS, v_HSD[:, seen], out=y_HRD[:, rows])
        y_HRD[:, rows] /= p_HRS.sum(axis=-1, keepdims=True)
