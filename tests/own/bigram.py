"""Your own model: the next token's logits are a row of a table, through a bottleneck. One flag:

mpirun -n 4 python -m zmpi.train --model tests/own/bigram.py:Bigram --width 32
"""

from models import Layer
from models.layer import init_normal
from models.ops import (
    cross_entropy,
    embedding,
    embedding_backward,
    flat_rows,
    linear,
    linear_backward,
)


class Table(Layer):
    """Tokens (B, T) -> (B, T, C)."""

    name = "table"
    backward_needs_weights = False

    def __init__(self, vocab, width):
        self.vocab, self.width = vocab, width

    def shapes(self):
        return {"weight": (self.vocab, self.width)}

    def init(self, w, key):
        init_normal(w, key, "weight", 1.0)

    def forward(self, w, tokens_BT):
        return embedding(tokens_BT, w["weight"]), tokens_BT

    def backward(self, w, dw, tokens_BT, dy_BTC):
        embedding_backward(dy_BTC, tokens_BT, dw["weight"])  # y = weight[tokens]


class Logits(Layer):
    """(B, T, C) -> (B, T, V)."""

    name = "logits"

    def __init__(self, width, vocab):
        self.width, self.vocab = width, vocab

    def shapes(self):
        return {"weight": (self.width, self.vocab), "bias": (self.vocab,)}

    def init(self, w, key):
        init_normal(w, key, "weight", 0.02)
        w["bias"][...] = 0.0

    def forward(self, w, x_BTC):
        return linear(x_BTC, w["weight"], w["bias"]), x_BTC

    def backward(self, w, dw, x_BTC, dy_BTV):
        return linear_backward(dy_BTV, x_BTC, w["weight"], dw["weight"], dw["bias"])


class Bigram:
    """What comes next, by the last token alone."""

    def __init__(self, vocab, width=16):
        self.vocab = vocab
        self.layers = [Table(vocab, width), Logits(width, vocab)]

    def loss(self, logits_BTV, targets_BT, divisor):
        loss_sum, d_NV = cross_entropy(flat_rows(logits_BTV), targets_BT.reshape(-1), divisor)
        return loss_sum, d_NV.reshape(logits_BTV.shape)
