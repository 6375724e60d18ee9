"""What the launcher's variables say, and whether launcher and MPI library fit (promise P6)."""

import pytest

from zmpi.process import launch

LIBRARY = "MPICH Version:      5.0.2\nMPICH Release date: ..."


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
    line = launch.mismatched_launcher(environ, 1, LIBRARY)
    assert line.startswith(f"{named} started several processes") and "MPICH Version: 5.0.2" in line
    assert "\n" not in line
    assert launch.mismatched_launcher(environ, 4, LIBRARY) is None


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
    assert launch.mismatched_launcher(environ, 1, LIBRARY) is None


def test_without_a_launcher_none_is_named():
    assert launch.launcher({}) == "no launcher"
