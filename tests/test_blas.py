"""How many threads NumPy's BLAS has, and which kernels (case B18)."""

import os
import platform

import pytest
from python import python

from zmpi.process import blas, cores


@pytest.fixture
def eight_cores(monkeypatch):
    """A node of 8 cores, of which the launcher may use all and binds no rank."""
    monkeypatch.setattr(cores, "usable_cores", lambda environ: (8, 8))


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
    assert cores.share_of_cores(environ) == share


VARIABLES = {name for names in blas.READS.values() for name in names}
OWN = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


@pytest.mark.parametrize(
    ("chosen", "in_use", "openblas", "mkl", "openmp"),
    [
        ({}, 2, "2", "2", "2"),
        ({"OMP_NUM_THREADS": "7"}, 7, None, None, "7"),
        ({"OPENBLAS_NUM_THREADS": "7"}, 7, "7", "2", "2"),
        ({"GOTO_NUM_THREADS": "7"}, 7, None, "2", "2"),
        ({"MKL_NUM_THREADS": "7"}, 2, "2", "7", "2"),  # which OpenBLAS does not read
        ({"OMP_NUM_THREADS": "7", "OPENBLAS_NUM_THREADS": "1"}, 1, "1", None, "7"),
        ({"OMP_NUM_THREADS": "7", "OPENBLAS_NUM_THREADS": "0"}, 7, "0", None, "7"),
        ({"OMP_NUM_THREADS": " 4,2"}, 4, None, None, " 4,2"),  # OpenMP's nested levels
        ({"OMP_NUM_THREADS": "0"}, 2, "2", "2", "2"),
        ({"OMP_NUM_THREADS": "-1"}, 2, "2", "2", "2"),
        ({"OMP_NUM_THREADS": "abc"}, 2, "2", "2", "2"),
        ({"OMP_NUM_THREADS": ""}, 2, "2", "2", "2"),
    ],
)
def test_what_a_blas_reads_is_the_users_decision_and_nothing_else(
    eight_cores, monkeypatch, chosen, in_use, openblas, mkl, openmp
):
    """4 ranks on 8 cores. Before NumPy is loaded: what OpenBLAS is about to read is returned."""
    monkeypatch.setattr(blas, "_loaded_blas", list)
    environ = {"MPI_LOCALNRANKS": "4", **chosen}
    assert blas.set_threads(environ) == in_use
    assert [environ.get(name) for name in OWN] == [openblas, mkl, openmp]
    assert blas.set_threads(environ) == in_use  # World() asks again


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
    monkeypatch.setattr(cores, "usable_cores", lambda environ: (own, together))
    assert cores.share_of_cores({"MPI_LOCALNRANKS": str(ranks)}) == share


def test_slurm_may_lend_a_part_of_the_node():
    own, together = cores.usable_cores({"SLURM_CPUS_ON_NODE": "1"})
    assert own >= 1 and together == 1


BLAS = """
(np.ones((300, 300)) @ np.ones((300, 300))).sum()
import os
from zmpi.process.blas import set_threads
print(set_threads(os.environ), open("/proc/self/status").read().split("Threads:")[1].split()[0])
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"MKL_NUM_THREADS": "2"},
        {"OMP_NUM_THREADS": "abc"},
        {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "1"},
        {"OMP_NUM_THREADS": "4096,2"},
    ],
    ids=str,
)
def test_the_number_of_threads_that_is_told_is_the_blass(chosen):
    """As the system counts them; also if a script imports NumPy before zmpi."""
    if (
        python(
            "import numpy; from zmpi.process import blas; print(blas._loaded_blas())", os.environ
        )
        == "[]\n"
    ):
        pytest.skip("NumPy's BLAS is not known")
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environ |= {"MPI_LOCALNRANKS": "4096"} | chosen
    told, there = python(f"import zmpi; import numpy as np\n{BLAS}", environ).split()
    assert told == there
    told_late, _ = python(f"import numpy as np; import zmpi\n{BLAS}", environ).split()
    assert told_late == told  # the thread that was there already has nothing to do
    if chosen.get("OMP_NUM_THREADS") != "4096,2":
        assert told == "1"  # the share of 4,096 ranks, or the user's


ZEN_4 = (
    "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n"
    "flags\t\t: fpu avx2 avx512f avx512dq\n\n"
)


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
    assert blas.choose_kernels(environ, cpuinfo) is told
    assert environ == ({"OPENBLAS_CORETYPE": "Haswell"} if told else {})
    assert not blas.choose_kernels({}, tmp_path / "none")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Nehalem is an x86")
def test_the_kernels_in_use_are_told():
    """OpenBLAS itself is asked, so a NumPy of another BLAS says unknown."""
    script = "import numpy; from zmpi.process import blas; print(blas.kernels_in_use())"
    if python(script, os.environ) == "unknown\n":
        pytest.skip("NumPy's BLAS is not OpenBLAS")
    assert python(script, os.environ | {"OPENBLAS_CORETYPE": "Nehalem"}) == "Nehalem\n"


def test_kernels_that_the_user_chose_are_kept(tmp_path):
    environ = {"OPENBLAS_CORETYPE": "SkylakeX"}
    (tmp_path / "cpuinfo").write_text(ZEN_4)
    assert not blas.choose_kernels(environ, tmp_path / "cpuinfo")
    assert environ == {"OPENBLAS_CORETYPE": "SkylakeX"}
