"""The fused kernels without a GPU: they compile for one, and on the CPU they equal the references.

Tolerances: in float64 the same terms in another order; in float32 sums of some hundred terms near
1, 2^-24 each; in 16 bits the twins round once where a result is stored, 2^-9 (bfloat16) or 2^-11
(float16) of it.
"""

import ctypes
import sys
from pathlib import Path

import host_cupy
import ml_dtypes
import numpy as np
import pytest
from host_cupy import COMPILER, ROOT, cuda_includes, here

from models import GPT, MLP, attention, cached, fused, ops, plain_step, plain_weights
from models.twins import on_gpu
from zmpi.numbers.optim import AdamW, Slice, sums_of_squares
from zmpi.numbers.sums import add_in_order

SOURCES = [ROOT / path / "kernels.cu" for path in ("models", "zmpi/numbers")]
TOLERANCE = {np.float64: 1e-12, np.float32: 2e-5, np.float16: 2e-3, ml_dtypes.bfloat16: 1.6e-2}

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++ on this machine")
needs_headers = pytest.mark.skipif(
    cuda_includes() is None, reason="CUDA's headers are not installed: pip install zmpi[kernels]"
)
dtypes = pytest.mark.parametrize(
    "dtype",
    [
        np.float64,
        np.float32,
        pytest.param(np.float16, marks=needs_headers),
        pytest.param(ml_dtypes.bfloat16, marks=needs_headers),
    ],
)


# ---- (b) NVRTC -----------------------------------------------------------------------------------


def nvrtc():
    """NVIDIA's kernel compiler as a library, if nvidia-cuda-nvrtc is installed, else None."""
    found = [f for path in sys.path for f in Path(path).glob("nvidia/cu*/lib/libnvrtc.so.*")]
    return ctypes.CDLL(str(found[0])) if found else None


@pytest.mark.skipif(
    nvrtc() is None or cuda_includes() is None,
    reason="NVRTC is not installed: pip install zmpi[kernels]",
)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("define", ["FLOAT16", "BFLOAT16", "FLOAT32", "FLOAT64"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.parent.name)
def test_every_kernel_compiles(source, define, architecture):
    status, log, size = compiled(
        (ROOT / "models" / "prelude.cuh").read_text() + source.read_text(), define, architecture
    )
    assert status == 0, log
    assert size > 1000


@pytest.mark.skipif(
    nvrtc() is None or cuda_includes() is None,
    reason="NVRTC is not installed: pip install zmpi[kernels]",
)
def test_a_wrong_kernel_does_not_compile():
    status, log, _ = compiled(
        'extern "C" __global__ void k(float *x) { x[0] = y; }', "FLOAT32", "sm_90"
    )
    assert status and "identifier" in log


def compiled(text, define, architecture):
    """(status, log, bytes of machine code)."""
    library, program = nvrtc(), ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"k.cu", 0, None, None)
    flags = [f"-arch={architecture}", "-std=c++17", f"-D{define}", f"-I{cuda_includes()}"]
    status = library.nvrtcCompileProgram(
        program, len(flags), (ctypes.c_char_p * len(flags))(*map(str.encode, flags))
    )
    size, length = ctypes.c_size_t(), ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(length))
    log = ctypes.create_string_buffer(length.value)
    library.nvrtcGetProgramLog(program, log)
    if status == 0:
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return status, log.value.decode(), size.value


# ---- (c) the text on the CPU ---------------------------------------------------------------------


@pytest.fixture
def twins(monkeypatch):
    """(models.kernels, zmpi.numbers.kernels) on a CPU."""
    if COMPILER is None:
        pytest.skip("no g++ on this machine")
    return host_cupy.install(monkeypatch)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def rounded(array, dtype):
    """The values that the type can hold, in float64: what the reference computes with."""
    return array.astype(dtype).astype(np.float64)


def assert_close(found, expected, dtype):
    found = np.asarray(found).astype(np.float64)
    scale = np.abs(expected).max()
    assert np.abs(found - expected).max() <= TOLERANCE[dtype] * scale, (
        np.abs(found - expected).max() / scale
    )


def pair(array, dtype):
    """(the reference's float64 array, the twin's array of the type) of the same values."""
    return rounded(array, dtype), here(array.astype(dtype))


def wide(dtype):
    return np.float64 if dtype == np.float64 else np.float32


