"""CuPy on a CPU, as far as the twins need it (`kernels` of models and zmpi.numbers); not fast.

Their kernels are the real text, compiled by g++ with a block of threads as a loop; cuBLAS's product
is written here from its documentation, on bare addresses. What it cannot show: races, warp
shuffles, CuPy's own functions.
"""

import ctypes
import importlib
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np

COMPILER = shutil.which("g++") or shutil.which("c++")
ROOT = Path(__file__).resolve().parent.parent
TYPES = {0: np.float32, 1: np.float64, 2: np.float16, 14: ml_dtypes.bfloat16}  # cudaDataType_t

SHIM = """
#include <cmath>
using std::exp; using std::log; using std::tanh; using std::sqrt; using std::fma;
struct Three { unsigned x; };
static Three gridDim, blockDim, blockIdx, threadIdx;
#ifndef __global__
#define __global__
#endif
#ifndef __device__
#define __device__
#endif
#define __syncthreads()
"""
LOOP = """
extern "C" void on_cpu_{name}(unsigned blocks, unsigned threads, {declared}) {{
    gridDim.x = blocks; blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) {name}({passed});
}}
"""


def cuda_includes():
    """The folder of CUDA's headers if the extra `kernels` is installed, else None."""
    needed = ("cuda_bf16.h", "crt", "nv/target")  # of nvidia-cuda-runtime, -crt and -cccl
    folders = [folder for path in sys.path for folder in Path(path).glob("nvidia/cu*/include")]
    return next(
        (folder for folder in folders if all((folder / name).exists() for name in needed)), None
    )


class ndarray(np.ndarray):
    """An array that the twins take for CuPy's."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])


ndarray.__module__ = "cupy"


def here(array):
    """A copy that the twins take for CuPy's."""
    return np.array(array).view(ndarray)


class RawModule:
    """The kernels of a source, compiled for the CPU."""

    def __init__(self, code, options):
        self.kernels = dict(
            re.findall(r"^GLOBAL (\w+)\((.*?)\) \{\n", code, re.DOTALL | re.MULTILINE)
        )
        self.in_turn = {name for name in self.kernels if "__syncthreads" in _body(code, name)}
        self.library = _compiled(code, tuple(options), tuple(self.kernels.items()))

    def get_function(self, name):
        function, declared = self.library[f"on_cpu_{name}"], self.kernels[name].split(",")

        def launch(grid, block, arguments):
            assert len(arguments) == len(declared), (
                f"{name} takes {len(declared)}, got {len(arguments)}"
            )
            # between two of its parts all threads wait: here, one does all
            threads = 1 if name in self.in_turn else block[0]
            function(
                grid[0],
                threads,
                *(_passed(a, d.strip()) for a, d in zip(arguments, declared, strict=True)),
            )

        return launch


def _body(code, name):
    start = code.index(f"GLOBAL {name}(")
    return code[start : code.index("\n}\n", start)]


def _passed(argument, declared):
    """An argument as C takes it; its type must be what the kernel declares."""
    if isinstance(argument, np.ndarray):
        assert "*" in declared and argument.flags.c_contiguous, declared
        assert not declared.startswith("const T") or argument.dtype.itemsize <= 8
        return ctypes.c_void_p(argument.__array_interface__["data"][0])
    kinds = {
        np.int64: ("Index", ctypes.c_int64),
        np.int32: ("int", ctypes.c_int32),
        np.float32: ("W", ctypes.c_float),
    }
    kinds |= {np.float64: ("W", ctypes.c_double), np.uint64: ("*", ctypes.c_void_p)}
    word, kind = kinds[type(argument)]
    assert word in declared, f"{declared}: got {type(argument).__name__}"
    return kind(argument.item())


@cache
def _compiled(code, options, kernels):
    loops = [
        LOOP.format(
            name=name, declared=declared, passed=", ".join(re.findall(r"(\w+)(?:,|$)", declared))
        )
        for name, declared in kernels
    ]
    folder = Path(mkdtemp(prefix="zmpi-kernels-"))
    includes, code = (
        re.findall(r"^#include.*$", code, re.MULTILINE),
        re.sub(r"^#include.*$", "", code, flags=re.MULTILINE),
    )
    wanted = [
        line for line in includes if f"-D{'BFLOAT16' if 'bf16' in line else 'FLOAT16'}" in options
    ]
    (folder / "k.cpp").write_text("\n".join([*wanted, SHIM, code, *loops]))
    flags = [
        "-O1",
        "-shared",
        "-fPIC",
        "-ffp-contract=off",
        "-w",
        *options,
        *(["-I", cuda_includes()] if wanted else []),
    ]
    subprocess.run([COMPILER, *flags, folder / "k.cpp", "-o", folder / "k.so"], check=True)
    return ctypes.CDLL(folder / "k.so")


