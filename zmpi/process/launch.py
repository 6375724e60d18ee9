"""What the launcher says before MPI is up: how many ranks share this node, and does it fit the MPI library."""

import os
import re
import sys
import time

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
