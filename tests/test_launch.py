"""What the launcher's variables say: threads per rank, and whether launcher and MPI library fit (case B18, promise P6)."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from zmpi.manners import launch

LIBRARY = "MPICH Version:      5.0.2\nMPICH Release date: ..."


@pytest.fixture
def eight_cores(monkeypatch):
    """A node of 8 cores, of which the launcher may use all and binds no rank."""
    monkeypatch.setattr(launch, "cores", lambda environ: (8, 8))


def python(script, environ):
    """What another Python prints that runs the script."""
    environ = {**environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    ).stdout


def threads(environ):
    """What set_threads sets, and that it returns the same."""
    in_use = launch.set_threads(environ)
    assert {environ[name] for name in launch.THREADS} == {str(in_use)}
    return in_use


@pytest.mark.parametrize(
    ("environ", "share"),
    [
        ({}, 8),
        ({"MPI_LOCALNRANKS": "2"}, 4),
        ({"MPI_LOCALNRANKS": "3"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 1),
        ({"SLURM_TASKS_PER_NODE": "2(x3),4"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x16)"}, 4),
        (
            {"SLURM_TASKS_PER_NODE": "8", "MPI_LOCALNRANKS": "2"},
            4,
        ),  # mpirun inside an allocation: mpirun knows better
        ({"MPI_LOCALNRANKS": "12"}, 1),  # more ranks than cores
        ({"MPI_LOCALNRANKS": ""}, 8),
    ],
)
def test_the_cores_of_a_node_are_shared_out_over_its_ranks(eight_cores, environ, share):
    assert threads(environ) == share


@pytest.mark.parametrize("name", launch.THREADS)
def test_a_number_that_the_user_set_is_kept(eight_cores, name):
    environ = {"MPI_LOCALNRANKS": "4", name: "7"}
    assert launch.set_threads(environ) == 7
    assert environ == {"MPI_LOCALNRANKS": "4", name: "7"}


def test_nested_levels_of_openmp_are_understood(eight_cores):
    assert launch.set_threads({"OMP_NUM_THREADS": "4,2"}) == 4


@pytest.mark.parametrize(
    ("own", "together", "ranks", "share"),
    [
        (1, 8, 2, 1),  # bound to one core
        (4, 8, 2, 4),  # bound to its half
        (8, 16, 4, 4),  # bound to a socket, which two ranks share
        (2, 2, 4, 1),  # a container with 2 of the machine's cores
    ],
)
def test_a_bound_rank_takes_no_more_than_its_cores(monkeypatch, own, together, ranks, share):
    monkeypatch.setattr(launch, "cores", lambda environ: (own, together))
    assert threads({"MPI_LOCALNRANKS": str(ranks)}) == share


def test_slurm_may_lend_a_part_of_the_node():
    own, together = launch.cores({"SLURM_CPUS_ON_NODE": "1"})
    assert own >= 1 and together == 1


BLAS = """
import ctypes
from zmpi.manners.launch import SET_BLAS_THREADS
(np.ones((300, 300)) @ np.ones((300, 300))).sum()
library = ctypes.CDLL(next(line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line))
ask = [name.replace("set", "get") for name in SET_BLAS_THREADS]
print(next(getattr(library, name)() for name in ask if hasattr(library, name)))
"""


@pytest.mark.parametrize(
    "first", ["import numpy as np; import zmpi", "import zmpi; import numpy as np"]
)
def test_the_blas_really_has_that_many_threads(first):
    """Also where a script imports NumPy before zmpi, when the environment comes too late."""
    environ = {name: value for name, value in os.environ.items() if name not in launch.THREADS}
    assert python(f"{first}\n{BLAS}", environ | {"MPI_LOCALNRANKS": "4096"}) == "1\n"


ZEN_4 = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nflags\t\t: fpu avx2 avx512f avx512dq\n\n"


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (True, ZEN_4),
        (False, ZEN_4.replace(" avx512f", "")),  # Zen 3: of family 25 too
        (False, ZEN_4.replace(": 25", ": 26")),  # Zen 5 has units of 512 bits
        (False, ZEN_4.replace("AuthenticAMD", "GenuineIntel")),
        (False, ""),
    ],
)
def test_zen_4_multiplies_with_kernels_of_256_bits(tmp_path, told, text):
    cpuinfo, environ = tmp_path / "cpuinfo", {}
    cpuinfo.write_text(text)
    assert launch.choose_kernels(environ, cpuinfo) is told
    assert environ == ({"OPENBLAS_CORETYPE": "Haswell"} if told else {})
    assert not launch.choose_kernels({}, tmp_path / "none")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Nehalem is an x86")
def test_the_kernels_in_use_are_told():
    """OpenBLAS itself is asked, so a NumPy of another BLAS says unknown."""
    script = "import numpy; from zmpi.manners import launch; print(launch.kernels_in_use())"
    if python(script, os.environ) == "unknown\n":
        pytest.skip("NumPy's BLAS is not OpenBLAS")
    assert python(script, os.environ | {"OPENBLAS_CORETYPE": "Nehalem"}) == "Nehalem\n"


def test_kernels_that_the_user_chose_are_kept(tmp_path):
    environ = {"OPENBLAS_CORETYPE": "SkylakeX"}
    (tmp_path / "cpuinfo").write_text(ZEN_4)
    assert not launch.choose_kernels(environ, tmp_path / "cpuinfo")
    assert environ == {"OPENBLAS_CORETYPE": "SkylakeX"}


def test_freed_memory_is_kept_or_there_is_no_glibc():
    known = (
        "glibc" in os.confstr("CS_GNU_LIBC_VERSION")
        if "CS_GNU_LIBC_VERSION" in os.confstr_names
        else False
    )
    assert launch.keep_freed_memory() in (("thresholds", "no mmap") if known else ("nothing",))


def test_a_page_that_was_freed_is_not_faulted_in_again():
    """1,000 faults for each 8 MB pair without it; the bound leaves room for the interpreter's own."""
    script = """
import resource
import zmpi
import numpy as np
def faults():
    a = np.ones(1 << 20); b = a * a
    del a, b
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
first = [faults() for _ in range(3)][-1]
print(faults() - first)
"""
    if launch.keep_freed_memory() == "nothing":
        pytest.skip("no glibc")
    assert int(python(script, os.environ)) < 100


