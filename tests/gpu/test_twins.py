"""On a GPU: each fused twin against its reference in float64, on values that its type can hold.

What the tests on the CPU (test_kernels.py) cannot show: warps and blocks side by side, cuBLAS,
CuPy's own functions.
"""

import ml_dtypes
import numpy as np
import pytest

from models import GPT, attention, fused, ops, plain_step, plain_weights
from zmpi.numbers.optim import AdamW, Slice, sums_of_squares
from zmpi.numbers.sums import add_in_order

# relative to the largest element: float64 rounding; float32 sums of some thousand terms; one
# rounding of a result in 16 bits
TOLERANCE = {"float64": 1e-12, "float32": 3e-5, "float16": 3e-3, "bfloat16": 2e-2}
TYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}

kinds = pytest.mark.parametrize("kind", TYPES)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def pair(array, kind):
    """(the reference's float64 array, the GPU's array of the type) of the same values."""
    import cupy

    narrow = array.astype(TYPES[kind])
    return narrow.astype(np.float64), cupy.asarray(narrow)


def zeros(shape, kind):
    """(float64, the GPU's): gradients of parameters are of 32 bits at least."""
    import cupy

    return np.zeros(shape), cupy.zeros(shape, np.float64 if kind == "float64" else np.float32)


def assert_close(found, expected, kind):
    found = found.get().astype(np.float64)
    assert np.abs(found - expected).max() <= TOLERANCE[kind] * np.abs(expected).max()


@kinds
@pytest.mark.parametrize(("N", "C", "F"), [(300, 768, 3072), (5, 7, 9), (1, 1, 1)])
def test_linear_and_gelu(kind, N, C, F):
    (x, x_), (w, w_), (b, b_) = (
        pair(normal(N, C), kind),
        pair(normal(C, F) / C**0.5, kind),
        pair(normal(F), kind),
    )
    dy, dy_ = pair(normal(N, F, seed=1), kind)
    assert_close(ops.linear(x_, w_, b_), ops.linear(x, w, b), kind)
    (dw, dw_), (db, db_) = zeros((C, F), kind), zeros(F, kind)
    for _ in range(2):  # it adds
        dx, dx_ = ops.linear_backward(dy, x, w, dw, db), ops.linear_backward(dy_, x_, w_, dw_, db_)
    for found, expected in ((dx_, dx), (dw_, dw), (db_, db)):
        assert_close(found, expected, kind)
    h, h_ = pair(normal(N, F, seed=2), kind)
    assert_close(ops.gelu(h_), ops.gelu(h), kind)
    assert_close(fused.bias_gelu(h_, b_), fused.bias_gelu(h, b), kind)
    assert_close(h_, h, kind)  # the slope
    assert_close(fused.bias_gelu_backward(dy_, h_, db_), fused.bias_gelu_backward(dy, h, db), kind)
    assert_close(db_, db, kind)


@kinds
@pytest.mark.parametrize(("N", "C"), [(1000, 768), (5, 7), (33, 31)])
def test_layer_norm(kind, N, C):
    (x, x_), (gain, gain_), (bias, bias_) = (
        pair(1 + normal(*shape, seed=3), kind) for shape in ((N, C), (C,), (C,))
    )
    (y, saved), (y_, saved_) = ops.layer_norm(x, gain, bias), ops.layer_norm(x_, gain_, bias_)
    assert_close(y_, y, kind)
    assert_close(saved_[1], saved[1], kind)
    given = saved_[0].get().astype(np.float64), saved_[1].get().astype(np.float64)
    (dy, dy_), (dgain, dgain_), (dbias, dbias_) = (
        pair(normal(N, C), kind),
        zeros(C, kind),
        zeros(C, kind),
    )
    dx_ = ops.layer_norm_backward(dy_, saved_, gain_, dgain_, dbias_)
    assert_close(dx_, ops.layer_norm_backward(dy, given, gain, dgain, dbias), kind)
    assert_close(dgain_, dgain, "float32" if kind != "float64" else kind)
    assert_close(dbias_, dbias, "float32" if kind != "float64" else kind)


