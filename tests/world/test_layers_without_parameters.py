"""A layer with empty shapes(), such as an activation, is computed like any other; nothing moves."""

import numpy as np
import pytest
from training import STAGES, adamw, assert_same_bits, mlp, plain_run, train, world_of

from models import MLP, Layer
from zmpi import Policy, ZeRO
from zmpi.process.errors import UsageError

SIZES = (1, 3, 4)


class Double(Layer):
    """y = 2 x + x**2 / 8; its backward needs no weights, nor has it any."""

    def __init__(self, name):
        self.name = name

    def shapes(self):
        return {}

    def init(self, w, key):
        assert w == {}

    def forward(self, w, x):
        assert w == {}
        return 2 * x + x * x / 8, x

    def backward(self, w, dw, saved, dy):
        # y = 2 * x + x * x / 8
        assert dw == {}
        return dy * (2 + saved / 4)


class Tokens(Double):
    """Tokens as they are: the first layer of a model, which has nobody to send a gradient to."""

    def forward(self, w, x):
        return x, None

    def backward(self, w, dw, saved, dy):
        assert dy is None
        return None


class Among(MLP):
    """An MLP with layers without parameters: two in a row in the middle, and one at both ends."""

    def __init__(self):
        super().__init__(layers=2, width=11, context=5, vocab=23)
        first, one, two, last = self.layers
        doubles = [Double("a"), Double("b"), Double("end")]
        self.layers = [Tokens("tokens"), first, one, *doubles[:2], two, last, doubles[2]]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_they_train_as_in_the_plain_loop(world, stage, precision):
    expected = plain_run(Among, adamw(), 2 * world.size, precision=precision)
    for prefetch, recompute in ((0, True), (1, False), (1, True)):
        policy = Policy(precision, prefetch=prefetch, recompute=recompute)
        zero = ZeRO(Among(), world_of("ordered"), stage, adamw(), policy=policy)
        assert_same_bits(train(zero, accumulate=2), expected, (prefetch, recompute))


def test_nothing_moves_for_them(world):
    """The same model's elements; its head is now not the last layer, so it is gathered twice."""
    moved = []
    for model in (Among(), mlp(layers=2)):
        zero = ZeRO(model, world_of("ordered"), 3, adamw())
        inputs = np.random.default_rng(world.rank).integers(0, model.vocab, (2, model.context))
        zero.train_step([(inputs, inputs[:, 0])])
        comm = zero.ledger["comm"]
        moved.append([comm[kind]["elements"] for kind in ("all_gather", "reduce_scatter")])
        assert zero.evaluate([(inputs, inputs[:, 0])]) > 0
    head = zero.units["head"].layout.elements
    assert moved[0] == [moved[1][0] + head, moved[1][1]]
    assert "  -  " in str(ZeRO(Among(), world, 3, adamw()).schedule)


def test_a_model_of_nothing_else_is_refused(world):
    model = Among()
    model.layers = [Tokens("tokens"), Double("end")]
    with pytest.raises(UsageError, match=r"^model: expected at least one parameter, got none"):
        ZeRO(model, world, 3, adamw())
