"""How far two numbers are apart: absolute, relative, in ulps and in bits."""

from dataclasses import dataclass
from math import floor, isfinite, log2

import numpy as np


@dataclass(frozen=True)
class Gap:
    """The distance of two numbers; each figure is None where one of the two is not finite."""

    absolute: float | None
    relative: float | None  # of the larger magnitude: from 0 to 2
    ulps: int | None  # steps from one to the other over the numbers that the type can hold
    bits: int | None  # leading bits in which they agree: at most 24 in float32, 53 in float64


def gap(a, b, dtype=np.float64):
    """The Gap of two numbers as `dtype` (float32 or float64) holds them."""
    dtype, a, b = np.dtype(dtype), float(a), float(b)
    absolute, largest, precision = abs(a - b), max(abs(a), abs(b)), np.finfo(dtype).nmant + 1
    if not isfinite(absolute):  # of finite numbers too, where it is beyond float64
        return Gap(None, None, None, None)
    relative = absolute / largest if largest else 0.0
    bits = max(0, min(precision, floor(-log2(relative)))) if relative else precision
    return Gap(absolute, relative, abs(_place(a, dtype) - _place(b, dtype)), bits)


def differing_bits(a, b):
    """Where two arrays of one floating type differ in a bit, as booleans: 0.0 and -0.0 do."""
    unsigned = f"u{a.dtype.itemsize}"
    return a.view(unsigned) != b.view(unsigned)


def _place(value, dtype):
    """A number's place among all numbers of its type, in order; zero, of either sign, is 0."""
    bits = int(np.array(value, dtype).view(f"u{dtype.itemsize}"))
    sign = 1 << (8 * dtype.itemsize - 1)
    return sign - bits if bits & sign else bits
