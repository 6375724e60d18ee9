"""Grade the reference solutions, and planted mistakes, each in one call."""

from pathlib import Path

from wrong import SOLUTIONS

from zmpi.course.marks import grade_files
from zmpi.course.tasks import TASKS


def reference(seed, limit=20):
    """The marks of all reference solutions."""
    files = [(number, SOLUTIONS / task.file) for number, task in TASKS.items()]
    return grade_files(files, seed, limit, apart=False)


def planted(mistakes, folder, seed, limit=20):
    """[(mistake, its Marked), ...]."""
    files = [
        (mistake.task, mistake.write(Path(folder) / f"mistake{i}"))
        for i, mistake in enumerate(mistakes)
    ]
    return list(zip(mistakes, grade_files(files, seed, limit, apart=False), strict=True))


def first_named(marked):
    """The first idea that failed, or what ended the task."""
    return next((mark.idea for mark in marked.marks if mark.state == "failed"), marked.fault)
