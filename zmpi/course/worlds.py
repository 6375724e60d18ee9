"""Runs students' code in worlds of MPI processes, each in a temporary copy, and ends every one that
hangs.

One world runs job after job. Where a job ends the world (a hang, an exit), the rest runs in a new
one.
"""

import contextlib
import json
import pickle
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zmpi.course.case import Case, Notes
from zmpi.course.starting import started_world

RECORD_BYTES = 512  # bytes of a rank's status
PATIENCE_SECONDS = 2  # seconds for the others, once a rank has ended in an error
START_SECONDS = 60  # seconds for a world to begin its first job
NO_WORLD = "no world of MPI processes starts here; python -m zmpi.doctor says more"


@dataclass(frozen=True)
class Job:
    """A case of a task, with the file that is to pass it."""

    task: int | str
    file: Path
    case: Case


@dataclass
class Ended:
    """How a job ended: its outcomes in rank order, or in `fault` why there are none."""

    outcomes: list
    fault: str = ""
    run: bool = True  # False: not run, since the file ended a world before


def run_jobs(jobs, limit):
    """Run jobs in worlds of as many ranks as the largest case needs; returns an Ended for each, in
    order.

    `limit`: seconds for one case, after which its world is ended.
    """
    with tempfile.TemporaryDirectory(prefix="zmpi-grade-", ignore_cleanup_errors=True) as folder:
        return _Run(jobs, limit, Path(folder)).all()


class _Run:
    def __init__(self, jobs, limit, folder):
        self.jobs, self.limit, self.folder = jobs, limit, folder
        self.size = max(job.case.size for job in jobs)
        self.ended = [None] * len(jobs)

    def all(self):
        """All jobs, in as many worlds as it takes."""
        copies = {}
        for job in self.jobs:
            if job.file not in copies:
                copies[job.file] = self._copy(job.file, len(copies))
        todo = list(range(len(self.jobs)))
        while todo:
            self._write(todo, copies)
            stopped, fault = self._world(todo)
            for number in todo if stopped is None else todo[: todo.index(stopped)]:
                self.ended[number] = self._read(number)
            if stopped is not None:
                self.ended[stopped] = Ended([], fault)
                self._leave_out(self.jobs[stopped].file)
            todo = [number for number in todo if self.ended[number] is None]
        return self.ended

    def _leave_out(self, file):
        """Run no other case of a file that has ended a world."""
        for number, job in enumerate(self.jobs):
            if job.file == file and self.ended[number] is None:
                self.ended[number] = Ended([], "", run=False)

    def _copy(self, file, number):
        """A copy of the Python files of a student's folder; returns the file in it."""
        to = self.folder / f"copy{number}"
        to.mkdir()
        for source in file.parent.glob("*.py"):
            if source.is_file():
                shutil.copy(source, to)
        return to / file.name

    def _write(self, todo, copies):
        """The list of jobs, for the world's ranks."""
        jobs = {
            number: {
                "task": self.jobs[number].task,
                "file": str(copies[self.jobs[number].file]),
                "text": self.jobs[number].file.read_bytes(),
                "case": self.jobs[number].case,
            }
            for number in todo
        }
        (self.folder / "jobs").write_bytes(pickle.dumps(jobs))

    # ---- one world -------------------------------------------------------------------------------

    def _world(self, todo):
        """(the job that ended the world, why), or (None, "") where all are through."""
        (self.folder / "status").write_bytes(b" " * RECORD_BYTES * self.size)
        arguments = ["-m", "zmpi.course.subject", str(self.folder)]
        with started_world(self.size, arguments, self.folder) as process:
            return self._watch(process, todo)

    def _watch(self, process, todo):
        current, began, raised = None, time.monotonic(), None
        while True:
            gone, now = process.poll() is not None, time.monotonic()
            records = self._records()
            latest = max((r["job"] for r in records if r), default=None)
            if latest is not None and latest != current:
                current, began, raised = latest, now, None
            if gone:
                through = all(map(self._through, todo))
                return (None, "") if through else self._exited(records, current)
            if current is None:
                if now - began > START_SECONDS:
                    raise ValueError(NO_WORLD)
            elif not self._through(current):
                raised = raised or (now if self._errors(current) else None)
                if now - began > self.limit or (raised and now - raised > PATIENCE_SECONDS):
                    return current, self._hung(records, current)
            time.sleep(0.01)

    def _records(self):
        """Each rank's status; None where it has none yet, or is writing it just now."""
        found, text = [], (self.folder / "status").read_bytes()
        for rank in range(self.size):
            try:
                found.append(json.loads(text[rank * RECORD_BYTES : (rank + 1) * RECORD_BYTES]))
            except ValueError:
                found.append(None)
        return found

    def _paths(self, number, ending):
        size = self.jobs[number].case.size
        return [self.folder / f"{number}.{rank}.{ending}" for rank in range(size)]

    def _through(self, number):
        """Whether all ranks have left their notes, or an error, of a job."""
        pairs = zip(self._paths(number, "npz"), self._paths(number, "error"), strict=True)
        return all(note.exists() or error.exists() for note, error in pairs)

    def _errors(self, number):
        """{rank: what it raised}."""
        found = {}
        for rank, path in enumerate(self._paths(number, "error")):
            with contextlib.suppress(OSError, ValueError):
                found[rank] = json.loads(path.read_text())
        return found

    def _read(self, number):
        """The Ended of a job that all its ranks are through with."""
        errors = self._errors(number)
        if errors:
            return Ended([], raised_in_words(errors, self.jobs[number].case.size))
        try:
            return Ended([read_notes(path) for path in self._paths(number, "npz")])
        except (OSError, ValueError, KeyError) as error:
            return Ended([], f"its results cannot be read ({error})")

    def _hung(self, records, number):
        errors, size = self._errors(number), self.jobs[number].case.size
        if errors:
            return raised_in_words(errors, size)
        return hung_in_words([r for r in records if r][:size], self.limit)

    def _exited(self, records, number):
        """A world that ended by itself, before its jobs were through."""
        if number is None:
            raise ValueError(NO_WORLD)
        errors, size = self._errors(number), self.jobs[number].case.size
        if errors:
            return number, raised_in_words(errors, size)
        out = [rank for rank, r in enumerate(records[:size]) if r and r["state"] == "running"]
        who = f"rank {in_a_list(out)} of {size}" if out else f"a rank of {size}"
        return number, f"the process of {who} ended in the middle (os._exit, or a crash)"


