"""A language model without attention: a window's embeddings, concatenated, through linear layers.

Bengio et al. 2003. Shapes: B windows, T = `context` tokens each, C = `width`, V = `vocab`, F the
features of a layer.
"""

import math

from models.fused import bias_gelu, bias_gelu_backward, product, product_backward
from models.layer import Layer, check_sizes, check_tokens, init_normal
from models.ops import cross_entropy, embedding, embedding_backward, linear, linear_backward


class MLP:
    """An embedding, `layers` hidden layers, a head. Inputs (B, context); targets (B,): next tokens.

    Sizes: `.depth` (the number of hidden layers), `.width`, `.context`, `.vocab`. Raises ValueError
    for a size below 1.
    """

    one_target = True  # the token after the window

    def __init__(self, layers, width, context, vocab):
        layers, width, context, vocab = check_sizes(
            layers=layers, width=width, context=context, vocab=vocab
        )
        self.depth, self.width, self.context, self.vocab = layers, width, context, vocab
        features = [context * width] + [width] * layers
        hidden = [Hidden(f"hidden.{i}", features[i], width) for i in range(layers)]
        self.layers = [Embed(width, context, vocab), *hidden, MLPHead(width, vocab)]

    def check(self, inputs, targets):
        """Raise ValueError for a token outside the vocabulary."""
        check_tokens(inputs, targets, self.vocab)

    def loss(self, logits_BV, targets_B, divisor):
        """(loss_sum, d(loss_sum / divisor) / d logits in the logits' memory): cross_entropy."""
        return cross_entropy(logits_BV, targets_B, divisor)


class Embed(Layer):
    """Tokens (B, T) -> (B, T * C): the tokens' rows of the table, concatenated."""

    name = "embed"
    backward_needs_weights = False

    def __init__(self, width, context, vocab):
        self.width, self.context, self.vocab = width, context, vocab

    def shapes(self):
        return {"weight": (self.vocab, self.width)}

    def init(self, w, key):
        """Normal, standard deviation 1: the scale that the hidden layers expect."""
        init_normal(w, key, "weight", 1.0)

    def forward(self, w, tokens_BT):
        """Raises ValueError if the windows are not as long as the context."""
        if tokens_BT.shape[1] != self.context:
            raise ValueError(
                f"inputs: expected {self.context} tokens per window, got {tokens_BT.shape[1]}"
            )
        return embedding(tokens_BT, w["weight"]).reshape(len(tokens_BT), -1), tokens_BT

    def backward(self, w, dw, saved, dy_BF):
        # y = weight[tokens]
        tokens_BT = saved
        embedding_backward(dy_BF.reshape(*tokens_BT.shape, -1), tokens_BT, dw["weight"])
        return None


class Linear(Layer):
    """x @ weight + bias, (B, in) -> (B, out); initial standard deviation `std`, bias 0."""

    def __init__(self, name, n_in, n_out, std):
        self.name, self.n_in, self.n_out, self.std = name, n_in, n_out, std

    def shapes(self):
        return {"weight": (self.n_in, self.n_out), "bias": (self.n_out,)}

    def init(self, w, key):
        init_normal(w, key, "weight", self.std)
        w["bias"][...] = 0.0

    def forward(self, w, x_BF):
        return linear(x_BF, w["weight"], w["bias"]), x_BF

    def backward(self, w, dw, saved, dy_BF):
        # y = x @ weight + bias
        return linear_backward(dy_BF, saved, w["weight"], dw["weight"], dw["bias"])


class Hidden(Linear):
    """gelu(x @ weight + bias)."""

    def __init__(self, name, n_in, n_out):
        """Standard deviation sqrt(2 / in) keeps the scale, as GELU zeroes half: He et al. 2015."""
        super().__init__(name, n_in, n_out, math.sqrt(2 / n_in))

    def forward(self, w, x_BF):
        slope_BF = product(x_BF, w["weight"])  # bias_gelu turns it into the slope
        return bias_gelu(slope_BF, w["bias"]), (x_BF, slope_BF)

    def backward(self, w, dw, saved, dy_BF):
        # y = gelu(x @ weight + bias)
        x_BF, slope_BF = saved
        dy_BF = bias_gelu_backward(dy_BF, slope_BF, dw["bias"])
        return product_backward(dy_BF, x_BF, w["weight"], dw["weight"])


class MLPHead(Linear):
    """(B, C) -> logits (B, V)."""

    def __init__(self, width, vocab):
        """Standard deviation 0.02: training starts at a loss of about log(vocab)."""
        super().__init__("head", width, vocab, 0.02)
