"""NumPy's BLAS: its number of threads, and the processor its kernels target.

A BLAS reads the environment once, on loading. It takes the first of its variables that starts with
a number above 0, capped at the number of cores, and ignores other values. Later, ask the library.
"""

import ctypes
import re
import sys
from pathlib import Path

from zmpi.process.cores import share_of_cores

OPENMP = "OMP_NUM_THREADS"
READS = {  # part of the library's file name -> the variables it reads, in order of precedence
    "openblas": (
        "OPENBLAS_NUM_THREADS",
        "OPENBLAS_DEFAULT_NUM_THREADS",
        "GOTO_NUM_THREADS",
        OPENMP,
    ),
    "mkl_rt": ("MKL_NUM_THREADS", OPENMP),
}
SYMBOLS = ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}")
GET_THREADS = [name.format("get_num_threads") for name in SYMBOLS] + ["MKL_Get_Max_Threads"]
SET_THREADS = [name.format("set_num_threads") for name in SYMBOLS] + ["MKL_Set_Num_Threads"]
GET_KERNELS = [name.format("get_corename") for name in SYMBOLS]
KERNELS = "OPENBLAS_CORETYPE"
KERNELS_256 = "Haswell"  # the first processor they were written for


def set_threads(environ) -> int:
    """Give this rank its share of the node's cores as BLAS threads; returns how many it gets.

    A number that you set is kept. If NumPy is already loaded (a script imported it before zmpi),
    its BLAS is set and queried directly; otherwise it will read the number from `environ`.
    """
    share = share_of_cores(environ)
    libraries = _loaded_blas() if "numpy" in sys.modules else []
    for kind, library in libraries:
        if _number(environ, READS[kind]) is None:
            _call(library, SET_THREADS, ctypes.c_int(share))
    for variables in READS.values():
        if _number(environ, variables) is None:
            environ[variables[0]] = str(share)
    if _number(environ, [OPENMP]) is None:  # for a BLAS built with OpenMP
        environ[OPENMP] = str(share)
    answers = (_call(library, GET_THREADS) for _, library in libraries)
    return next((answer for answer in answers if answer), _number(environ, READS["openblas"]))


def choose_kernels(environ, cpuinfo="/proc/cpuinfo") -> bool:
    """On AMD's Zen 4, let OpenBLAS use its 256-bit kernels; returns whether they were chosen.

    OpenBLAS finds AVX-512 and uses its 512-bit kernels, but Zen 4 runs each in two halves: float32
    products of a small GPT are 7 to 9 % slower. Only Zen 4 in family 25 has AVX-512. A value that
    you set is kept.
    """
    try:
        text = Path(cpuinfo).read_text(errors="replace").partition("\n\n")[0]  # the first core's
    except OSError:
        return False
    zen_4 = (
        "AuthenticAMD" in text and re.search(r"cpu family\s*: 25\n", text) and " avx512f " in text
    )
    if zen_4 and not environ.get(KERNELS):
        environ[KERNELS] = KERNELS_256
    return bool(zen_4) and environ[KERNELS] == KERNELS_256


def kernels_in_use() -> str:
    """The processor targeted by the loaded OpenBLAS's kernels; "unknown" without one, or Linux."""
    answers = (
        _call(library, GET_KERNELS, returns=ctypes.c_char_p) for _, library in _loaded_blas()
    )
    return next((answer.decode() for answer in answers if answer), "unknown")


def _number(environ, variables):
    """The number of threads that a BLAS takes from these variables, or None."""
    found = (re.match(r"\s*\+?(\d+)", environ.get(name, "")) for name in variables)
    return next((int(digits[1]) for digits in found if digits and int(digits[1])), None)


def _call(library, names, *arguments, returns=ctypes.c_int):
    """Call the first of these functions that the library has; None if it has none."""
    for name in names:
        if hasattr(library, name):
            function = getattr(library, name)
            function.restype = returns
            return function(*arguments)
    return None


def _loaded_blas() -> list:
    """[(kind, ctypes library), ...]: every BLAS in this process, NumPy's own first (Linux only)."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line}
    except OSError:
        return []
    return [
        (kind, ctypes.CDLL(path))  # already loaded: this only finds it
        for path in sorted(paths, key=lambda path: ("numpy" not in path, path))
        for kind in READS
        if kind in path
    ]
