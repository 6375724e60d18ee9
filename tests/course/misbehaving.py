"""Solutions that misbehave: what becomes of them, and of the task after them."""

from wrong import SOLUTIONS

from zmpi.course.marks import grade_files
from zmpi.course.tasks import TASKS

REFERENCE = (SOLUTIONS / TASKS[2].file).read_text(encoding="utf-8")
CODE = REFERENCE.split('"""', 2)[2]  # without its docstring
BODY = "    gradient = gradient_of(weights, micro_batch)\n"
EMPTY = (
    "def train_step(comm, weights, gradient_of, micro_batch, lr):\n    raise NotImplementedError\n"
)
DELETES = """
import os, shutil
shutil.rmtree(os.path.dirname(os.path.abspath(__file__)), ignore_errors=True)
shutil.rmtree(".", ignore_errors=True)
"""


def before_the_body(lines):
    """The reference, with lines before its first one."""
    return REFERENCE.replace(BODY, "".join(f"    {line}\n" for line in lines) + BODY)


# {name: (what is in the file of task 2, the points it gets, what its line says)}
MISBEHAVING = {
    "an empty file": ("", 0, "not written yet: the file defines no train_step"),
    "an empty task": (EMPTY, 0, "not written yet (line 2)"),
    "a syntax error": (
        REFERENCE.replace("def train_step(", "def train_step((", 1),
        0,
        "SyntaxError",
    ),
    "an endless loop": (before_the_body(["while True:", "    pass"]), 0, "an endless loop"),
    "a deadlock": (
        before_the_body(["comm.Recv(np.empty(1), (comm.rank + 1) % comm.size, 7)"]),
        0,
        "a deadlock",
    ),
    "a window": (
        before_the_body(["from mpi4py import MPI", "MPI.Win.Allocate(8, comm=comm)"]),
        0,
        "MPI.Win is not part of the course",
    ),
    "10 MB of output": (before_the_body(["print('x' * 10_000_000)"]), 10, ""),
    "a folder emptied": (DELETES + CODE, 10, ""),
    "NumPy spoilt for others": ("import numpy\nnumpy.float32 = numpy.float64\n" + CODE, 10, ""),
}


def graded_with_the_rest(name, folder, limit):
    """(the Marked of the misbehaving task 2, that of a right task 3 after it)."""
    folder.mkdir(exist_ok=True)
    (folder / TASKS[2].file).write_text(MISBEHAVING[name][0], encoding="utf-8")
    right = (SOLUTIONS / TASKS[3].file).read_text(encoding="utf-8")
    (folder / TASKS[3].file).write_text(right, encoding="utf-8")
    return grade_files([(n, folder / TASKS[n].file) for n in (2, 3)], 0, limit)