# ---- in words ------------------------------------------------------------------------------------


def raised_in_words(errors, size):
    """What {rank: error} of a world of `size` ranks says."""
    rank, error = min(errors.items())
    where = f" (line {error['line']})" if error["line"] else ""
    text = f": {error['text']}" if error["text"] else ""
    if error["kind"] == "NotImplementedError":
        return f"not written yet{where}{text}"
    who = "every rank" if len(errors) == size else f"rank {rank} of {size}"
    return f"{who} ended in {error['kind']}{where}{text}"


def hung_in_words(records, limit):
    """Who did not come, from every rank's status."""
    size = len(records)
    inside = {rank: r for rank, r in enumerate(records) if r["state"] == "inside"}
    others = [rank for rank in range(size) if rank not in inside]
    if not inside:
        where = "none is inside MPI: an endless loop"
        return f"no rank of {size} finished within {limit:g} s, and {where}"
    calls = ", ".join(f"rank {rank} in {r['call']}" for rank, r in inside.items())
    waiting = f"still waiting after {limit:g} s: {calls} (a world of {size})"
    if others:
        return f"rank {in_a_list(others)} did not come; {waiting}"
    if len({(r["call"], r["calls"]) for r in inside.values()}) > 1:
        behind = min(inside, key=lambda rank: inside[rank]["calls"])
        return f"rank {behind} did not join the others' call; {waiting}"
    return f"a deadlock, every rank waits for another; {waiting}"


def in_a_list(ranks):
    """1, 2 and 3."""
    *most, last = map(str, ranks)
    return f"{', '.join(most)} and {last}" if most else last


def read_notes(path):
    """An Notes from a file that a student's process wrote: arrays and JSON, no code."""
    with np.load(path, allow_pickle=False) as notes:
        facts = json.loads(str(notes["notes"]))
        values = {
            name.removeprefix("value "): notes[name] for name in notes.files if name != "notes"
        }
    return Notes(values, facts["calls"], facts["marks"])
