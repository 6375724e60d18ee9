"""The difference of two numbers: absolute, relative, in ulps and in bits."""

from dataclasses import dataclass
from math import floor, isfinite, log2

import numpy as np


@dataclass(frozen=True)
class Gap:
    """The difference of two numbers; every field is None if either is not finite."""

    absolute: float | None
    relative: float | None  # to the larger magnitude: from 0 to 2
    ulps: int | None  # steps from one to the other through the type's numbers
    bits: int | None  # leading bits that agree: at most 24 in float32, 53 in float64


def gap_between(a, b, dtype=np.float64):
    """The Gap of two numbers in `dtype` (float32 or float64)."""
    dtype, a, b = np.dtype(dtype), float(a), float(b)
    absolute, largest, precision = abs(a - b), max(abs(a), abs(b)), np.finfo(dtype).nmant + 1
    if not isfinite(absolute):  # also for finite numbers whose difference overflows
        return Gap(None, None, None, None)
    relative = absolute / largest if largest else 0.0
    bits = max(0, min(precision, floor(-log2(relative)))) if relative else precision
    return Gap(absolute, relative, abs(_place(a, dtype) - _place(b, dtype)), bits)


def differing_bits(a, b):
    """Where two arrays of one floating type differ in any bit, as booleans (0.0 and -0.0 do)."""
    unsigned = f"u{a.dtype.itemsize}"
    return a.view(unsigned) != b.view(unsigned)


def _place(value, dtype):
    """A number's rank among its type's numbers, in order; zero, of either sign, is 0."""
    bits = int(np.array(value, dtype).view(f"u{dtype.itemsize}"))
    sign = 1 << (8 * dtype.itemsize - 1)
    return sign - bits if bits & sign else bits
