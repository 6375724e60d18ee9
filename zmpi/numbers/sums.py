"""Sums and roundings whose bits depend on the numbers and their order alone."""

import numpy as np

from models.twins import on_gpu

# elements that are summed over ranks at a time, so that the running sum stays in cache
REDUCE_BLOCK = 1 << 16


@on_gpu
def add_in_order(rows, out, fresh):
    """Add the rows (n, elements) onto `out`, or onto zero (`fresh`), one by one from the first to the last.

    A block of the sum is kept in float32 (float64 for float64), and rounded once where `out` is of 16 bits.
    """
    wide = out.dtype if out.itemsize >= 4 else np.dtype(np.float32)
    for start in range(0, len(out), REDUCE_BLOCK):
        part = out[start : start + REDUCE_BLOCK]
        total = part if part.dtype == wide else np.empty_like(part, dtype=wide)
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # an overflow (and inf - inf) is found in the norm
            for i, row in enumerate(rows):
                so_far = 0.0 if fresh and i == 0 else total
                np.add(so_far, row[start : start + REDUCE_BLOCK], out=total, dtype=wide)
            if total is not part:
                np.copyto(part, total, casting="same_kind")


def add_up(values):
    """The sum of numbers as a float, from left to right: NumPy and Python's sum() have orders of their own."""
    total = 0.0
    for value in values:
        total += float(value)
    return total


def round_to(narrow, wide):
    """Assign `wide` to `narrow`, rounded to its type."""
    with np.errstate(
        over="ignore"
    ):  # an overflow is no accident here: it is counted, or found in the norm
        np.copyto(narrow, wide, casting="same_kind")