# ---- cuBLAS --------------------------------------------------------------------------------------


def _matrices(address, kind, shape, leading, stride, count):
    """`count` matrices in column order, (count, rows, columns): a view of memory at an address."""
    item = np.dtype(TYPES[kind]).itemsize
    nbytes = item * ((count - 1) * stride + (shape[1] - 1) * leading + shape[0])
    memory = np.frombuffer((ctypes.c_char * nbytes).from_address(address), TYPES[kind])
    return np.lib.stride_tricks.as_strided(
        memory, (count, *shape), (stride * item, item, leading * item)
    )


def gemm(
    handle,
    op_a,
    op_b,
    m,
    n,
    k,
    alpha,
    a,
    kind_a,
    row_a,
    step_a,
    b,
    kind_b,
    row_b,
    step_b,
    beta,
    c,
    kind_c,
    row_c,
    step_c,
    count,
    compute,
    algorithm,
):
    """cublasGemmStridedBatchedEx: C = alpha op(A) op(B) + beta C, by columns, in `compute`."""
    assert row_a >= (k if op_a else m) and row_b >= (n if op_b else k) and row_c >= m
    assert (
        kind_a == kind_b
        and (kind_c == kind_a or kind_c == 0)
        and compute == (70 if kind_a == 1 else 68)
    )
    scalar = np.float64 if kind_a == 1 else np.float32
    alpha, beta = (
        ctypes.cast(x, ctypes.POINTER(ctypes.c_double if kind_a == 1 else ctypes.c_float))[0]
        for x in (alpha, beta)
    )
    A = _matrices(a, kind_a, (k, m) if op_a else (m, k), row_a, step_a, count).astype(scalar)
    B = _matrices(b, kind_b, (n, k) if op_b else (k, n), row_b, step_b, count).astype(scalar)
    C = _matrices(c, kind_c, (m, n), row_c, step_c, count)
    product = alpha * np.matmul(A.swapaxes(1, 2) if op_a else A, B.swapaxes(1, 2) if op_b else B)
    C[...] = (product if beta == 0 else product + beta * C.astype(scalar)).astype(C.dtype)


def install(monkeypatch):
    """Put it in CuPy's place; returns (models.kernels, zmpi.numbers.kernels), imported with it."""
    cupy, cublas = ModuleType("cupy"), ModuleType("cupy_backends.cuda.libs.cublas")
    libs = ModuleType("cupy_backends.cuda.libs")
    for name in (
        "empty",
        "zeros",
        "empty_like",
        "matmul",
        "argsort",
        "ascontiguousarray",
        "asarray",
    ):
        setattr(cupy, name, _wrapped(getattr(np, name)))
    cupy.argsort = lambda x: np.argsort(x, kind="stable").view(ndarray)
    cupy.asnumpy, cupy.RawModule, cupy.ndarray = np.array, RawModule, ndarray
    cupy.cuda = SimpleNamespace(device=SimpleNamespace(get_cublas_handle=lambda: 0))
    libs.cublas, cublas.gemmStridedBatchedEx = cublas, gemm
    cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T, cublas.CUBLAS_GEMM_DEFAULT = 0, 1, -1
    cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_COMPUTE_64F = 68, 70
    parents = ("cupy_backends", "cupy_backends.cuda")
    for module in (cupy, libs, cublas, *map(ModuleType, parents)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("models.cuda", "models.kernels", "zmpi.numbers.kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    twins = (
        importlib.import_module("models.kernels"),
        importlib.import_module("zmpi.numbers.kernels"),
    )
    for twin in twins:
        monkeypatch.setitem(sys.modules, twin.__name__, twin)
    return twins


def _wrapped(function):
    return lambda *args, **kwargs: np.asanyarray(function(*args, **kwargs)).view(ndarray)
