"""Each operation alone: gradient, numbers and dtype, for every block size and alignment.

Gradients are compared in float64 with finite differences of five points, (8 (f(h) - f(-h)) - (f(2h)
- f(-2h))) / 12h: at h = 1e-3 their error is about h^4 = 1e-12 by truncation and eps / h = 1e-13 by
rounding, so 1e-8 of the largest element leaves room for derivatives far above 1 and is still far
below any wrong term.
"""

import math

import numpy as np
import pytest

from models import attention, fused, ops

RELATIVE = 1e-8


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def difference(f, array, h=1e-3):
    """The gradient of f() by every element of `array`, which f reads."""
    gradient = np.empty_like(array)
    for i in np.ndindex(array.shape):
        kept, values = array[i], {}
        for k in (-2, -1, 1, 2):
            array[i] = kept + k * h
            values[k] = f()
        array[i] = kept
        gradient[i] = (8 * (values[1] - values[-1]) - (values[2] - values[-2])) / (12 * h)
    return gradient


def assert_gradient(f, array, gradient):
    expected = difference(f, array)
    assert np.abs(gradient - expected).max() <= RELATIVE * np.abs(expected).max()


def packed(*shapes, offset, dtype=np.float32):
    """Arrays of random numbers, one after the other in one vector, from element `offset` on."""
    vector, views = np.empty(offset + sum(math.prod(s) for s in shapes), dtype), []
    for shape in shapes:
        views.append(vector[offset : offset + math.prod(shape)].reshape(shape))
        views[-1][...] = normal(*shape, dtype=dtype)
        offset += math.prod(shape)
    return views


# ---- gradients -----------------------------------------------------------------------------------


def test_linear_backward_is_the_gradient_of_linear():
    x, w, b, dy = normal(2, 3, 4), normal(4, 5), normal(5), normal(2, 3, 5, seed=1)
    dw, db = np.zeros_like(w), np.zeros_like(b)
    dx = ops.linear_backward(dy, x, w, dw, db)
    for array, gradient in ((x, dx), (w, dw), (b, db)):
        assert_gradient(lambda: np.sum(ops.linear(x, w, b) * dy), array, gradient)


def test_gelu_backward_is_the_gradient_of_gelu():
    x, dy = 3 * normal(5, 7), normal(5, 7, seed=1)
    assert_gradient(lambda: np.sum(ops.gelu(x) * dy), x, ops.gelu_backward(dy.copy(), x))


def test_bias_gelu_is_the_plain_pair_in_one_pass(monkeypatch):
    """float64: the same terms, associated differently; a few roundings of 2^-53 of up to 8."""
    monkeypatch.setattr(ops, "BLOCK", 16)  # two rows of 7 at a time, the last block one row
    x, b, dy, db = 3 * normal(5, 7), normal(7), normal(5, 7, seed=1), normal(7, seed=2)
    slope, dx, before = x.copy(), dy.copy(), db.copy()
    y = fused.bias_gelu(slope, b)
    assert fused.bias_gelu_backward(dx, slope, db) is dx
    plain = ops.gelu_backward(dy.copy(), x + b)
    np.testing.assert_allclose(y, ops.gelu(x + b), rtol=0, atol=1e-14)
    np.testing.assert_allclose(dx, plain, rtol=0, atol=1e-14)
    np.testing.assert_allclose(db - before, plain.sum(axis=0), rtol=0, atol=1e-14)


def test_layer_norm_backward_is_the_gradient_of_layer_norm():
    x, gain, bias, dy = (
        1 + 2 * normal(2, 3, 6),
        normal(6),
        normal(6, seed=2),
        normal(2, 3, 6, seed=1),
    )
    dgain, dbias = np.zeros_like(gain), np.zeros_like(bias)
    dx = ops.layer_norm_backward(dy.copy(), ops.layer_norm(x, gain, bias)[1], gain, dgain, dbias)
    for array, gradient in ((x, dx), (gain, dgain), (bias, dbias)):
        assert_gradient(lambda: np.sum(ops.layer_norm(x, gain, bias)[0] * dy), array, gradient)


