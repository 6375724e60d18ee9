"""The process in which a student's code runs: python -m zmpi.course.subject FOLDER, on every rank.

FOLDER holds `jobs` (what to run) and gets, of every job and rank, its notes or the error it ended
in; `status` holds a record for each rank, which the grader reads meanwhile. A world of fewer ranks
than were started is a part of them.
"""

import json
import mmap
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType

from zmpi.course.counting import CountedComm, Log, stand_in
from zmpi.course.tasks import TASKS
from zmpi.course.watch import CaseWatch
from zmpi.course.worlds import RECORD_BYTES
from zmpi.messages.world import MPI, World
from zmpi.process.errors import one_line


class Status:
    """Where this rank is: written into a file that the grader has mapped too."""

    def __init__(self, path, rank):
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._at, self._calls = rank * RECORD_BYTES, 0

    def begin(self, job):
        """The rank begins a job."""
        self._job, self._calls = job, 0
        self._write("running", "")

    def entered(self, name):
        """The rank goes into an MPI call."""
        self._calls += 1
        self._write("inside", name)

    def left(self):
        """It came out of it."""
        self._write("running", "")

    def ended(self, how):
        """The rank is through with the job: "done" or "raised"."""
        self._write(how, "")

    def _write(self, state, name):
        record = {"job": self._job, "state": state, "call": name, "calls": self._calls}
        text = json.dumps(record).encode().ljust(RECORD_BYTES)
        self._memory[self._at : self._at + RECORD_BYTES] = text


def main(folder):
    """Run the jobs; all ranks meet after each."""
    folder, whole = Path(folder), MPI.COMM_WORLD
    jobs = pickle.loads((folder / "jobs").read_bytes())
    status = Status(folder / "status", whole.rank)
    parts = {
        n: whole.Split(0 if whole.rank < n else 1, whole.rank) for n in range(1, whole.size + 1)
    }
    module, world = stand_in(), None
    for number, job in jobs.items():
        size = job["case"].size
        if TASKS[job["task"]].in_zmpi and world is None:
            world = World(device="cpu", reduction="ordered")
        if whole.rank < size:
            status.begin(number)
            log = Log(status.entered, status.left)
            comm = module.COMM_WORLD = CountedComm(parts[size].Dup()).of(log)
            watch = CaseWatch(log, world and world.part(comm))
            raised = run_job(job, comm, watch, folder / f"{number}.{whole.rank}")
            status.ended("raised" if raised else "done")
        meet(whole)


def run_job(job, comm, watch, path):
    """One job on this rank; writes its notes, or its error, and returns whether it ended in one."""
    task = TASKS[job["task"]]
    work = path.parent / "work"  # made anew for a student who has deleted it
    work.mkdir(exist_ok=True)
    os.chdir(work)
    try:
        student = load_student(Path(job["file"]), job["text"])
        task.run(student, comm, job["case"].given, watch)
        watch.end()
        watch.save(f"{path}.npz")
        return False
    except BaseException as error:
        watch.end()
        Path(f"{path}.error").write_text(json.dumps(told(error, job["file"])))
        return True


def load_student(file, text):
    """The student's file, with this text, as a new module. Modules next to it can be imported."""
    here = str(file.parent)
    for name, module in list(sys.modules.items()):  # those of another student, or of another case
        if (getattr(module, "__file__", None) or "").startswith(here + os.sep):
            del sys.modules[name]
    sys.path[:] = [
        path for path in sys.path if not path.startswith(str(file.parent.parent) + os.sep)
    ]
    sys.path.append(here)
    module = sys.modules["student"] = ModuleType("student")
    module.__file__ = str(file)
    exec(compile(text, str(file), "exec"), vars(module))
    return module


def told(error, file):
    """{kind, text, line}: an exception in one line, and the last line of the student's file that it
    came through.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines, error = [error.lineno], SyntaxError(error.msg)
    if isinstance(error, SystemExit):
        error = RuntimeError(f"sys.exit({'' if error.code is None else error.code}) was called")
    if isinstance(error, AttributeError) and getattr(error.obj, "__name__", "") == "student":
        lines, error = [], NotImplementedError(f"the file defines no {error.name}")
    text = one_line(error)[:300]
    kind = type(error).__name__
    return {"kind": kind, "text": text, "line": lines[-1] if lines else None}


def meet(whole):
    """Wait for all ranks, without keeping a core from those that still compute."""
    meeting = whole.Ibarrier()
    while not meeting.Test():
        time.sleep(0.002)


if __name__ == "__main__":
    main(sys.argv[1])
