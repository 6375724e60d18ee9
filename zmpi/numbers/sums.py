"""Sums and roundings whose bits depend only on the numbers and their order."""

import numpy as np

from models.twins import on_gpu

# elements summed over ranks at a time, so that the running sum stays in cache
REDUCE_BLOCK = 1 << 16


@on_gpu
def add_in_order(rows, out, fresh):
    """Add the rows (n, elements) in order onto `out`, or onto zero if `fresh`.

    Each block is summed in float32 (float64 for float64), and rounded once if `out` has 16 bits.
    """
    wide = out.dtype if out.itemsize >= 4 else np.dtype(np.float32)
    for start in range(0, len(out), REDUCE_BLOCK):
        part = out[start : start + REDUCE_BLOCK]
        total = part if part.dtype == wide else np.empty_like(part, dtype=wide)
        # an overflow (and inf - inf) shows in the norm
        with np.errstate(over="ignore", invalid="ignore"):
            for i, row in enumerate(rows):
                so_far = 0.0 if fresh and i == 0 else total
                np.add(so_far, row[start : start + REDUCE_BLOCK], out=total, dtype=wide)
            if total is not part:
                np.copyto(part, total, casting="same_kind")


def add_up(values):
    """The sum from left to right, as a float: NumPy and Python's sum() may use another order."""
    total = 0.0
    for value in values:
        total += float(value)
    return total


def round_to(narrow, wide):
    """Assign `wide` to `narrow`, rounded to its type."""
    with np.errstate(over="ignore"):  # an overflow is counted, or shows in the norm
        np.copyto(narrow, wide, casting="same_kind")
