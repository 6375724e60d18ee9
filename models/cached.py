"""A GPT that reads each token once: the keys and values of all positions so far are kept, per block.

Shapes: B sequences, R new positions, S positions so far with the new ones, T the context, H heads, D channels of a head.
"""

import math

import numpy as np

from models.attention import ROWS, attention_scores, by_head, future_mask
from models.transformer import Block, Embedding
from models.twins import on_gpu


class Cache:
    """What a model's blocks keep of B sequences, all of one length, and the passes that extend it.

    `length` is that length in tokens, at most the model's context. Memory: 2 x layers x B x T x width elements.
    """

    def __init__(self, model):
        self.model, self.length = model, 0
        self._kept = {}  # block's name -> (keys, values), each (B, H, T, D)

    def predict(self, tokens_BR, walk):
        """The logits (B, V) of each sequence's next token, after these new ones; they are kept.

        walk(x, apply) is one pass over the layers: x = apply(layer, w, x) for each in order; it returns the last x.
        """
        logits_B1V = walk(tokens_BR, self._apply)
        self.length += tokens_BR.shape[1]
        return logits_B1V[:, -1]

    def _apply(self, layer, w, x):
        """The layer's forward, for the new positions alone."""
        if isinstance(layer, Embedding):
            return layer.forward(w, x, start=self.length)[0]
        if isinstance(layer, Block):
            return layer.forward(
                w, x, attend=lambda qkv, heads: self._attend(layer.name, qkv, heads)
            )[0]
        return layer.forward(w, x[:, -1:])[
            0
        ]  # the head: only what follows the last position is asked for

    def _attend(self, name, qkv_BRF, heads):
        """attention with the positions before these; they are kept."""
        B, R, F = qkv_BRF.shape
        if name not in self._kept:
            shape = (2, B, heads, self.model.context, F // 3 // heads)
            self._kept[name] = np.empty_like(qkv_BRF, shape=shape)
        keys_BHTD, values_BHTD = self._kept[name]
        y_BRC = np.empty_like(qkv_BRF, shape=(B, R, F // 3))
        new = slice(self.length, self.length + R)
        for b in range(B):
            q_HRD, keys_BHTD[b, :, new], values_BHTD[b, :, new] = by_head(
                qkv_BRF[b], 3 * heads
            ).reshape(3, heads, R, -1)
            attention_to_all(
                q_HRD,
                keys_BHTD[b, :, : new.stop],
                values_BHTD[b, :, : new.stop],
                by_head(y_BRC[b], heads),
            )
        return y_BRC, None


@on_gpu
def attention_to_all(q_HRD, k_HSD, v_HSD, y_HRD):
    """y = softmax(q k^T / sqrt(D) + mask) v into y, as in attention; the R rows are the last of the S positions."""
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