@pytest.mark.parametrize("rows", [2, 64])
@pytest.mark.parametrize("sequences", [1, 2, 3])
def test_attention_backward_is_the_gradient_of_attention(rows, sequences, monkeypatch):
    monkeypatch.setattr(attention, "ROWS", rows)  # T = 5 in blocks of 2, 2 and 1, and as one block
    monkeypatch.setattr(
        attention, "SCORES", sequences * 3 * min(rows, 5) * 5
    )  # B = 3 one by one, as 2 and 1, at once
    assert next(attention.attention_blocks(3, 3, 5))[0] == slice(0, sequences)
    qkv, dy = normal(3, 5, 18), normal(3, 5, 6, seed=1)
    dqkv = attention.attention_backward(dy, qkv, *attention.attention(qkv, 3))
    assert_gradient(lambda: np.sum(attention.attention(qkv, 3)[0] * dy), qkv, dqkv)


def test_embedding_backward_is_the_gradient_of_embedding():
    tokens, w, dy = np.array([[3, 1, 3], [0, 3, 1]]), normal(5, 4), normal(2, 3, 4, seed=1)
    dw = np.zeros_like(w)
    ops.embedding_backward(dy, tokens, dw)
    assert_gradient(lambda: np.sum(ops.embedding(tokens, w) * dy), w, dw)


def test_cross_entropy_returns_the_gradient_of_its_loss_divided():
    logits, targets = 3 * normal(4, 7), np.array([2, -1, 6, 0])
    _, d = ops.cross_entropy(logits.copy(), targets, 5)
    assert_gradient(lambda: ops.cross_entropy(logits.copy(), targets, 5)[0] / 5, logits, d)


# ---- numbers -------------------------------------------------------------------------------------


def test_attention_equals_its_formula():
    B, T, H, D = 2, 150, 3, 4  # three blocks of rows, the last one short
    qkv = normal(B, T, 3 * H * D)
    q, k, v = (a.reshape(B, T, H, D).transpose(0, 2, 1, 3) for a in np.split(qkv, 3, axis=-1))
    scores = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(2, 3) / math.sqrt(D), -np.inf)
    p = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    expected = (p @ v).transpose(0, 2, 1, 3).reshape(B, T, H * D)
    # float64: sums of at most 150 terms near 1
    np.testing.assert_allclose(attention.attention(qkv, H)[0], expected, rtol=0, atol=1e-14)


def test_attention_survives_large_scores():
    qkv = 1e4 * normal(1, 5, 6, dtype=np.float32)  # scores of about 1e8
    y, lse = attention.attention(qkv, 1)
    assert np.isfinite(y).all() and np.isfinite(lse).all()
    assert np.isfinite(attention.attention_backward(y, qkv, y, lse)).all()


def test_gelu_has_its_known_values():
    # at 0, 1 and -1 by the formula with 30 digits; at +-30 the tanh is +-1 to the last bit
    expected = [0, 0.84119199060827670, -0.15880800939172330, 30, 0]
    np.testing.assert_allclose(
        ops.gelu(np.array([[0, 1, -1, 30, -30.0]]))[0], expected, rtol=0, atol=1e-15
    )


def test_layer_norm_leaves_mean_0_and_variance_1():
    y, _ = ops.layer_norm(5 + 3 * normal(4, 50), np.ones(50), np.zeros(50))
    np.testing.assert_allclose(y.mean(axis=1), 0, atol=1e-14)  # float64 sums of 50 terms
    np.testing.assert_allclose(y.var(axis=1), 1, atol=1e-5)  # eps is 1e-5 beside a variance of 9


def test_layer_norm_of_large_numbers_stays_finite():
    x = np.float32(1e18) * normal(
        2, 300, dtype=np.float32
    )  # squares near 1e36, float32 ends at 3e38
    assert np.isfinite(
        ops.layer_norm(x, np.ones(300, np.float32), np.zeros(300, np.float32))[0]
    ).all()


def test_cross_entropy_sums_the_counted_targets_only():
    logits, targets = normal(5, 7), np.array([2, -1, 6, 0, -100])
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    loss, d = ops.cross_entropy(logits.copy(), targets, 3)
    expected = -math.log(p[0, 2]) - math.log(p[2, 6]) - math.log(p[3, 0])
    assert loss == pytest.approx(expected, rel=1e-14)  # float64 rounding
    assert isinstance(loss, float)
    assert not d[1].any() and not d[4].any()


