"""GPT-2 (Radford et al. 2019) without dropout, with the published names and (in, out) shapes.

Shapes: B sequences, T positions up to `context`, C = `width` channels, H = `heads`, V = `vocab`.
"""

import math

import numpy as np

from models.attention import attention, attention_backward
from models.fused import bias_gelu, bias_gelu_backward, product, product_backward
from models.layer import Layer, check_sizes, check_tokens, init_normal
from models.ops import (
    add_product,
    cross_entropy,
    embedding,
    embedding_backward,
    flat_rows,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_backward,
)


class GPT:
    """`layers` blocks between an embedding and a head that share `wte`.

    Inputs and targets (B, T), T <= context. Sizes: `.depth` (the number of blocks), `.width`,
    `.heads`, `.context`, `.vocab`. Raises ValueError for a size below 1, or heads that do not
    divide the width.
    """

    def __init__(self, layers, width, heads, context, vocab):
        layers, width, heads, context, vocab = check_sizes(
            layers=layers, width=width, heads=heads, context=context, vocab=vocab
        )
        if width % heads:
            raise ValueError(f"heads: {heads} does not divide width {width}")
        self.depth, self.width, self.heads = layers, width, heads
        self.context, self.vocab = context, vocab
        blocks = [
            Block(f"h.{i}", width, heads, residual_std=0.02 / math.sqrt(2 * layers))
            for i in range(layers)
        ]
        self.layers = [Embedding(width, context, vocab), *blocks, GPTHead(width, vocab)]

    def check(self, inputs, targets):
        """Raise ValueError for a token outside the vocabulary."""
        check_tokens(inputs, targets, self.vocab)

    def loss(self, logits_BTV, targets_BT, divisor):
        """(loss_sum, d(loss_sum / divisor) / d logits in the logits' memory): cross_entropy."""
        loss_sum, d_NV = cross_entropy(flat_rows(logits_BTV), targets_BT.reshape(-1), divisor)
        return loss_sum, d_NV.reshape(logits_BTV.shape)


def parameters(w, name):
    """A sublayer's (weight, bias)."""
    return w[f"{name}.weight"], w[f"{name}.bias"]


class Embedding(Layer):
    """Tokens (B, T) -> (B, T, C): the token's row of wte plus the position's row of wpe."""

    name = "embedding"
    unit = "outer"
    backward_needs_weights = False

    def __init__(self, width, context, vocab):
        self.width, self.context, self.vocab = width, context, vocab

    def shapes(self):
        return {"wte.weight": (self.vocab, self.width), "wpe.weight": (self.context, self.width)}

    def init(self, w, key):
        """Normal, standard deviation 0.02."""
        init_normal(w, key, "wte.weight", 0.02)
        init_normal(w, key, "wpe.weight", 0.02)

    def forward(self, w, tokens_BT, start=0):
        """Positions count from `start`. Raises ValueError for sequences longer than the context."""
        stop = start + tokens_BT.shape[1]
        if stop > self.context:
            raise ValueError(
                f"inputs: expected at most {self.context} tokens per sequence, got {stop}"
            )
        y_BTC = embedding(tokens_BT, w["wte.weight"])
        y_BTC += w["wpe.weight"][start:stop]
        return y_BTC, tokens_BT

    def backward(self, w, dw, saved, dy_BTC):
        # y = wte[tokens] + wpe[:T]
        tokens_BT = saved
        embedding_backward(dy_BTC, tokens_BT, dw["wte.weight"])
        dwpe_TC = dw["wpe.weight"][: dy_BTC.shape[1]]
        dwpe_TC += dy_BTC.sum(axis=0, dtype=dwpe_TC.dtype)
        return None


