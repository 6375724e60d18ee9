"""The house: who may import whom, and how large things may grow (DESIGN: a file, a function, the core)."""

import ast
import configparser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {
    0: """under_way cuda_aware domains stages layout schedule kernels memory sums transport
          formats sampling manners.own manners.launch manners.cgroup
          manners.malloc manners.clock manners.errors manners.hooks
          manners.streams manners.table saving.files saving.rules cost.counted
          proof.rows proof.textbook""",
    1: """data coding device ledger precision optim step manners.guard_messages manners.ending
          manners.cores manners.output manners.progress saving.blocks
          cost.bench_table""",
    2: """manners.blas manners.machine manners.guard manners.agree manners.run_log
          saving.schema saving.pretrained cost.paper""",
    3: "world manners.options saving.manifest cost.pictures",
    4: "comm manners.model_flags manners.optimizer_flags saving.found cost.page",
    5: "owned gradient saving.folder",
    6: "unit checkpoint",
    7: "engine",
    8: "trial manners.report manners.start saving.resume cost.watch",
    9: """manners.train_flags trace cost.probes cost.dryrun proof.outcome proof.accounts
          proof.conduct proof.lifetimes proof.messages proof.sequences proof.walks""",
    10: "cost.estimate cost.memory_limit manners.bench_flags proof.plain proof.saved proof.updates",
    11: "cost.measure cost.plan_tables proof.gradients",
    12: "proof.training __main__ train export generate bench plan doctor",
    13: "verify",
}
FLOOR = {f"zmpi.{module}": floor for floor, modules in FLOORS.items() for module in modules.split()}
CORE = ("stages", "layout", "schedule", "owned", "gradient", "unit", "engine")
ZMPI, MODELS = sorted((ROOT / "zmpi").rglob("*.py")), sorted((ROOT / "models").rglob("*.py"))
FILES = ZMPI + MODELS
MODELS_MAY = {
    "numpy",
    "hashlib",
    "dataclasses",
    "functools",
    "importlib",
    "math",
    "pathlib",
    "models",
}


def module(path):
    """A file's name as a module."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(path):
    """Modules that a file imports anywhere in it, in full; and whatever it takes out of them, which may be modules too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def functions(path):
    """The function definitions of a file."""
    return [
        n
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def lines(path):
    return len(path.read_text().splitlines())


@pytest.mark.parametrize("path", [p for p in ZMPI if p.stem != "__init__"], ids=module)
def test_a_module_imports_from_lower_floors_only(path):
    assert module(path) in FLOOR, f"{path.name} has no floor: give it one"
    for name in imports(path):
        assert FLOOR.get(name, -1) < FLOOR[module(path)], (
            f"{path.name} (floor {FLOOR[module(path)]}) imports {name}"
        )


def test_every_module_of_a_floor_exists():
    assert {module(path) for path in ZMPI if path.stem != "__init__"} == set(FLOOR)


def test_world_alone_imports_mpi4py():
    assert [
        p.name for p in FILES if any(name.split(".")[0] == "mpi4py" for name in imports(p))
    ] == ["world.py"]


@pytest.mark.parametrize("path", MODELS, ids=module)
def test_models_know_nothing_of_zmpi_and_mpi(path):
    allowed = MODELS_MAY | (
        {"cupy", "cupy_backends"} if path.stem in ("cuda", "kernels") else set()
    )
    assert {name.split(".")[0] for name in imports(path)} <= allowed


@pytest.mark.parametrize("path", FILES, ids=module)
def test_a_file_has_at_most_300_lines(path):
    assert lines(path) <= 300


@pytest.mark.parametrize("path", FILES, ids=module)
def test_a_function_has_at_most_40_lines_and_6_parameters(path):
    for f in functions(path):
        assert f.end_lineno - f.lineno + 1 <= 40, f"{path.name}: {f.name}"
        parameters = [
            a.arg for a in f.args.posonlyargs + f.args.args + f.args.kwonlyargs if a.arg != "self"
        ]
        assert len(parameters) <= 6, f"{path.name}: {f.name}"


def test_the_core_stays_within_920_lines():
    assert sum(lines(ROOT / "zmpi" / f"{name}.py") for name in CORE) <= 920


def test_no_code_asks_for_a_stage_by_number():
    """A stage is three booleans: nothing compares a stage's number."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                text = ast.unparse(node)
                assert "stage.number" not in text and "stage ==" not in text, f"{path.name}: {text}"


def test_every_folder_of_code_is_installed():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert set(setup["options"]["packages"].replace(",", " ").split()) == {
        module(path.parent) for path in FILES
    }
