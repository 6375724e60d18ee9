"""Optimizers against a textbook in float64: learning rate, decay, clipping, sums of squares."""

import math

import numpy as np
import pytest

from zmpi.numbers import optim
from zmpi.numbers.optim import CACHE_BLOCK, SGD, AdamW, Slice, sums_of_squares

LENGTH = 1000
DECAYED = [(0, 300, True), (300, 401, False), (401, 907, True)]  # the rest is padding


def owned_by(optimizer, dtype=np.float32, gradient=None):
    rng = np.random.default_rng(0)
    master = rng.standard_normal(LENGTH).astype(dtype)
    master[907:] = 0
    moments = {name: np.zeros(LENGTH, dtype) for name in optimizer.moments}
    gradient = np.zeros(LENGTH, dtype) if gradient is None else gradient
    return Slice(master, gradient, moments, DECAYED)


def gradient_of(step, dtype=np.float32):
    gradient = np.random.default_rng(step).standard_normal(LENGTH).astype(dtype)
    gradient[907:] = 0
    return gradient


def decay_mask():
    mask = np.zeros(LENGTH)
    for start, stop, decays in DECAYED:
        mask[start:stop] = decays
    return mask


# ---- AdamW ---------------------------------------------------------------------------------------


def textbook_adamw(optimizer, steps, factor, dtype):
    """Algorithm 2 of arXiv 1711.05101, line by line, in float64; the masters after each step."""
    theta, m, v = owned_by(optimizer, dtype).master.astype(np.float64), 0.0, 0.0
    for t in range(1, steps + 1):
        g = gradient_of(t, dtype).astype(np.float64) * factor
        m = optimizer.beta1 * m + (1 - optimizer.beta1) * g
        v = optimizer.beta2 * v + (1 - optimizer.beta2) * g * g
        m_hat, v_hat = m / (1 - optimizer.beta1**t), v / (1 - optimizer.beta2**t)
        lr = optimizer.rate(t)
        theta = theta - lr * (
            m_hat / (np.sqrt(v_hat) + optimizer.eps) + optimizer.weight_decay * decay_mask() * theta
        )
        yield theta


@pytest.mark.parametrize("factor", [1.0, 0.37])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 5e-6), (np.float64, 1e-13)])
def test_adamw_follows_the_textbook(dtype, tolerance, factor):
    optimizer = AdamW(lr=1e-2, warmup=3, schedule="cosine", decay_steps=12)
    owned = owned_by(optimizer, dtype)
    for t, expected in enumerate(textbook_adamw(optimizer, 20, factor, dtype), start=1):
        owned.gradient[:] = gradient_of(t, dtype)
        optimizer.update(owned, t, factor)
        # some ten roundings per step of numbers near 1: at most 20 x 10 x 6e-8, in float64 x 1e-16
        np.testing.assert_allclose(owned.master[:907], expected[:907], rtol=0, atol=tolerance)


def test_decay_is_decoupled_and_on_matrices_only_to_the_bit():
    """B06: with no gradient a matrix is w * float32(1 - lr * wd), a bias or gain is unchanged."""
    decay = {"lr": 0.1, "weight_decay": 0.1}
    for optimizer in (AdamW(**decay), SGD(**decay), SGD(**decay, momentum=0.9)):
        owned = owned_by(optimizer)
        before = owned.master.copy()
        optimizer.update(owned, 1, 1.0)
        matrices = decay_mask().astype(bool)
        assert (
            owned.master[matrices].tobytes()
            == (before[matrices] * np.float32(1 - 0.1 * 0.1)).tobytes()
        )
        assert owned.master[~matrices].tobytes() == before[~matrices].tobytes()


@pytest.mark.parametrize("optimizer", [AdamW(lr=0.1), SGD(lr=0.1), SGD(lr=0.1, momentum=0.9)])
def test_padding_is_not_touched(optimizer):
    owned = owned_by(optimizer)
    owned.gradient[:] = gradient_of(1)
    owned.gradient[907:] = 5  # as nothing should be
    optimizer.update(owned, 1, 0.5)
    assert not owned.master[907:].any()
    assert not any(vector[907:].any() for vector in owned.moments.values())


