"""The house: who may import whom, and how large things may grow (DESIGN: a file, a function, the core)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {
    0: "stages layout schedule precision device launch hooks blocks",
    1: "guard ledger optim manifest pretrained",
    2: "comm options folder",
    3: "unit",
    4: "checkpoint",
    5: "engine",
    6: "data trace report start trial resume",
    7: "train verify export generate",
}
FLOOR = {module: floor for floor, modules in FLOORS.items() for module in modules.split()}
CORE = ("stages", "layout", "schedule", "unit", "engine")
FILES = [*sorted((ROOT / "zmpi").glob("*.py")), *sorted((ROOT / "models").glob("*.py"))]
MODELS_MAY = {"numpy", "hashlib", "dataclasses", "math", "models"}


def imports(path):
    """Modules that a file imports anywhere in it, in full."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def functions(path):
    """The function definitions of a file."""
    return [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def lines(path):
    return len(path.read_text().splitlines())


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "zmpi" and p.stem != "__init__"], ids=lambda p: p.stem)
def test_a_module_imports_from_lower_floors_only(path):
    assert path.stem in FLOOR, f"{path.name} has no floor: give it one"
    for name in imports(path):
        if name.startswith("zmpi."):
            below = name.split(".")[1]
            assert FLOOR[below] < FLOOR[path.stem], f"{path.name} (floor {FLOOR[path.stem]}) imports {name}"


def test_comm_alone_imports_mpi4py():
    assert [p.name for p in FILES if any(name.split(".")[0] == "mpi4py" for name in imports(p))] == ["comm.py"]


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "models"], ids=lambda p: p.stem)
def test_models_know_nothing_of_zmpi_and_mpi(path):
    allowed = MODELS_MAY | ({"cupy", "cupy_backends"} if path.stem == "kernels" else set())
    assert {name.split(".")[0] for name in imports(path)} <= allowed


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_file_has_at_most_300_lines(path):
    assert lines(path) <= 300


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_function_has_at_most_40_lines_and_6_parameters(path):
    for f in functions(path):
        assert f.end_lineno - f.lineno + 1 <= 40, f"{path.name}: {f.name}"
        parameters = [a.arg for a in f.args.posonlyargs + f.args.args + f.args.kwonlyargs if a.arg != "self"]
        assert len(parameters) <= 6, f"{path.name}: {f.name}"


def test_the_core_stays_under_700_lines():
    assert sum(lines(ROOT / "zmpi" / f"{name}.py") for name in CORE) < 700


def test_no_code_asks_for_a_stage_by_number():
    """A stage is three booleans: nothing compares a stage's number."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                text = ast.unparse(node)
                assert "stage.number" not in text and "stage ==" not in text, f"{path.name}: {text}"
