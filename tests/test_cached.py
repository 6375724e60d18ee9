"""Generation with a key/value cache gives the logits of the full forward."""

import numpy as np
import pytest
from small_models import spread

from models import GPT, plain_weights, unit_of
from models.attention import ROWS
from models.cached import Cache


def walk_of(model, weights):
    def walk(x, apply=lambda layer, w, x: layer.forward(w, x)[0]):
        for layer in model.layers:
            x = apply(layer, weights[unit_of(layer)], x)
        return x

    return walk


@pytest.fixture
def case():
    """A model whose context exceeds one block of attention rows, its pass, and two sequences."""
    model = GPT(layers=2, width=6, heads=3, context=ROWS + 9, vocab=11)
    tokens_BT = np.random.default_rng(2).integers(0, model.vocab, (2, model.context))
    return model, walk_of(model, spread(plain_weights(model, 0, np.float64))), tokens_BT


@pytest.mark.parametrize("first", [1, 5, ROWS, ROWS + 3])
def test_logits_with_a_cache_are_those_of_the_full_forward(case, first):
    """To rounding: float64, and the products are cut differently."""
    model, walk, tokens_BT = case
    cache, position = Cache(model), 0
    for count in (first, 1, 2, model.context - first - 3):
        if not count:
            continue
        logits_BV = cache.predict(tokens_BT[:, position : position + count], walk)
        position += count
        expected_BV = walk(tokens_BT[:, :position])[:, -1]
        assert np.abs(logits_BV - expected_BV).max() < 1e-12 * np.abs(expected_BV).max()
    assert cache.length == position == model.context


def test_a_full_cache_takes_no_more(case):
    model, walk, tokens_BT = case
    cache = Cache(model)
    cache.predict(tokens_BT, walk)
    with pytest.raises(
        ValueError, match=f"most {model.context} tokens per sequence, got {model.context + 1}"
    ):
        cache.predict(tokens_BT[:, :1], walk)


def test_a_cached_token_costs_one_position(case):
    """Every layer sees the new position alone, whatever came before it."""
    model, walk, tokens_BT = case
    cache, seen = Cache(model), []
    cache.predict(tokens_BT[:, :20], walk)

    def counting(x, apply):
        def counted(layer, w, x):
            seen.append(x.shape[1])
            return apply(layer, w, x)

        return walk(x, counted)

    cache.predict(tokens_BT[:, 20:21], counting)
    assert seen == [1] * len(model.layers)
