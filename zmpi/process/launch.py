"""What the launcher's variables say before MPI starts: ranks per node, and a mismatched library."""

import os
import re
import sys
import time

# Ranks on this node. Innermost launcher first: mpirun runs inside a Slurm allocation, not the other
# way round. Slurm lists all nodes, "4(x2),3"; take the largest, as a rank does not know its node.
ON_THIS_NODE = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
)
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
# A rank's number, and the variable that the same launcher always sets with it.
RANKS = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "PMIX_NAMESPACE"),
    ("PALS_RANKID", "PALS_RANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
LINGER = 1.0  # seconds, see end_before_mpi


def ranks_on_this_node(environ) -> int:
    """The number of ranks that the launcher started on this node, at least 1."""
    for name in ON_THIS_NODE:
        counts = re.findall(r"\d+", re.sub(r"\(x\d+\)", "", environ.get(name, "")))
        if (most := max(map(int, counts), default=0)) > 0:
            return most
    return 1


def launcher(environ) -> str:
    """The launcher's name as the environment tells it, or "no launcher"."""
    return next((name for variable, name in LAUNCHERS if variable in environ), "no launcher")


def launched_rank(environ) -> int:
    """This process's rank according to the launcher's variables; 0 without a launcher.

    A rank without the variable set along with it is a leftover in the environment, and ignored.
    """
    for name, with_it in RANKS:
        value = environ.get(name, "").strip()
        if value.isdecimal() and environ.get(with_it, "").strip():
            return int(value)
    return 0


def end_before_mpi(line):
    """Exit with status 2; one process prints the line, for when MPI cannot tell them apart.

    The others wait first: a launcher may kill all of them at the first non-zero status.
    """
    if launched_rank(os.environ):
        time.sleep(LINGER)
    else:
        print(line, file=sys.stderr, flush=True)
    raise SystemExit(2)


def mismatched_launcher(environ, size: int, library: str) -> str | None:
    """An error line if MPI sees a world of one but a launcher started more processes (promise P6).

    This happens when mpirun belongs to another MPI than the one Python loaded (`library`: its
    version string): every process would train alone and call itself rank 0. None if all is well.
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
                f"{launcher(environ)} started several processes ({name}={value}), but Python's "
                f"MPI library ({short}) sees a world of one: use that library's own mpirun"
            )
    return None
