"""The course and its grader: the reference passes, mistakes are named, nothing spoils the rest."""

import ast
import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from mpirun import ROOT

from zmpi.course.marks import grade_files
from zmpi.course.printed import had, to_be_had
from zmpi.course.tasks import TASKS

sys.path.insert(0, str(ROOT / "tests" / "course"))

from matrix import first_named
from misbehaving import MISBEHAVING
from wrong import ENDING, PLANTED, SOLUTIONS

STUDENTS = ROOT / "examples" / "course"


# Those that end no world, and do not spoil it for the files after them.
QUICK = {
    name: case
    for name, case in MISBEHAVING.items()
    if "loop" not in name and "deadlock" not in name and "NumPy" not in name
}


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Marks of the reference, PLANTED, QUICK, and a right file after them; the files. One world."""
    folder = tmp_path_factory.mktemp("course")
    files = [(number, SOLUTIONS / task.file) for number, task in TASKS.items()]
    files += [(wrong.task, wrong.write(folder / f"{i}")) for i, wrong in enumerate(PLANTED)]
    for i, (text, _, _) in enumerate(QUICK.values()):
        (folder / f"quick{i}").mkdir()
        (folder / f"quick{i}" / TASKS[2].file).write_text(text)
        files.append((2, folder / f"quick{i}" / TASKS[2].file))
    files.append((3, SOLUTIONS / TASKS[3].file))
    marked = grade_files(files, seed=5, limit=60, apart=False)
    first, last = len(TASKS), len(TASKS) + len(PLANTED)
    return marked[:first], marked[first:last], marked[last:-1], marked[-1], files


def test_the_reference_gets_every_point(graded):
    marked = graded[0]
    assert [text for each in marked for text in each.sentences] == []
    assert had(marked) == to_be_had(marked) == 100


def test_every_planted_mistake_is_rejected_and_its_idea_is_named_first(graded):
    found = list(zip(PLANTED, graded[1], strict=True))
    named = {mistake.name: first_named(marked) for mistake, marked in found}
    assert named == {mistake.name: mistake.idea for mistake in PLANTED}
    assert len(PLANTED) >= 20
    for _, marked in found:
        assert marked.points < marked.task.points and not marked.fault
        for text in marked.sentences:
            assert ": expected " in text and " got " in text and " The idea: " in text


def test_a_solution_that_misbehaves_costs_itself_points_and_nobody_else(graded):
    _, _, misbehaving, rest, files = graded
    for (_, points, words), marked in zip(QUICK.values(), misbehaving, strict=True):
        said = "; ".join(marked.sentences)
        assert marked.points == points and words in said and len(marked.sentences) <= 1, said
    assert rest.points == 10
    assert all(file.is_file() for _, file in files), "a copy was deleted, not the student's own"


def test_what_ends_a_world_is_named_and_the_rest_is_graded(tmp_path):
    """Rank 1 does not come, and rank 1's process ends; another file is graded after them."""
    ending = [ENDING[0], ENDING[2]]
    right = [(2, SOLUTIONS / TASKS[2].file)]
    files = [(wrong.task, wrong.write(tmp_path / f"{i}")) for i, wrong in enumerate(ending)]
    *found, rest = grade_files(files + right, seed=6, limit=3, apart=False)
    for mistake, marked in zip(ending, found, strict=True):
        assert mistake.idea in marked.fault and "\n" not in marked.fault
        assert marked.points < marked.task.points
    assert rest.points == 10


@pytest.mark.parametrize("file", [task.file for task in TASKS.values()])
def test_a_students_file_is_the_reference_with_holes(file):
    """Signatures, docstrings and what is given are the same; 5 to 40 lines are missing."""
    student, right = ((folder / file).read_text("utf-8") for folder in (STUDENTS, SOLUTIONS))
    if file == TASKS["questions"].file:
        assert student.count(": None,") == len(TASKS["questions"].ideas)
        asked = [[line for line in text.splitlines() if "#" in line] for text in (student, right)]
        assert asked[0] == asked[1]
        return
    holes = [holed.name for holed in functions(student) if is_hole(holed)]
    tree = Fill(holes, {f.name for f in functions(student)}).visit(ast.parse(right))
    assert ast.dump(tree) == ast.dump(ast.parse(student)), ast.unparse(tree)
    missing = len(right.splitlines()) - len(student.splitlines()) + len(holes)
    assert 5 <= missing <= 42, missing  # with the blank lines between functions


def functions(text):
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]


def is_hole(function):
    return isinstance(function.body[-1], ast.Raise)


class Fill(ast.NodeTransformer):
    """Makes holes of a reference's functions, and leaves out those that a student has not."""

    def __init__(self, holes, names):
        self.holes, self.names = holes, names

    def visit_FunctionDef(self, node):
        if node.name not in self.names:
            return None
        if node.name in self.holes and ast.get_docstring(node):
            node.body = [node.body[0], *ast.parse("raise NotImplementedError").body]
        return node


# ---- the command ---------------------------------------------------------------------------------


def grade_command(*words):
    return subprocess.run(
        [sys.executable, "-m", "zmpi.grade", *map(str, words)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


def test_the_command_prints_points_and_writes_json_and_junit(tmp_path):
    text = (SOLUTIONS / "questions.py").read_text(encoding="utf-8")
    lines = text.splitlines()
    third = next(i for i, line in enumerate(lines) if line.startswith("    3: "))
    lines[third] = "    3: None,"
    (tmp_path / "questions.py").write_text("\n".join(lines), encoding="utf-8")
    where = ["--folder", tmp_path, "--json", tmp_path / "m.json", "--junit", tmp_path / "m.xml"]
    ended = grade_command("questions", *where, "--points")
    assert ended.returncode == 1 and ended.stderr == ""
    first, sentence, total = ended.stdout.splitlines()
    words = "questions ten questions of accounting 9 of 10 checks 18 / 20 points"
    assert " ".join(first.split()) == words
    assert sentence.startswith(
        "    question 3: expected a number, got none yet (answers). The idea:"
    )
    assert total == "total: 18 of 20 points"
    marks = json.loads((tmp_path / "m.json").read_text())
    assert (marks["points"], marks["of"], marks["tasks"][0]["checks"][2]["points"]) == (18, 20, 0)
    suite = ElementTree.parse(tmp_path / "m.xml").getroot()[0]
    assert suite.get("failures") == "1" and len(suite) == 10
    assert suite[2][0].get("message") == sentence.strip()


def test_a_folder_without_the_courses_files_is_refused(tmp_path):
    ended = grade_command("2", "--folder", tmp_path)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr == (
        f"zmpi.grade: error: --folder: expected t2_data_parallel.py; got {tmp_path}, which has"
        " none of them\n"
    )


def test_a_file_that_is_missing_gets_no_points(tmp_path):
    marked = grade_files([(5, tmp_path / "t5_gather_use_free.py")], seed=0, limit=20)
    assert [(each.points, each.fault) for each in marked] == [
        (0, "t5_gather_use_free.py is missing")
    ]