@kinds
@pytest.mark.parametrize(("B", "T", "heads", "D"), [(2, 200, 3, 64), (2, 33, 2, 5), (1, 1, 1, 1)])
def test_attention(kind, B, T, heads, D):
    (qkv, qkv_), (dy, dy_) = (
        pair(normal(B, T, 3 * heads * D), kind),
        pair(normal(B, T, heads * D), kind),
    )
    y_, lse_ = attention.attention(qkv_, heads)
    y, lse = attention.attention(qkv, heads)
    assert_close(y_, y, kind)
    assert_close(lse_, lse, kind)
    given = y_.get().astype(np.float64), lse_.get().astype(np.float64)
    assert_close(
        attention.attention_backward(dy_, qkv_, y_, lse_),
        attention.attention_backward(dy, qkv, *given),
        kind,
    )


@kinds
def test_embedding_and_cross_entropy(kind):
    import cupy

    tokens = np.random.default_rng(0).integers(0, 50, (4, 500))
    (dy, dy_), (dw, dw_) = pair(normal(4, 500, 70), kind), zeros((60, 70), kind)
    ops.embedding_backward(dy, tokens, dw)
    ops.embedding_backward(dy_, cupy.asarray(tokens), dw_)
    assert_close(dw_, dw, "float32" if kind != "float64" else kind)
    (z, z_), targets = (
        pair(3 * normal(100, 5001), kind),
        np.random.default_rng(1).integers(-500, 5001, 100),
    )
    loss, d = ops.cross_entropy(z, targets, 77)
    loss_, d_ = ops.cross_entropy(z_, cupy.asarray(targets), 77)
    assert loss_ == pytest.approx(loss, rel=1e-5)
    assert_close(d_, d, kind)


@kinds
def test_sums_and_adamw(kind):
    import cupy

    rows = (normal(5, 10000) * 10.0 ** np.arange(-2, 3)[:, None]).astype(TYPES[kind])
    out = np.full(10000, 7, np.float64 if kind == "float64" else np.float32)
    for fresh in (True, False):
        out_ = cupy.asarray(out)
        add_in_order(rows, out, fresh)
        add_in_order(cupy.asarray(rows), out_, fresh)
        assert out_.get().tobytes() == out.tobytes()
    assert sums_of_squares(cupy.asarray(rows[4]), 8) == pytest.approx(
        sums_of_squares(rows[4], 8), rel=1e-13
    )
    owned = []
    for make in (np.array, cupy.asarray):
        vectors = [make(normal(1000, seed=i).astype(out.dtype)) for i in range(3)]
        moments = {"m": vectors[1], "v": abs(vectors[2])}
        owned.append(
            Slice(
                vectors[0],
                make(normal(1000).astype(TYPES[kind])),
                moments,
                [(0, 400, True), (416, 990, False)],
            )
        )
    if kind in ("float16", "bfloat16"):
        owned[1].stored = cupy.zeros(1000, TYPES[kind])
    AdamW(lr=0.1, eps=1e-3).update(owned[0], 2, 0.7)
    AdamW(lr=0.1, eps=1e-3).update(owned[1], 2, 0.7)
    assert_close(owned[1].master, owned[0].master.astype(np.float64), "float32")
    if owned[1].stored is not None:
        inside = np.r_[0:400, 416:990]
        expected = owned[1].master.get().astype(TYPES[kind])[inside]
        assert owned[1].stored.get()[inside].tobytes() == expected.tobytes()


def test_launches_again_give_the_same_bits():
    import cupy

    model = GPT(2, 96, 3, 64, 301)
    inputs = cupy.asarray(np.random.default_rng(0).integers(0, 301, (4, 64)))
    found = []
    for _ in range(3):
        weights = {
            u: {n: cupy.asarray(a) for n, a in w.items()}
            for u, w in plain_weights(model, 0, np.float32).items()
        }
        kept = []
        loss = plain_step(
            model, weights, [(inputs, inputs)], lambda w, dw, kept=kept: kept.append(dw)
        )
        found.append((loss, [a.get().tobytes() for w in kept[0].values() for a in w.values()]))
    assert found[0] == found[1] == found[2]
