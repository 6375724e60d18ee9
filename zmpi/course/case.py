"""What a task of the course is: its ideas (with points), its cases, how they run, and how they are
judged.

A case is run in a world, next to the student's code, and judged in the grader's own process, where
none of that code ever runs: what was expected is never within its reach.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

SCALAR_BYTES = 512  # bytes of a message that counts as a few scalars, not as a vector
MOST_SCALARS = 8192  # bytes that a step may send in such messages
SPARE_BYTES = 1024  # bytes of arrays that may be alive unnamed: scalars, counts
FAR_OFF = (
    1e-4  # relative: two orders of a float32 sum are closer than that, two different sums are not
)


@dataclass(frozen=True)
class Idea:
    """What is learnt, and checked by itself. Judged only where the ideas that it `needs` (keys)
    passed.
    """

    key: str
    points: int
    about: str
    needs: tuple = ()


@dataclass(frozen=True)
class Case:
    """One run of a student's code: on `size` ranks, with what is `given` (arrays; per rank by
    index).
    """

    size: int
    name: str
    given: dict
    ideas: tuple = ()  # keys of the ideas that it shows; (): all


@dataclass
class Notes:
    """What one rank brought back from a case."""

    values: dict = field(default_factory=dict)  # {name: array}; text where it was no array
    calls: dict = field(default_factory=dict)  # {phase: [Call as a dictionary, ...]}
    marks: dict = field(default_factory=dict)  # what was watched, as plain numbers and text


@dataclass(frozen=True)
class Fault:
    """What is wrong: with which idea, in words, and on which rank (None: it is not a rank's)."""

    idea: str
    text: str
    rank: int | None = None


@dataclass(frozen=True)
class Task:
    """`cases(draw)` makes its cases; `run(student, comm, given, watch)` is one of them in a world,
    on one rank; `judge(case, outcomes)` yields a Fault for everything that is wrong, `outcomes` in
    rank order.
    """

    number: int | str
    title: str
    file: str
    ideas: tuple
    cases: Callable
    run: Callable
    judge: Callable
    in_zmpi: bool = False  # it runs parts of zmpi: `watch.world` is a World of the case's ranks

    @property
    def points(self):
        """All that can be had."""
        return sum(idea.points for idea in self.ideas)


# ---- comparing -----------------------------------------------------------------------------------


def form(name, expected, got):
    """What is wrong with an array's kind and shape, in words; "" where nothing is."""
    got = np.asarray("nothing" if got is None else got)
    if got.dtype.kind == "U":
        return f"{name}: expected an array of {expected.dtype}, got {got}"
    if got.shape != expected.shape:
        return f"{name}: expected the shape {expected.shape}, got {got.shape}"
    return ""


def apart(name, expected, got, tolerance=0.0):
    """The first element that differs, in words; "" where none does. `tolerance` is absolute. A name
    begins with that of the array: "weights after step 1".
    """
    wrong = form(name, expected, got)
    if wrong:
        return wrong
    with np.errstate(invalid="ignore", over="ignore"):
        off = ~(np.abs(got.astype(np.float64) - expected) <= tolerance)
    found = np.flatnonzero(off)
    if not len(found):
        return ""
    place = tuple(int(i) for i in np.unravel_index(found[0], expected.shape))
    at = f"[{', '.join(map(str, place))}]" if place else ""
    here, there = expected[place].item(), got[place].item()
    digits = 6 if f"{here:.6g}" != f"{there:.6g}" else 9
    word, space, rest = name.partition(" ")
    return f"{word}{at}{space}{rest}: expected {here:.{digits}g}, got {there:.{digits}g}"


def is_far(expected, got):
    """Whether two arrays of one shape differ by more than another order of the sums explains."""
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.max(np.abs(got.astype(np.float64) - expected), initial=0.0)
    return not off <= FAR_OFF * max(1.0, float(np.max(np.abs(expected), initial=0.0)))


def value_faults(ideas, name, expected, outcomes, known=()):
    """Faults of an array that every rank should hold: ideas = (the one where it is far off, the one
    where only the order of the sums differs). `expected` is one array for all, or a list in rank
    order; `known` are mistakes that the values give away: (idea, array or list, what to say of it).
    """
    for rank, outcome in enumerate(outcomes):
        wanted, got = of_rank(expected, rank), outcome.values.get(name)
        text = apart(name, wanted, got)
        if text:
            far = bool(form(name, wanted, got)) or is_far(wanted, got)
            idea = ideas[0] if far else ideas[1]
            for other, array, words in known:
                if idea != other and not apart(name, of_rank(array, rank), got):
                    idea, text = other, f"{text}, {words},"
            yield Fault(idea, text, rank)
            return


def of_rank(expected, rank):
    """A rank's part of what is one for all, or a list in rank order."""
    return expected[rank] if isinstance(expected, list) else expected


def kept_in_float32(idea, outcomes, names):
    """Faults of results, or of vectors in messages, that are float64."""
    for rank, outcome in enumerate(outcomes):
        for name in names:
            got = outcome.values.get(name)
            if got is not None and got.dtype == np.float64:
                yield Fault(idea, f"{name}: expected float32, got float64", rank)
                return
        for calls in outcome.calls.values():
            for call in calls:
                if call["kind"] == "f8" and call["largest"] > SCALAR_BYTES:
                    text = f"{call['name']}: expected float32 in the message, got float64"
                    yield Fault(idea, text, rank)
                    return


def untouched(idea, outcomes):
    """Faults of inputs that a rank has changed."""
    for rank, outcome in enumerate(outcomes):
        for name in outcome.marks.get("changed", ()):
            yield Fault(
                idea, f"{name}: expected it to stay as it was given, got a changed one", rank
            )
            return


def sent_faults(idea, phase, expected, outcomes, what):
    """Faults of the bytes that each rank sends in a phase, vectors and scalars apart."""
    for rank, outcome in enumerate(outcomes):
        calls = outcome.calls.get(phase, [])
        vectors = sum(call["sent"] for call in calls if call["largest"] > SCALAR_BYTES)
        scalars = sum(call["sent"] for call in calls if call["largest"] <= SCALAR_BYTES)
        if vectors != expected:
            text = f"bytes sent in {what}: expected {expected:,}, got {vectors:,} ({used(calls)})"
            yield Fault(idea, text, rank)
            return
        if scalars > MOST_SCALARS:
            text = f"bytes sent as scalars in {what}: expected at most {MOST_SCALARS:,},"
            text += f" got {scalars:,}"
            yield Fault(idea, text, rank)
            return


def used(calls):
    """Which MPI calls were made, in words."""
    names = [call["name"] for call in calls if call["sent"] or call["largest"]]
    counts = [f"{names.count(name)} {name}" for name in dict.fromkeys(names)]
    return ", ".join(counts) or "no message at all"


def most(name, bound, outcomes):
    """(value, rank) of the first rank on which the mark `name` is above a bound, or None."""
    for rank, outcome in enumerate(outcomes):
        value = outcome.marks.get(name, 0)
        if value > bound:
            return value, rank
    return None


# ---- sums in rank order --------------------------------------------------------------------------


def sum_in_order(vectors):
    """The sum of float32 vectors from left to right."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    return total
