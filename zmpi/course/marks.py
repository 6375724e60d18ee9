"""From how cases ended to marks: which ideas passed, what to say of the others, and points."""

from dataclasses import dataclass

import numpy as np

from zmpi.course.case import Fault
from zmpi.course.tasks import TASKS
from zmpi.course.worlds import Job, run_jobs

PASSED, FAILED, NOT_JUDGED = "passed", "failed", "not judged"


@dataclass(frozen=True)
class Mark:
    """What became of one idea, and a sentence if it failed."""

    idea: str
    points: int  # had
    of: int  # to be had
    state: str
    sentence: str = ""


@dataclass(frozen=True)
class Marked:
    """A task's marks; `fault` is a sentence where a case ended before it could be judged."""

    task: object
    marks: tuple
    fault: str = ""

    @property
    def points(self):
        """All that were had."""
        return sum(mark.points for mark in self.marks)

    @property
    def sentences(self):
        """What is wrong, a sentence each."""
        first = [self.fault] if self.fault else []
        return first + [mark.sentence for mark in self.marks if mark.sentence]


def grade_files(files, seed, limit, apart=True):
    """A Marked for each (task number, file); `seed` draws the cases, `limit` is in seconds for each
    of them. A file that is missing gets no points.

    Each file is run in a world of its own, so that none can spoil another's; with `apart` False
    one world runs them all. Raises ValueError where no world can be started.
    """
    if apart:
        return [only for one in files for only in _in_one_world([one], seed, limit)]
    return _in_one_world(files, seed, limit)


def _in_one_world(files, seed, limit):
    jobs, spans = [], []
    for number, file in files:
        cases = TASKS[number].cases(np.random.default_rng([seed, list(TASKS).index(number)]))
        cases = cases if file.is_file() else []
        spans.append((number, len(jobs), len(jobs) + len(cases)))
        jobs += [Job(number, file, case) for case in cases]
    ended = run_jobs(jobs, limit) if jobs else []
    return [
        marked(TASKS[number], [job.case for job in jobs[start:stop]], ended[start:stop])
        for number, start, stop in spans
    ]


def marked(task, cases, ended):
    """The Marked of a task whose cases ended so."""
    states = {idea.key: PASSED if cases else NOT_JUDGED for idea in task.ideas}
    sentences, fault = {}, "" if cases else f"{task.file} is missing"
    for case, end in zip(cases, ended, strict=True):
        shown = case.ideas or tuple(states)
        if end.fault or not end.run:
            where = f"{case.name}, {case.size} rank{'s' if case.size > 1 else ''}"
            fault = fault or (f"{end.fault} ({where})" if end.fault else "")
            for key in shown:
                states[key] = NOT_JUDGED if states[key] == PASSED else states[key]
            continue
        for found in judge_case(task, case, end.outcomes):
            if states[found.idea] != FAILED:
                states[found.idea] = FAILED
                sentences[found.idea] = sentence_of(task, case, found)
    for idea in task.ideas:
        if any(states[key] != PASSED for key in idea.needs):
            states[idea.key] = NOT_JUDGED
            sentences.pop(idea.key, None)
    marks = tuple(
        Mark(
            idea.key,
            idea.points if states[idea.key] == PASSED else 0,
            idea.points,
            states[idea.key],
            sentences.get(idea.key, ""),
        )
        for idea in task.ideas
    )
    return Marked(task, marks, fault)


def judge_case(task, case, outcomes):
    """The faults of a case. Results that cannot be judged at all (of a kind that nobody foresaw)
    are one too.
    """
    try:
        return list(task.judge(case, outcomes))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        return [_unreadable(task, case, error)]


def _unreadable(task, case, error):
    key = (case.ideas or (task.ideas[0].key,))[0]
    return Fault(key, f"expected results that can be compared, got others ({error})")


def sentence_of(task, case, fault):
    """idea: expected ..., got ..., where; what the idea is."""
    about = next(idea.about for idea in task.ideas if idea.key == fault.idea)
    where = f" on rank {fault.rank} of {case.size}" if fault.rank is not None else ""
    return f"{fault.idea}: {fault.text}{where} ({case.name}). The idea: {about}."
