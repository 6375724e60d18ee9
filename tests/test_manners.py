"""The manners of tests in worlds (world/conftest.py), seen on tests that misbehave at 3 ranks."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults.table import AT_ONCE
from mpirun import run_world
from worlds import SIZES, failures, sizes_of

HERE = Path(__file__).parent
CASES = {
    "passes": """
def test_a(comm): comm.Barrier()
def test_b(folder): assert folder.is_dir()
""",
    "fails": """
def test_a(comm):
    print("captured")
    assert comm.rank != 1, "not on 1"
    comm.Barrier()
""",
    "fails everywhere": """
def test_a(comm): assert comm.rank == 7
""",
    "fails in set-up": """
@pytest.fixture
def broken(comm): assert comm.rank != 2
def test_a(broken, comm): comm.Barrier()
""",
    "does not end": """
@pytest.mark.limit(2)
def test_a(comm):
    comm.Barrier() if comm.rank else time.sleep(99)
""",
    "stray collective": """
@pytest.mark.limit(2)
def test_a(comm):
    if comm.rank == 1: comm.Barrier()
def test_b(comm): pass
""",
    "stray broadcast": """
@pytest.mark.limit(2)
def test_a(comm):
    if comm.rank == 1: comm.bcast("stray", root=1)
def test_b(comm): comm.bcast("expected", root=1)
""",
    "stray message": """
def test_a(comm):
    if comm.rank == 1: comm.isend("stray", dest=0)
def test_b(comm): pass
""",
    "other tests": """
if MPI.COMM_WORLD.rank == 1:
    def test_a(): pass
else:
    def test_b(): pass
""",
    "cannot import": """
1 // (MPI.COMM_WORLD.rank - 1)
def test_a(comm): comm.Barrier()
""",
    "sizes": """
@pytest.mark.sizes(1, 4)
def test_a(): assert False
@pytest.mark.sizes(3)
def test_b(): pass
""",
}


def made(folder, **bodies):
    """The files of tests that hold these bodies, in a folder like this one."""
    (folder / "world").mkdir(parents=True)
    shutil.copy(HERE / "conftest.py", folder)
    # which it imports; it is read where the checkout lies in the same folder
    shutil.copy(HERE / "mpirun.py", folder)
    shutil.copy(HERE / "world" / "conftest.py", folder / "world")
    files = {folder / "world" / f"test_{name}.py": body for name, body in bodies.items()}
    for file, body in files.items():
        file.write_text(f"import time\nimport pytest\nfrom mpi4py import MPI\n{body}")
    return list(files)


def run(folder, body):
    made(folder, it=body)
    return run_world(
        3, ["-m", "pytest", folder / "world", "-q", "-p", "no:cacheprovider"], timeout=40
    )


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = {
            name: pool.submit(run, tmp_path_factory.mktemp("manners") / "tests", body)
            for name, body in CASES.items()
        }
        yield lambda name: runs[name].result()


def assert_ended(world, *texts):
    assert world.status not in (0, 124) and not world.left, world.output
    for text in texts:
        assert world.output.count(text) == 1, f"{text!r} in {world.output}"


def test_only_rank_0_shows_progress(ended):
    world = ended("passes")
    assert world.status == 0, world.output
    assert world.output.count("2 passed") == world.output.count("..") == 1


def test_a_failure_on_one_rank_ends_the_world_and_is_shown(ended):
    texts = [
        "rank 1 of 3: ",
        "test_it.py::test_a failed (call)",
        "AssertionError: not on 1",
        "\ncaptured\n",
    ]
    assert_ended(ended("fails"), *texts)


def test_a_failure_on_all_ranks_is_shown_by_one(ended):
    assert_ended(ended("fails everywhere"), "rank 0 of 3: ", "test_a failed (call)")


def test_a_failure_in_a_fixture_ends_the_world(ended):
    assert_ended(ended("fails in set-up"), "rank 2 of 3: ", "test_a failed (setup)")


def test_a_test_that_does_not_end_is_ended_and_shows_where_it_was(ended):
    world = ended("does not end")
    assert_ended(world, "rank 0 of 3: ", "rank 1 of 3: ", "rank 2 of 3: ")
    assert world.output.count("test_a did not end within 2 s") == 3
    assert world.output.count("in test_a") == 3, "the stack of each rank"


@pytest.mark.parametrize("what", ["stray collective", "stray broadcast", "stray message"])
def test_what_one_rank_leaves_behind_does_not_reach_the_next_test(ended, what):
    """Some show as a wrong message when the ranks meet, some as a meeting that does not end."""
    world = ended(what)
    assert_ended(world)
    assert "test_a" in world.output and "test_b" not in world.output


def test_ranks_at_different_tests_end(ended):
    world = ended("other tests")
    assert_ended(world)
    assert "the ranks are not at the same test" in world.output


def test_a_module_that_one_rank_cannot_import_ends_the_world(ended):
    assert_ended(ended("cannot import"), "rank 1 of 3: ", "test_it.py cannot be collected")


def test_a_test_runs_at_its_sizes_only(ended):
    world = ended("sizes")
    assert world.status == 0 and "1 passed, 1 skipped" in world.output, world.output


def test_the_file_that_ends_a_world_is_reported_and_those_after_it_run(tmp_path):
    touch = f"def test_a(): open('{tmp_path}/' + __name__, 'a').close()\n"
    files = made(tmp_path / "a", a=touch, b=CASES["fails"], c=touch)
    found = failures(3, files, tmp_path)
    assert list(found) == [files[1]] and "test_b.py::test_a failed (call)" in found[files[1]]
    assert (tmp_path / "test_a").exists() and (tmp_path / "test_c").exists()
    files = made(tmp_path / "b", d=touch, e=CASES["cannot import"])
    found = failures(3, files, tmp_path)
    assert list(found) == [files[1]] and "test_e.py cannot be collected" in found[files[1]]
    assert (tmp_path / "test_d").exists()


def test_the_sizes_of_a_file_are_read_without_importing_it(tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text("raise SystemExit\n")
    assert sizes_of(file) == SIZES
    file.write_text("SIZES = (2, 5)\nraise SystemExit\n")
    assert sizes_of(file) == (2, 5)