class Block(Layer):
    """x -> mid = x + attention(layer norm(x)) -> y = mid + mlp(layer norm(mid)), all (B, T, C)."""

    def __init__(self, name, width, heads, residual_std):
        self.name, self.width, self.heads, self.residual_std = name, width, heads, residual_std

    def shapes(self):
        C = self.width
        return {
            "ln_1.weight": (C,),
            "ln_1.bias": (C,),
            "attn.c_attn.weight": (C, 3 * C),
            "attn.c_attn.bias": (3 * C,),
            "attn.c_proj.weight": (C, C),
            "attn.c_proj.bias": (C,),
            "ln_2.weight": (C,),
            "ln_2.bias": (C,),
            "mlp.c_fc.weight": (C, 4 * C),
            "mlp.c_fc.bias": (4 * C,),
            "mlp.c_proj.weight": (4 * C, C),
            "mlp.c_proj.bias": (C,),
        }

    def init(self, w, key):
        """Normal 0.02, but 0.02 / sqrt(2 * layers) for c_proj; gains 1, biases 0."""
        for name in self.shapes():
            if name in ("ln_1.weight", "ln_2.weight"):
                w[name][...] = 1.0
            elif name.endswith(".bias"):
                w[name][...] = 0.0
            else:
                init_normal(w, key, name, self.residual_std if "c_proj" in name else 0.02)

    def forward(self, w, x_BTC, attend=None):
        """Saves 16 BTC elements; backward recomputes the scores. `attend` replaces attention."""
        in_1_BTC, norm_1 = layer_norm(x_BTC, *parameters(w, "ln_1"))
        qkv_BTF = linear(in_1_BTC, *parameters(w, "attn.c_attn"))
        mixed_BTC, lse = (attend or attention)(qkv_BTF, self.heads)
        mid_BTC = linear(mixed_BTC, *parameters(w, "attn.c_proj"))
        mid_BTC += x_BTC

        in_2_BTC, norm_2 = layer_norm(mid_BTC, *parameters(w, "ln_2"))
        hidden_BTF = product(in_2_BTC, w["mlp.c_fc.weight"])
        active_BTF, slope_BTF = bias_gelu(hidden_BTF, w["mlp.c_fc.bias"]), hidden_BTF
        y_BTC = linear(active_BTF, *parameters(w, "mlp.c_proj"))
        y_BTC += mid_BTC
        first, second = (in_1_BTC, norm_1, qkv_BTF, mixed_BTC, lse), (in_2_BTC, norm_2)
        return y_BTC, (*first, *second, active_BTF, slope_BTF)

    def backward(self, w, dw, saved, dy_BTC):
        in_1_BTC, norm_1, qkv_BTF, mixed_BTC, lse, in_2_BTC, norm_2, active_BTF, slope_BTF = saved

        def linear_back(d, x, name):
            return linear_backward(d, x, w[f"{name}.weight"], *parameters(dw, name))

        # y = mid + linear(gelu(linear(layer_norm(mid))))
        d = linear_back(dy_BTC, active_BTF, "mlp.c_proj")
        d = bias_gelu_backward(d, slope_BTF, dw["mlp.c_fc.bias"])
        fc = "mlp.c_fc.weight"
        d = product_backward(d, in_2_BTC, w[fc], dw[fc])
        d = layer_norm_backward(d, norm_2, w["ln_2.weight"], *parameters(dw, "ln_2"))
        dmid_BTC = np.add(d, dy_BTC, out=dy_BTC)

        # mid = x + linear(attention(linear(layer_norm(x))))
        d = linear_back(dmid_BTC, mixed_BTC, "attn.c_proj")
        d = attention_backward(d, qkv_BTF, mixed_BTC, lse)
        d = linear_back(d, in_1_BTC, "attn.c_attn")
        d = layer_norm_backward(d, norm_1, w["ln_1.weight"], *parameters(dw, "ln_1"))
        return np.add(d, dmid_BTC, out=dmid_BTC)


class GPTHead(Layer):
    """(B, T, C) -> logits (B, T, V): the final layer norm, then the embedding's wte."""

    name = "head"
    unit = "outer"

    def __init__(self, width, vocab):
        self.width, self.vocab = width, vocab

    def shapes(self):
        C = self.width
        return {"wte.weight": (self.vocab, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}

    def init(self, w, key):
        """Gain 1, bias 0; the embedding assigns wte."""
        w["ln_f.weight"][...] = 1.0
        w["ln_f.bias"][...] = 0.0

    def forward(self, w, x_BTC):
        norm_BTC, norm_f = layer_norm(x_BTC, *parameters(w, "ln_f"))
        logits_NV = np.matmul(flat_rows(norm_BTC), w["wte.weight"].T)
        return logits_NV.reshape(*x_BTC.shape[:-1], -1), (norm_BTC, norm_f)

    def backward(self, w, dw, saved, dy_BTV):
        # logits = layer_norm(x) @ wte.T
        (norm_BTC, norm_f), dy_NV = saved, flat_rows(dy_BTV)
        wte_VC, dwte_VC = w["wte.weight"], dw["wte.weight"]
        add_product(dwte_VC, dy_NV.T, flat_rows(norm_BTC))
        d_BTC = np.matmul(dy_NV, wte_VC).reshape(norm_BTC.shape)
        return layer_norm_backward(d_BTC, norm_f, w["ln_f.weight"], *parameters(dw, "ln_f"))