def test_cupys_arrays_are_handed_to_the_twin(twins, monkeypatch):
    called = []
    monkeypatch.setattr(twins[0], "gelu", lambda x: called.append("gelu") or x)
    monkeypatch.setattr(
        twins[1], "sums_of_squares", lambda x, pieces: called.append("squares") or []
    )
    ops.gelu(here(normal(2, 3)))
    sums_of_squares(here(normal(24)), 24)
    assert called == ["gelu", "squares"]
    ops.gelu(normal(2, 3))
    assert len(called) == 2


def test_every_twin_has_the_name_and_signature_of_its_reference(twins):
    import inspect

    import zmpi.numbers.optim
    import zmpi.numbers.sums

    found = 0
    for module, kernels in (
        (ops, twins[0]),
        (attention, twins[0]),
        (fused, twins[0]),
        (cached, twins[0]),
        (zmpi.numbers.optim, twins[1]),
        (zmpi.numbers.sums, twins[1]),
    ):
        for name, function in vars(module).items():
            if (
                getattr(function, "__code__", None) is on_gpu(normal).__code__
                and function.__module__ == module.__name__
            ):
                assert inspect.signature(function) == inspect.signature(getattr(kernels, name)), (
                    name
                )
                found += 1
    assert found == 11 + 2 + 1 + 3


@dtypes
def test_linear(twins, dtype):
    (x, x_), (w, w_), (b, b_), (dy, dy_) = (
        pair(normal(*s), dtype) for s in ((2, 7, 5), (5, 9), (9,), (2, 7, 9))
    )
    assert_close(ops.linear(x_, w_, b_), ops.linear(x, w, b), dtype)
    dw, db = np.ones_like(w), np.ones_like(b)
    dw_, db_ = here(dw.astype(wide(dtype))), here(db.astype(wide(dtype)))
    assert_close(
        ops.linear_backward(dy_, x_, w_, dw_, db_), ops.linear_backward(dy, x, w, dw, db), dtype
    )
    assert_close(dw_, dw, dtype)
    assert_close(db_, db, dtype)


@dtypes
def test_gelu(twins, dtype):
    (x, x_), (dy, dy_) = pair(3 * normal(4, 70), dtype), pair(normal(4, 70, seed=1), dtype)
    assert_close(ops.gelu(x_), ops.gelu(x), dtype)
    dx_ = ops.gelu_backward(dy_, x_)
    assert_close(dx_, ops.gelu_backward(dy, x), dtype)
    assert np.shares_memory(dx_, dy_)


@dtypes
def test_gelu_with_a_bias(twins, dtype):
    (x, x_), (b, b_), (dy, dy_) = (pair(normal(*s), dtype) for s in ((300, 7), (7,), (300, 7)))
    y_ = fused.bias_gelu(x_, b_)
    assert_close(y_, ops.gelu(x + b), dtype)
    assert_close(x_, ops.gelu_backward(np.ones_like(x), x + b), dtype)  # the slope
    db_ = here(np.ones(7, wide(dtype)))
    dx_, dx = fused.bias_gelu_backward(dy_, x_, db_), ops.gelu_backward(dy, x + b)
    assert_close(dx_, dx, dtype)
    assert_close(
        db_,
        1 + np.asarray(dx_).astype(np.float64).sum(axis=0),
        np.float32 if dtype != np.float64 else dtype,
    )


@dtypes
@pytest.mark.parametrize("rows", [3, 300])
def test_layer_norm(twins, dtype, rows):
    (x, x_), (gain, gain_), (bias, bias_) = (
        pair(1 + normal(*s, seed=2), dtype) for s in ((rows, 50), (50,), (50,))
    )
    y_, (hat_, rstd_) = ops.layer_norm(x_, gain_, bias_)
    y, saved = ops.layer_norm(x, gain, bias)
    for found, expected in ((y_, y), (hat_, saved[0]), (rstd_, saved[1])):
        assert_close(found, expected, dtype)
    dy, dy_ = pair(normal(rows, 50, seed=1), dtype)
    given = rounded(np.asarray(hat_), np.float64), np.asarray(rstd_).astype(np.float64)
    dgain, dbias = np.ones(50), np.ones(50)
    dgain_, dbias_ = here(np.ones(50, wide(dtype))), here(np.ones(50, wide(dtype)))
    dx_ = ops.layer_norm_backward(dy_, (hat_, rstd_), gain_, dgain_, dbias_)
    assert_close(dx_, ops.layer_norm_backward(dy, given, gain, dgain, dbias), dtype)
    assert_close(dgain_, dgain, np.float32 if dtype != np.float64 else dtype)
    assert_close(dbias_, dbias, np.float32 if dtype != np.float64 else dtype)