@pytest.mark.parametrize("divisor", [0, 12])
def test_cross_entropy_without_a_counted_target_is_0(divisor):
    loss, d = ops.cross_entropy(normal(3, 7), np.array([-1, -1, -1]), divisor)
    assert loss == 0.0 and not d.any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_cross_entropy_survives_large_logits(dtype):
    logits = 1e4 * normal(3, 7, dtype=dtype)
    loss, d = ops.cross_entropy(logits, np.array([0, 1, 2]), 3)
    assert math.isfinite(loss) and np.isfinite(d).all()


def test_cross_entropy_divides_by_fractions_too():
    logits, targets = normal(2, 7), np.array([2, 5])
    _, d = ops.cross_entropy(logits.copy(), targets, 0.25)  # a loss scale makes the divisor small
    np.testing.assert_array_equal(d, 4 * ops.cross_entropy(logits.copy(), targets, 1)[1])


def test_a_divisor_of_numpys_type_changes_no_bit():
    logits, targets = normal(4, 7, dtype=np.float32), np.array([2, 5, 0, 1])
    d = ops.cross_entropy(logits.copy(), targets, 3)[1]
    for divisor in (np.int64(3), np.float64(3)):
        np.testing.assert_array_equal(ops.cross_entropy(logits.copy(), targets, divisor)[1], d)


# ---- memory --------------------------------------------------------------------------------------


def test_cross_entropy_reuses_the_memory_of_the_logits():
    logits = normal(3, 7)
    assert ops.cross_entropy(logits, np.array([0, 1, 2]), 3)[1] is logits


def everything(offset, dtype=np.float32):
    """Every operation on arrays packed from element `offset` on; returns the results as a list."""
    N, C, H, V = 6, 15, 3, 11
    x, w, b, gain, bias = packed(
        (2, N, C), (C, 3 * C), (3 * C,), (C,), (C,), offset=offset, dtype=dtype
    )
    dw, db, dgain, dbias = packed((C, 3 * C), (3 * C,), (C,), (C,), offset=offset, dtype=dtype)
    table, dtable, logits, dy = packed(
        (V, C), (V, C), (2 * N, V), (2, N, 3 * C), offset=offset, dtype=dtype
    )
    tokens = np.arange(2 * N).reshape(2, N) ** 2 % V
    norm, saved = ops.layer_norm(x, gain, bias)
    qkv = ops.linear(norm, w, b)
    y, lse = attention.attention(qkv, H)
    results = [norm, *saved, qkv, y, lse, ops.gelu(qkv), ops.embedding(tokens, table)]
    results += [attention.attention_backward(y, qkv, y, lse), ops.linear_backward(dy, x, w, dw, db)]
    results += [
        fused.bias_gelu(slope := qkv.copy(), b),
        fused.bias_gelu_backward(dy.copy(), slope, db),
    ]
    results += [ops.gelu_backward(dy, qkv), ops.layer_norm_backward(y, saved, gain, dgain, dbias)]
    ops.embedding_backward(x, tokens, dtable)
    loss, d = ops.cross_entropy(logits, tokens.reshape(-1) - 1, 9)
    return [*results, dw, db, dgain, dbias, dtable, np.array(loss), d]


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 7, 13])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_results_do_not_depend_on_where_the_arrays_lie(offset, dtype):
    for here, there in zip(everything(0, dtype), everything(offset, dtype), strict=True):
        np.testing.assert_array_equal(here, there)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_results_have_the_dtype_of_the_inputs(dtype):
    *arrays, loss, _ = everything(0, dtype)
    assert loss.dtype == np.float64
    assert {a.dtype for a in arrays} == {np.dtype(dtype)}


def test_blocks_of_rows_change_nothing_but_the_order_of_sums(monkeypatch):
    whole = everything(0, np.float64)
    monkeypatch.setattr(ops, "BLOCK", 32)  # two rows at a time, or fewer
    monkeypatch.setattr(attention, "ROWS", 4)
    for expected, result in zip(whole, everything(0, np.float64), strict=True):
        np.testing.assert_allclose(
            result, expected, rtol=0, atol=1e-13
        )  # float64 sums of about 20 terms near 1


def test_embedding_gradient_adds_onto_what_was_there():
    dy, tokens = normal(4, 3), np.array([1, 0, 1, 1])
    dw = np.full((3, 3), 10.0)
    ops.embedding_backward(dy, tokens, dw)
    np.testing.assert_array_equal(dw, [10 + dy[1], 10 + (dy[0] + dy[2] + dy[3]), [10, 10, 10]])