def test_a_gradient_of_zero_divides_nothing_by_zero():
    optimizer = AdamW(lr=0.1, weight_decay=0.0, eps=1e-8)
    owned = owned_by(optimizer)
    before = owned.master.copy()
    with np.errstate(all="raise"):
        for t in (1, 2, 3):
            optimizer.update(owned, t, 1.0)
    assert owned.master.tobytes() == before.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_moments_do_not_depend_on_the_gradients_width(dtype):
    """A 16-bit gradient is widened before anything is computed with it."""
    optimizer = AdamW(lr=0.1)
    found = []
    for gradient in (
        gradient_of(1, np.float16).astype(dtype),
        gradient_of(1, np.float16).astype(np.float32),
    ):
        owned = owned_by(optimizer, gradient=gradient)
        optimizer.update(owned, 1, 1 / 1024)
        found.append(
            [owned.master.tobytes(), *(vector.tobytes() for vector in owned.moments.values())]
        )
    assert found[0] == found[1]


# ---- SGD -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_sgd_follows_the_textbook(momentum, factor):
    optimizer = SGD(lr=0.05, momentum=momentum, weight_decay=0.01)
    owned = owned_by(optimizer)
    theta, velocity = owned.master.astype(np.float64), 0.0
    for t in range(1, 11):
        owned.gradient[:] = gradient_of(t)
        optimizer.update(owned, t, factor)
        velocity = momentum * velocity + gradient_of(t).astype(np.float64) * factor
        theta = theta * (1 - 0.05 * 0.01 * decay_mask()) - 0.05 * velocity
        np.testing.assert_allclose(
            owned.master, theta, rtol=0, atol=5e-6
        )  # 10 x 5 roundings of numbers below 4: 1.2e-7 each


def test_sgd_without_momentum_keeps_no_moments():
    assert SGD().moments == ()
    assert SGD(momentum=0.5).moments == ("momentum",)
    assert AdamW.moments == ("m", "v")


# ---- blocks and slices ---------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [AdamW(lr=0.1), SGD(lr=0.1, momentum=0.9, weight_decay=0.1)])
@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
def test_block_boundaries_change_no_bit(optimizer, block, monkeypatch):
    def result():
        owned = owned_by(optimizer)
        for t in (1, 2, 3):
            owned.gradient[:] = gradient_of(t)
            optimizer.update(owned, t, 0.7)
        return [owned.master.tobytes(), *(vector.tobytes() for vector in owned.moments.values())]

    expected = result()
    monkeypatch.setattr(optim, "CACHE_BLOCK", block)
    assert result() == expected


@pytest.mark.parametrize("optimizer", [AdamW(lr=0.1), SGD(lr=0.1, momentum=0.9, weight_decay=0.1)])
@pytest.mark.parametrize("cut", [1, 299, 300, 333, 999])
def test_slices_are_updated_as_one_vector_would_be(optimizer, cut):
    whole, parts = owned_by(optimizer), owned_by(optimizer)
    for owned in (whole, parts):
        owned.gradient[:] = gradient_of(1)
    optimizer.update(whole, 1, 0.7)
    for first, last in ((0, cut), (cut, LENGTH)):
        inside = [
            (max(a, first) - first, min(b, last) - first, d)
            for a, b, d in DECAYED
            if max(a, first) < min(b, last)
        ]
        moments = {name: vector[first:last] for name, vector in parts.moments.items()}
        optimizer.update(
            Slice(parts.master[first:last], parts.gradient[first:last], moments, inside), 1, 0.7
        )
    assert parts.master.tobytes() == whole.master.tobytes()
    for name, vector in whole.moments.items():
        assert parts.moments[name].tobytes() == vector.tobytes()


# ---- the learning rate, and clipping -------------------------------------------------------------


def test_the_rate_rises_to_lr_and_stays():
    optimizer = SGD(lr=0.4, warmup=4)
    assert [optimizer.rate(t) for t in (1, 2, 3, 4, 5, 1000)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.4, 0.4]
    )


