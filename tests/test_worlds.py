"""Runs the files of world/ in small MPI worlds: one world for each number of ranks, with all the files of that size.

A file runs at 1 to 4 ranks, or at those that it names in SIZES. What failed ends its world: that file is reported with
what the world printed, and the files after it run in a new one.
"""

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mpirun import run_world

SIZES = (1, 2, 3, 4)
TIMEOUT = 1200  # seconds for all files of one size; each of their tests has a limit of its own
FILES = sorted((Path(__file__).parent / "world").glob("test_*.py"))


def sizes_of(file):
    """A test file's module-level SIZES, read without importing it (that would start MPI)."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [
            "SIZES"
        ]:
            return ast.literal_eval(node.value)
    return SIZES


def failures(size, files, folder):
    """{file: what its world printed} of the files that failed on `size` ranks; all are started in one world."""
    found, started = {}, folder / f"started-{size}"
    while files:
        started.write_text("")
        flags = ["-q", "-p", "no:cacheprovider", f"--started={started}"]
        world = run_world(size, ["-m", "pytest", *files, *flags], TIMEOUT)
        if not world.status and not world.left:
            break
        reached = [file for file in files if file.name in started.read_text().splitlines()]
        if not reached and len(files) > 1:  # one of them cannot be collected
            return found | {k: v for f in files for k, v in failures(size, [f], folder).items()}
        last = reached[-1] if reached else files[0]
        found[last] = f"status {world.status}\n{world.output}"
        files = files[files.index(last) + 1 :]
    return found


@pytest.fixture(scope="module")
def failed(request, tmp_path_factory):
    """{size: the failures of the files that were asked for, as a Future}."""
    chosen, folder = {}, tmp_path_factory.mktemp("worlds")
    for item in request.session.items:
        if item.path == request.path and "failed" in item.fixturenames:
            chosen.setdefault(item.callspec.params["size"], []).append(item.callspec.params["file"])
    with ThreadPoolExecutor(1) as pool:
        yield {n: pool.submit(failures, n, files, folder) for n, files in chosen.items()}


CASES = [(file, size) for size in range(1, 7) for file in FILES if size in sizes_of(file)]


@pytest.mark.parametrize(
    ("file", "size"), [pytest.param(*c, id=f"{c[0].stem}-{c[1]}") for c in CASES]
)
def test_world(file, size, failed):
    output = failed[size].result().get(file)
    if output is not None:
        pytest.fail(f"{size} ranks of {file.name}: {output}", pytrace=False)
