"""What GPU twins are built from: CUDA kernels, compiled on first use, and cuBLAS matrix products.

All kernels include prelude.cuh and are compiled for one number type. Sums are made in float32
(float64 for float64); 16-bit matrix products run on tensor cores and sum in float32.
"""

from functools import cache
from pathlib import Path

import cupy
import numpy as np
from cupy_backends.cuda.libs import cublas

THREADS = 256  # per block: 8 rows of 32 lanes
DEFINES = {
    "float16": "-DFLOAT16",
    "bfloat16": "-DBFLOAT16",
    "float32": "-DFLOAT32",
    "float64": "-DFLOAT64",
}
CUDA_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}  # cudaDataType_t
PRELUDE = Path(__file__).with_name("prelude.cuh")
NOTHING = np.uint64(0)  # a null pointer


@cache
def compiled(source, kind):
    """The kernels of a .cu file for one number type (by name), compiled on first use."""
    text = PRELUDE.read_text() + source.read_text()
    return cupy.RawModule(code=text, options=("-std=c++17", DEFINES[kind]))


def queue_kernel(name, kind, size, *arguments, source):
    """Queue a kernel of the file `source` for arrays of type `kind`, with `size` threads in total.

    Integers are passed as Index.
    """
    passed = [np.int64(value) if isinstance(value, int) else value for value in arguments]
    compiled(source, str(kind)).get_function(name)(
        (max(1, -(-size // THREADS)),), (THREADS,), passed
    )


def wide(x):
    """The type to compute and sum x's elements in: W of the kernels."""
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)


def contiguous(x):
    """x, contiguous: kernels take no strides."""
    return cupy.ascontiguousarray(x)


# ---- matrix products -----------------------------------------------------------------------------


def multiply(a_BMK, b_BKN, out_BMN, accumulate=False):
    """out = a @ b, or out += a @ b. One axis of each must be contiguous; `out` may be a wider type.

    CuPy's own matmul, for more than two axes, casts float16 to float32 and lacks bfloat16.
    """
    (B, M, K), N = a_BMK.shape, b_BKN.shape[2]
    (a, of_a, row_a), (b, of_b, row_b), (out, of_out, row_out) = map(
        _operand, (a_BMK, b_BKN, out_BMN)
    )
    if of_out or out is not out_BMN:
        raise ValueError(f"product: expected contiguous rows in out, got strides {out_BMN.strides}")
    scalar = wide(out)
    one, beta = np.ones((), scalar), np.full((), float(accumulate), scalar)
    kind = {name: CUDA_TYPES[str(x.dtype)] for name, x in (("a", a), ("b", b), ("out", out))}
    compute = cublas.CUBLAS_COMPUTE_64F if scalar == np.float64 else cublas.CUBLAS_COMPUTE_32F
    if not K or not B * M * N:
        out[...] = out if accumulate else 0
        return out_BMN
    # cuBLAS is column-major, so multiply the transposes: out^T = b^T a^T
    cublas.gemmStridedBatchedEx(
        *(cupy.cuda.device.get_cublas_handle(), of_b, of_a, N, M, K, one.ctypes.data),
        *(b.data.ptr, kind["b"], row_b, b.strides[0] // b.itemsize),
        *(a.data.ptr, kind["a"], row_a, a.strides[0] // a.itemsize, beta.ctypes.data),
        *(out.data.ptr, kind["out"], row_out, out.strides[0] // out.itemsize),
        *(B, compute, cublas.CUBLAS_GEMM_DEFAULT),
    )
    return out_BMN


def _operand(x_BRC):
    """(array, whether cuBLAS transposes it, elements from one row to the next)."""
    size, (_, rows, columns), (_, R, C) = x_BRC.itemsize, x_BRC.strides, x_BRC.shape
    if columns == size or (C == 1 and rows >= size):
        return x_BRC, cublas.CUBLAS_OP_N, max(rows // size, C)
    if rows == size or R == 1:
        return x_BRC, cublas.CUBLAS_OP_T, max(columns // size, R)
    return contiguous(x_BRC), cublas.CUBLAS_OP_N, C