@dtypes
@pytest.mark.parametrize(("B", "T", "heads", "D"), [(2, 70, 3, 4), (1, 5, 1, 8), (2, 1, 2, 3)])
def test_attention(twins, dtype, B, T, heads, D):
    (qkv, qkv_), (dy, dy_) = (
        pair(normal(B, T, 3 * heads * D), dtype),
        pair(normal(B, T, heads * D, seed=1), dtype),
    )
    y_, lse_ = attention.attention(qkv_, heads)
    y, lse = attention.attention(qkv, heads)
    assert_close(y_, y, dtype)
    assert_close(lse_, lse, dtype)
    given = np.asarray(y_).astype(np.float64), np.asarray(lse_).astype(np.float64)
    dqkv_ = attention.attention_backward(dy_, qkv_, y_, lse_)
    assert_close(dqkv_, attention.attention_backward(dy, qkv, *given), dtype)


@dtypes
def test_attention_of_a_few_new_positions(twins, dtype):
    (q, q_), (k, k_), (v, v_) = (
        pair(normal(3, length, 4, seed=length), dtype) for length in (2, 9, 9)
    )
    y, y_ = np.empty((3, 2, 4)), here(np.empty((3, 2, 4), dtype))
    cached.attention_to_all(q, k, v, y)
    cached.attention_to_all(q_, k_, v_, y_)
    assert_close(y_, y, dtype)


@dtypes
def test_the_embeddings_gradient(twins, dtype):
    tokens, (dy, dy_) = np.array([[3, 1, 3, 4], [0, 3, 1, 1]]), pair(normal(2, 4, 5), dtype)
    dw, dw_ = np.ones((6, 5)), here(np.ones((6, 5), wide(dtype)))
    ops.embedding_backward(dy, tokens, dw)
    ops.embedding_backward(dy_, here(tokens), dw_)
    assert_close(dw_, dw, np.float32 if dtype != np.float64 else dtype)


@dtypes
@pytest.mark.parametrize("divisor", [5, 0.25, np.float64(3)])
def test_cross_entropy(twins, dtype, divisor):
    (z, z_), targets = pair(3 * normal(6, 40), dtype), np.array([2, -1, 39, 0, -100, 7])
    loss_, d_ = ops.cross_entropy(z_, here(targets), divisor)
    loss, d = ops.cross_entropy(z, targets, divisor)
    assert isinstance(loss_, float) and loss_ == pytest.approx(loss, rel=1e-6)  # made in float32
    assert d_ is z_
    assert_close(d_, d, dtype)
    assert not np.asarray(d_)[[1, 4]].any()


def test_cross_entropy_survives_large_logits(twins):
    loss, d = ops.cross_entropy(
        here(np.float32(1e4) * normal(3, 7).astype(np.float32)), here(np.array([0, 1, 2])), 3
    )
    assert np.isfinite(loss) and np.isfinite(d).all()


def test_a_product_of_every_arrangement(twins):
    a, b, out = normal(3, 4, 5), normal(3, 5, 6), normal(3, 4, 6)
    for a_ in (
        here(a),
        here(a.swapaxes(1, 2).copy()).swapaxes(1, 2),
        here(np.repeat(a, 2, axis=1))[:, ::2],
    ):
        for b_ in (
            here(b),
            here(b.swapaxes(1, 2).copy()).swapaxes(1, 2),
            here(np.repeat(b, 2, axis=2))[:, :, ::2],
        ):
            for out_ in (here(out), here(np.repeat(out, 2, axis=1))[:, ::2]):
                twins[0].multiply(a_, b_, out_)
                np.testing.assert_allclose(out_, a @ b, rtol=0, atol=1e-13)  # sums of 5 terms
                twins[0].multiply(a_, b_, out_, accumulate=True)
                np.testing.assert_allclose(out_, 2 * (a @ b), rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="contiguous rows in out"):
        twins[0].multiply(here(a), here(b), here(out.swapaxes(1, 2).copy()).swapaxes(1, 2))


