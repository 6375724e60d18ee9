"""What the launcher says before MPI is up: how many ranks share this node's cores, and does it fit the MPI library.

Standard library only, and no state. `zmpi/__init__.py` calls these before NumPy is imported, because a BLAS fixes its number
of threads and its kernels when it is loaded, and malloc its habits with the first array.
"""

import ctypes
import os
import re
import sys
import time
from pathlib import Path

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Ranks on this node. The innermost launcher first: mpirun runs inside a Slurm allocation, not the other way round.
# Slurm writes one entry a node, "4(x2),3"; the largest is taken, since a rank does not know which node is its own.
ON_THIS_NODE = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
)
KERNELS, KERNELS_256 = (
    "OPENBLAS_CORETYPE",
    "Haswell",
)  # the first processor that they were written for
HYDRA = "Hydra's mpirun (MPICH, Intel MPI)"
LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
    ("PALS_RANKID", "PALS"),
    ("HYDI_CONTROL_FD", HYDRA),
    ("MPI_LOCALNRANKS", HYDRA),
    ("SLURM_PROCID", "srun (Slurm)"),
    ("PMIX_RANK", "a PMIx launcher"),
    ("PMI_SIZE", "a PMI launcher"),
)
# A rank's number, and what the same launcher always sets with it.
RANKS = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "PMIX_NAMESPACE"),
    ("PALS_RANKID", "PALS_RANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
LINGER = 1.0  # seconds, see end_before_mpi
SET_BLAS_THREADS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
    "MKL_Set_Num_Threads",
)
BLAS_KERNELS = (
    "scipy_openblas_get_corename64_",
    "scipy_openblas_get_corename",
    "openblas_get_corename64_",
    "openblas_get_corename",
)
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4  # malloc.h of glibc
MADV_HUGEPAGE, PAGE, HEAP, TOP_PAD = (
    14,
    2 << 20,
    1 << 30,
    128 << 10,
)  # sys/mman.h; bytes, the last as glibc has it


def ranks_on_this_node(environ) -> int:
    """How many ranks the launcher started on this node, at least 1."""
    for name in ON_THIS_NODE:
        counts = [
            int(count)
            for count in re.findall(r"\d+", re.sub(r"\(x\d+\)", "", environ.get(name, "")))
        ]
        if counts and max(counts) > 0:
            return max(counts)
    return 1


def cores(environ) -> tuple[int, int]:
    """(cores this process may use, cores all ranks of this node may use together).

    The second is what the parent, the launcher's node process, may use: fewer than the machine has where a container or
    Slurm lends a part of it, and more than the first where the launcher binds every rank to cores of its own.
    """
    if not hasattr(os, "sched_getaffinity"):
        own = together = os.cpu_count() or 1
    else:
        own = len(os.sched_getaffinity(0))
        try:
            together = max(own, len(os.sched_getaffinity(os.getppid())))
        except OSError:  # the parent is gone, or hidden from this name space
            together = own
    lent = environ.get("SLURM_CPUS_ON_NODE", "")
    return own, min(together, int(lent)) if lent.isdecimal() and int(lent) else together