def test_the_rate_follows_half_a_cosine_to_a_tenth():
    optimizer = AdamW(lr=1.0, warmup=10, schedule="cosine", decay_steps=110)
    assert optimizer.rate(5) == pytest.approx(0.5)
    assert optimizer.rate(10) == 1.0
    assert optimizer.rate(60) == pytest.approx(0.55)  # half way between 1 and a tenth
    assert optimizer.rate(35) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 4)))
    assert optimizer.rate(110) == optimizer.rate(5000) == pytest.approx(0.1)


def test_without_warm_up_the_first_rate_is_lr():
    assert SGD(lr=0.3).rate(1) == 0.3
    assert AdamW(lr=0.3, schedule="cosine", decay_steps=50).rate(1) < 0.3


def test_clipping_multiplies_by_clip_over_norm_only_above_clip():
    optimizer = SGD(clip=2.0)
    assert (
        optimizer.clip_factor(2.0)
        == optimizer.clip_factor(1.0)
        == optimizer.clip_factor(0.0)
        == 1.0
    )
    assert optimizer.clip_factor(8.0) == 0.25
    assert SGD(clip=0.0).clip_factor(1e9) == 1.0


@pytest.mark.parametrize(
    "name", ["lr", "warmup", "decay_steps", "clip", "weight_decay", "beta1", "beta2", "eps"]
)
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_a_hyperparameter_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        AdamW(**{name: value})


def test_other_wrong_hyperparameters_are_named():
    with pytest.raises(
        ValueError, match=r"^beta1: expected a finite number of at least 0 and below 1, got 1"
    ):
        AdamW(beta1=1)
    with pytest.raises(ValueError, match=r"^momentum: expected"):
        SGD(momentum=-0.1)
    with pytest.raises(ValueError, match=r"^schedule: expected constant or cosine, got 'linear'"):
        SGD(schedule="linear")
    with pytest.raises(
        ValueError, match=r"^decay_steps: expected more than the warm-up's 0 steps, got 0"
    ):
        SGD(schedule="cosine")


# ---- the sums of squares -------------------------------------------------------------------------

LENGTHS = (
    0,
    1,
    7,
    129,
    8193,
    CACHE_BLOCK - 1,
    CACHE_BLOCK,
    CACHE_BLOCK + 1,
    2 * CACHE_BLOCK + 3,
)  # of a piece


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_sums_of_squares_are_made_in_float64(dtype, length):
    vector = (100 * np.random.default_rng(0).standard_normal(3 * length)).astype(dtype)
    expected = [math.fsum(float(x) ** 2 for x in piece) for piece in np.split(vector, 3)]
    assert sums_of_squares(vector, 3) == pytest.approx(expected, rel=1e-13)
    # float64's rounding: pairwise sums of at most 140,000 squares


@pytest.mark.parametrize("length", LENGTHS)
def test_a_piece_has_the_same_sum_beside_others_and_alone(length):
    """So every number of ranks that divides the pieces has the same bits: 12 pieces, 1 to 12."""
    vector = np.random.default_rng(length).standard_normal(12 * length).astype(np.float32)
    found = sums_of_squares(vector, 12).tolist()
    for size in (2, 3, 4, 6, 12):
        shards = [sums_of_squares(shard, 12 // size) for shard in np.split(vector, size)]
        assert np.concatenate(shards).tolist() == found, size
    if length <= CACHE_BLOCK:
        pieces = np.split(vector.astype(np.float64) ** 2, 12)
        assert [piece.sum() for piece in pieces] == found


def test_squares_that_overflow_float32_are_added_up():
    assert sums_of_squares(np.full(10, 1e30, np.float32), 1) == pytest.approx([1e61], rel=1e-6)
    assert sums_of_squares(np.full(10, 6e4, np.float16), 1) == pytest.approx(
        [10 * float(np.float16(6e4)) ** 2]
    )


def test_the_sums_of_squares_depend_on_values_alone():
    vector = np.random.default_rng(0).standard_normal(20_001).astype(np.float32)
    for offset in (1, 3):
        moved = np.zeros(len(vector) + offset, np.float32)[offset:]
        moved[:] = vector
        assert sums_of_squares(moved, 1) == sums_of_squares(vector, 1)
    assert math.isnan(sums_of_squares(np.array([1, np.nan], np.float32), 1)[0])
    assert math.isinf(sums_of_squares(np.array([1, np.inf], np.float16), 1)[0])