def test_memory_that_is_written_over_must_be_contiguous(twins):
    with pytest.raises(ValueError, match="expected contiguous memory"):
        ops.gelu_backward(here(normal(4, 6)).T, here(normal(6, 4)))


# ---- whole models --------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [GPT(2, 6, 3, 5, 11), MLP(2, 6, 5, 11)], ids=["GPT", "MLP"])
def test_a_step_on_the_twins_is_the_references_step(twins, model):
    inputs = np.random.default_rng(0).integers(0, 11, (3, 5))
    targets = np.array([4, -1, 4]) if isinstance(model, MLP) else np.roll(inputs, -1, axis=1)
    results = []
    for make in (np.array, here):
        weights = {
            u: {n: make(a) for n, a in w.items()}
            for u, w in plain_weights(model, 0, np.float64).items()
        }
        gradients = []
        loss = plain_step(
            model,
            weights,
            [(make(inputs), make(targets))],
            lambda w, dw, out=gradients: out.append(dw),
        )
        results.append((loss, gradients[0]))
    (loss, expected), (loss_, found) = results
    assert loss_ == pytest.approx(loss, rel=1e-12)
    for unit, named in expected.items():
        for name, array in named.items():
            np.testing.assert_allclose(
                found[unit][name], array, rtol=0, atol=1e-13, err_msg=name
            )  # float64 sums


# ---- zmpi's --------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("fresh", [True, False])
def test_the_sum_of_slices_is_ordered_to_the_bit(twins, dtype, fresh):
    rows = (normal(5, 1000) * 10.0 ** np.arange(-2, 3)[:, None]).astype(dtype)
    for kind in {wide(dtype), dtype} if fresh else {wide(dtype)}:
        out = np.full(1000, 7, kind)
        out_ = here(out)
        add_in_order(rows, out, fresh)
        add_in_order(here(rows), out_, fresh)
        assert out_.tobytes() == out.tobytes()
        add_in_order(rows[::-1], out, fresh=True)
        add_in_order(
            here(rows)[::-1], out_, fresh=True
        )  # rows in another order are read as they lie
        assert out_.tobytes() == out.tobytes()


def test_a_sum_is_not_added_onto_16_bits(twins):
    with pytest.raises(ValueError, match="float16 cannot be added onto float16"):
        add_in_order(here(np.zeros((2, 3), np.float16)), here(np.zeros(3, np.float16)), fresh=False)


@dtypes
@pytest.mark.parametrize("length", [1, 77, 5000])
def test_sums_of_squares(twins, dtype, length):
    vector = (1e3 * normal(6 * length)).astype(dtype)
    found = sums_of_squares(here(vector), 6)
    assert found.dtype == np.float64 and found.shape == (6,)
    assert found == pytest.approx(sums_of_squares(vector, 6), rel=1e-13)


@dtypes
@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_adamw(twins, dtype, factor):
    n, optimizer, narrow = 200, AdamW(lr=0.1, eps=1e-3), np.dtype(dtype).itemsize < 4
    p, g, m, v = normal(n), normal(n, seed=1), normal(n, seed=2), normal(n, seed=3) ** 2
    decayed = [(0, 50, True), (64, 100, False), (128, 190, True)]  # holes of padding
    slices = []
    for make, kind in ((np.array, np.float64), (here, wide(dtype))):
        master, gradient = (
            make(rounded(p, wide(dtype)).astype(kind)),
            make(rounded(g, dtype).astype(kind)),
        )
        moments = {
            "m": make(rounded(m, wide(dtype)).astype(kind)),
            "v": make(rounded(v, wide(dtype)).astype(kind)),
        }
        slices.append(Slice(master, gradient, moments, decayed))
    expected, found = slices
    found.gradient = here(g.astype(dtype))
    found.stored = here(np.full(n, 3, dtype)) if narrow else None
    optimizer.update(expected, 3, factor)
    optimizer.update(found, 3, factor)
    for one, other in (
        (found.master, expected.master),
        *((found.moments[k], expected.moments[k]) for k in "mv"),
    ):
        assert_close(one, other, wide(dtype))
    if narrow:
        inside = np.concatenate([np.arange(start, stop) for start, stop, _ in decayed])
        assert found.stored[inside].tobytes() == found.master.astype(dtype)[inside].tobytes()
        outside = np.setdiff1d(np.arange(n), inside)
        assert (found.stored[outside] == 3).all()
