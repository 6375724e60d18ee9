"""A row of the verifier's table, made from the findings of all ranks."""

from dataclasses import dataclass
from math import isnan

import numpy as np

CLOSE = 1e-5  # relative, for sums in another order (DESIGN: promise P1)


@dataclass(frozen=True)
class Row:
    """One line of the table: what was compared, the figure, whether it passed, and where not."""

    promise: str
    compared: str
    figure: str
    passed: bool
    # If it failed: stage, reduction, model, step, the first array and index that differ, and both
    # numbers.
    where: str = ""
    checked: bool = True  # False: not possible here, and the figure says why


@dataclass(frozen=True)
class Finding:
    """A difference found by one rank, and where; no `where`: small enough. Lowest `order` first."""

    size: float  # relative to the largest number; NaN if either is NaN
    where: str = ""
    order: tuple = ()


def judged(trial, promise, compared, findings, good="same bits", figure=None):
    """The Row of all ranks' findings (None: no finding). Collective: `findings` are this rank's.

    `good`: the figure if nothing differs; `figure`: formats another size.
    """
    found = [finding for finding in findings if finding]
    mine = min((f for f in found if f.where), key=lambda f: f.order, default=None)
    first = (mine.order, trial.world.rank, mine.where) if mine else None
    ranks = trial.world.share((first, _most(f.size for f in found)))
    wrong, size = [first for first, _ in ranks if first], _most(size for _, size in ranks)
    words = (figure or _relative)(size) if size else good
    if trial.tolerance and promise.startswith("P1") and size:
        words = f"off by {size:.1e} (declared {trial.tolerance:g})"
    if not wrong:
        return Row(promise, compared, words, True)
    _, rank, where = min(wrong)
    on_rank = "" if len(wrong) == trial.world.size else f" (on rank {rank})"
    return Row(promise, compared, words, False, where + on_rank)


def as_count(size):
    """A count, as a figure."""
    return f"off by {size:,.0f}"


def _relative(size):
    return "not a number" if isnan(size) else f"off by {size:.1e}, relative"


def _most(sizes):
    """The largest; NaN if one is NaN; 0.0 if there are none."""
    return float(np.max([0.0, *sizes]))


def largest(array):
    """The largest magnitude in an array; 0.0 if it is empty."""
    return float(np.max(np.abs(array))) if array.size else 0.0


def off(here, there):
    """The largest difference of two arrays, relative to the largest number in either: 0 to 2."""
    if not np.any(here != there):
        return 0.0
    scale = np.maximum(largest(here), largest(there))  # np.maximum: NaN stays NaN
    return float(largest(here - there) / scale)


def both(here, there, reference):
    """Two numbers as text, with all digits if nine do not distinguish them."""
    digits = 9 if f"{here:.9g}" != f"{there:.9g}" else 17
    return f"{here:.{digits}g} here, {there:.{digits}g} {reference}"


def first_index(here, there, bound=0.0):
    """The flat index of the first elements that differ by more than `bound` (or NaN), or None."""
    apart = ~(np.abs(here - there) <= bound) if bound else here != there
    found = np.flatnonzero(apart)
    return int(found[0]) if len(found) else None


def named_index(name, shape, flat):
    """An element in NumPy's notation: "h.0.ln_1.bias[3]"."""
    return f"{name}[{', '.join(str(int(i)) for i in np.unravel_index(flat, shape))}]"
