"""Runs every file of world/ as a small MPI world, on 1 to 4 ranks or on its own SIZES."""

import ast
from pathlib import Path

import pytest
from mpirun import run_world

SIZES = (1, 2, 3, 4)
TIMEOUT = 600  # seconds for one file at one size
FILES = sorted((Path(__file__).parent / "world").glob("test_*.py"))


def sizes_of(file):
    """A test file's module-level SIZES, read without importing it (that would start MPI)."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [
            "SIZES"
        ]:
            return ast.literal_eval(node.value)
    return SIZES


@pytest.mark.parametrize(
    ("file", "size"), [pytest.param(f, n, id=f"{f.stem}-{n}") for f in FILES for n in sizes_of(f)]
)
def test_world(file, size):
    world = run_world(size, ["-m", "pytest", file, "-q", "-p", "no:cacheprovider"], TIMEOUT)
    if world.status or world.left:
        pytest.fail(
            f"{size} ranks of {file.name}: status {world.status}\n{world.output}", pytrace=False
        )