def set_threads(environ) -> int:
    """Give each rank its share of the node's cores as BLAS threads, in `environ`; returns the number of threads in use.

    If any of OMP_NUM_THREADS, OPENBLAS_NUM_THREADS and MKL_NUM_THREADS has a value, the user has decided: nothing is
    set. Where NumPy is loaded already (a script that imports it before zmpi), its BLAS is told directly.
    """
    own, together = cores(environ)
    share = max(1, min(own, together // ranks_on_this_node(environ)))
    chosen = [environ[name] for name in THREADS if environ.get(name)]
    if chosen:
        first = re.match(r"\s*(\d+)", chosen[0])  # "4,2" is OpenMP's way to write nested levels
        return max(1, int(first[1])) if first else share
    for name in THREADS:
        environ[name] = str(share)
    if "numpy" in sys.modules:
        _set_loaded_blas(share)
    return share


def choose_kernels(environ, cpuinfo="/proc/cpuinfo") -> bool:
    """On AMD's Zen 4, let OpenBLAS take its kernels of 256 bits; returns whether it was told.

    It takes those of 512 bits there, since it looks for the instructions. Zen 4 runs them as two halves: float32 products
    of a small GPT are 7 to 9 % slower. Zen 4 is the one family 25 that has them. A value the user set is kept.
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


def wait_politely(environ) -> bool:
    """Where a node has more ranks than cores, let MPICH's waiting ranks give up theirs; returns whether it has.

    MPI waits in a busy loop, which holds a core that the awaited rank may need. A value the user set is kept.
    """
    crowded = ranks_on_this_node(environ) > cores(environ)[1]
    if crowded:
        environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")  # read when MPI starts
    return crowded


def kernels_in_use() -> str:
    """The processor for which the loaded OpenBLAS's kernels were written; "unknown" where there is none (or no Linux)."""
    for library in _loaded_blas():
        for name in BLAS_KERNELS:
            if hasattr(library, name):
                get = getattr(library, name)
                get.restype = ctypes.c_char_p
                return get().decode()
    return "unknown"


def _set_loaded_blas(threads: int) -> None:
    """Set the number of threads of every BLAS in this process (Linux; elsewhere nothing happens)."""
    for library in _loaded_blas():
        for name in SET_BLAS_THREADS:
            if hasattr(library, name):
                getattr(library, name)(ctypes.c_int(threads))
                break


def _loaded_blas() -> list:
    """Every BLAS in this process, as a ctypes library."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {
                line.split(maxsplit=5)[5].strip()
                for line in maps
                if "openblas" in line or "mkl_rt" in line
            }
    except OSError:
        return []
    return [ctypes.CDLL(path) for path in sorted(paths)]  # already loaded: this only finds it


def keep_freed_memory() -> str:
    """Let malloc keep freed blocks for the next step, so that large temporaries do not fault their pages in again.

    Returns what was done: "thresholds", "no mmap" (older glibc refuses thresholds above 32 MiB), "nothing" (no glibc).
    """
    libc = _glibc()
    if libc is None or libc.mallopt(M_TRIM_THRESHOLD, -1) != 1:
        return "nothing"
    if libc.mallopt(M_MMAP_THRESHOLD, 2**30) == 1:
        return "thresholds"
    return "no mmap" if libc.mallopt(M_MMAP_MAX, 0) == 1 else "nothing"


def use_huge_pages() -> bool:
    """Ask for pages of 2 MiB in the first GiB of malloc's heap, before it grows there; returns whether it is so.

    NumPy asks for them from 4 MiB an array on. A small model's arrays are smaller, and its matrix products walk over many
    rows: with pages of 4 KiB the processor looks up one for each. The GiB is address space, not memory.
    """
    libc = _glibc()
    if libc is None:
        return False
    libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
    start = libc.sbrk(0)
    libc.mallopt(M_TOP_PAD, HEAP)  # the heap grows by so much more than is asked for
    libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(PAGE))))
    libc.mallopt(M_TOP_PAD, TOP_PAD)
    first, end = -(-start // PAGE) * PAGE, libc.sbrk(0) // PAGE * PAGE
    return (
        end > first
        and libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_HUGEPAGE) == 0
    )


def _glibc():
    """The C library of this process where it is glibc, else None: another one's mallopt has other numbers."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt") else None


def launcher(environ) -> str:
    """The launcher's name, as far as the environment tells; "no launcher" where nothing does."""
    return next((name for variable, name in LAUNCHERS if variable in environ), "no launcher")


def launched_rank(environ) -> int:
    """This process's number among those that a launcher started, as its variables say; 0 without a launcher.

    A number alone, without what the launcher sets with it, was left behind in the environment: it does not count.
    """
    for name, with_it in RANKS:
        value = environ.get(name, "").strip()
        if value.isdecimal() and environ.get(with_it, "").strip():
            return int(value)
    return 0


def end_before_mpi(line):
    """End with status 2 and a line that one process prints, where MPI cannot tell the launcher's processes apart.

    The others wait before they end: a launcher may end all of them at the first status that is not 0.
    """
    if launched_rank(os.environ):
        time.sleep(LINGER)
    else:
        print(line, file=sys.stderr, flush=True)
    raise SystemExit(2)


def lonely_launch(environ, size: int, library: str) -> str | None:
    """One line if MPI sees a world of one (`size`) although a launcher started more processes, else None (promise P6).

    That happens where mpirun comes from another MPI than the one Python loaded (`library`: its version string): every
    process would train alone and each would call itself rank 0.
    """
    if size != 1:
        return None
    for name, alone in (
        ("PMI_SIZE", 1),
        ("OMPI_COMM_WORLD_SIZE", 1),
        ("SLURM_STEP_NUM_TASKS", 1),
        ("PMIX_RANK", 0),
    ):
        value = environ.get(name, "").strip()
        if value.isdecimal() and int(value) > alone:
            short = " ".join(library.split("\n")[0].split()).rstrip(",")
            return (
                f"{launcher(environ)} started more than one process ({name}={value}), but the MPI library that "
                f"Python loaded ({short}) sees a world of one: use the mpirun that belongs to this library"
            )
    return None
