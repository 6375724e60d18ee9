"""The house: who may import whom, and how large a file, a function and the core may be."""

import ast
import configparser
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# From the ground up. A file imports what lies on lower floors, and of its own room what stands
# before it here; rooms of one floor import nothing of each other. "" are the commands.
FLOORS = (
    {"models": "layer twins cuda ops attention fused mlp transformer cached kernels"},
    {
        "process": """errors clock files cgroup launch cores blas malloc prepare machine hooks
            ending
                      guard_messages guard agree streams output table""",
        "numbers": "domains precision gap sums optim kernels",
    },
    {
        "messages": "memory ledger device cuda_aware under_way transport world comm",
        "text": "formats data generation",
    },
    {"saving": "rules schema blocks manifest compared found folder checkpoint pretrained"},
    {"core": "stages formulas layout schedule mesh owned gradient unit step engine"},
    {
        "cost": """counted watch probes trace turns dryrun memory_limit estimate links speed measure
                   paper bench_table plan_tables by_formula pictures page""",
        "proof": """rows trial outcome plain textbook walks messages sequences gradients training
                    updates accounts lifetimes saved conduct""",
    },
    {
        "cli": """options own shared_flags start model_flags optimizer_flags train_flags bench_flags
                  resume
                  report progress run_log logged settings side_by_side""",
        "course": """case toy starting worlds counting watch collectives replicas sharded_adam
                     sharded_gradients gather_free uneven_tied prefetching own_communicator
                     accounting tasks subject marks printed""",
    },
    {"": "train verify bench plan generate export compare grade doctor __main__"},
)


def in_order():
    """(floor, place in its room, module) of every module, bottom first."""
    for floor, rooms in enumerate(FLOORS):
        for room, names in rooms.items():
            package = room if room == "models" else f"zmpi.{room}".rstrip(".")
            for place, name in enumerate(names.split()):
                yield floor, package, place, f"{package}.{name}"


HOME = {module: (floor, package, place) for floor, package, place, module in in_order()}
CORE = ("stages", "layout", "schedule", "mesh", "owned", "gradient", "unit", "engine")
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
    """The modules that a file imports anywhere, in full, and what it imports from them."""
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


@pytest.mark.parametrize("path", [p for p in FILES if p.stem != "__init__"], ids=module)
def test_a_module_imports_from_lower_floors_and_what_stands_before_it(path):
    assert module(path) in HOME, f"{path} has no floor: give it one"
    floor, package, place = HOME[module(path)]
    for name in HOME.keys() & set(imports(path)):
        below, room, before = HOME[name]
        within = room == package and before < place
        assert below < floor or within, f"{module(path)} (floor {floor}) imports {name} ({below})"


def test_the_house_has_at_most_eight_floors_and_every_module_exists():
    assert len(FLOORS) <= 8
    assert {module(path) for path in FILES if path.stem != "__init__"} == set(HOME)


def test_contributing_prints_the_floors():
    """One row a room: `room/` and its files, in the order of FLOORS, from the top down."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = re.findall(r"^- (\d) `.*\n((?:  .*\n)+)", text, re.M)
    printed = [(floor, re.findall(r"`(\w+)`", files)) for floor, files in rooms]
    assert printed == [
        (str(floor), names.split())
        for floor, rooms in reversed(list(enumerate(FLOORS)))
        for names in rooms.values()
    ]


def test_the_glossary_has_at_most_25_words_of_one_line_each():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    glossary = text[text.index("| word | meaning |") : text.index("## Tests")].strip()
    rows = [re.fullmatch(r"\| ([a-z ,]+) \| .+ \|", line) for line in glossary.splitlines()[2:]]
    assert all(rows) and max(len(row[0]) for row in rows) <= 100
    assert 0 < len(", ".join(row[1] for row in rows).split(", ")) <= 25


def test_no_line_of_the_kernels_is_over_100_columns():
    """ruff checks Python's."""
    found = [path for room in ("zmpi", "models") for path in (ROOT / room).rglob("*.cu*")]
    assert len(found) == 3
    assert [
        line for path in found for line in path.read_text().splitlines() if len(line) > 100
    ] == []


def test_only_commands_and_the_command_line_see_the_parsed_arguments():
    for path in FILES:
        if HOME.get(module(path), (9,))[0] < 6:
            for f in functions(path):
                named = not f.name.startswith("__") and [a.arg for a in f.args.args]
                assert not named or "args" not in named, f"{module(path)}: {f.name}"


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


def test_the_core_stays_within_1080_lines():
    assert sum(lines(ROOT / "zmpi/core" / f"{name}.py") for name in CORE) <= 1080


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


# What each command has, and an update written twice on purpose: in blocks, and as in a textbook.
BOUND_TWICE = {"main", "parser", "COMMAND", "adamw"}


def test_a_public_name_means_one_thing():
    """No two files bind one top-level name, or a file's name; a kernel has its twin's name."""
    files = {path.stem: path for path in FILES if path.stem not in ("__init__", "attention")}
    homes = {}
    for path in FILES:
        for name in [] if path.stem == "kernels" else top_level(path):
            assert name in BOUND_TWICE or name not in homes, f"{name}: {homes[name]}, {path}"
            homes[name] = path
            assert name not in files, f"{name}: {path}, and {files[name]}"


def top_level(path):
    """The public names that a file binds at its top level, each once."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for target in targets for n in ast.walk(target) if hasattr(n, "id")}
    return {name for name in names if not name.startswith("_")}