def test_arrays_lie_where_huge_pages_are_asked_for():
    """An array of 1 MiB, for which NumPy itself asks nothing. Whether the kernel has such pages free is not ours to test."""
    script = """
import zmpi
import numpy as np
address = np.ones(1 << 18, np.float32).ctypes.data
for line in open("/proc/self/smaps"):
    first = line.split()[0]
    if not first.endswith(":"):
        start, stop = (int(end, 16) for end in first.split("-"))
    elif first == "VmFlags:" and start <= address < stop:
        print("hg" in line.split())
"""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if launch.keep_freed_memory() == "nothing" or not setting.exists():
        pytest.skip("no glibc, or a kernel without huge pages")
    assert python(script, os.environ) == "True\n"


def test_where_the_heap_cannot_grow_nothing_is_asked_for():
    """As under `ulimit -v`: importing zmpi works there."""
    script = """
import resource
resource.setrlimit(resource.RLIMIT_DATA, (1 << 29, 1 << 29))
from zmpi.manners import launch
import numpy as np
print(launch.use_huge_pages(), np.ones(1 << 22).sum())
"""
    assert python(script, os.environ) == "False 4194304.0\n"


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"PMI_SIZE": "4", "HYDI_CONTROL_FD": "7"}, "Hydra's mpirun (MPICH, Intel MPI)"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}, "Open MPI's mpirun"),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"}, "srun (Slurm)"),
        ({"PMIX_RANK": "1"}, "a PMIx launcher"),
    ],
)
def test_a_world_of_one_under_a_launcher_that_started_more_is_an_error(environ, named):
    line = launch.lonely_launch(environ, 1, LIBRARY)
    assert (
        line.startswith(f"{named} started more than one process") and "MPICH Version: 5.0.2" in line
    )
    assert "\n" not in line
    assert launch.lonely_launch(environ, 4, LIBRARY) is None


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PMI_SIZE": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"PMI_SIZE": ""},
    ],
)
def test_a_world_of_one_that_was_asked_for_is_none(environ):
    assert launch.lonely_launch(environ, 1, LIBRARY) is None


def test_without_a_launcher_none_is_named():
    assert launch.launcher({}) == "no launcher"
