"""Compares two checkpoints element by element, from any numbers of ranks and stages.

Parameters are read a chunk at a time, with each block checked against its checksum.
"""

from dataclasses import dataclass
from math import prod

import numpy as np

from zmpi.numbers.gap import differing_bits
from zmpi.saving.manifest import Readers

CHUNK_ELEMENTS = 1 << 18  # elements compared at once
OPEN_FILES = 64  # open at once, per checkpoint


@dataclass(frozen=True)
class Element:
    """One element of a parameter, and its two values (NumPy scalars of one type)."""

    name: str
    index: tuple
    a: np.floating
    b: np.floating

    def __str__(self):
        return f"{self.name}[{', '.join(map(str, self.index))}]"

    @property
    def apart(self):
        """|a - b|; infinite if either is not finite."""
        with np.errstate(invalid="ignore", over="ignore"):
            distance = abs(float(self.a) - float(self.b))
        return distance if np.isfinite(distance) else np.inf


@dataclass
class ComparedVector:
    """The comparison of one vector of two checkpoints: "master" (the weights) or a moment."""

    elements: int = 0
    differ: int = 0
    parameters: int = 0
    parameters_differ: int = 0
    first: Element | None = None  # in the order of the manifest
    largest: Element | None = None  # the first with the largest difference

    def add(self, name, shape, start, a, b):
        """Add a chunk that starts at the flat index `start`; returns whether it differs."""
        self.elements += len(a)
        where = np.flatnonzero(differing_bits(a, b))
        if not len(where):
            return False
        self.differ += len(where)
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(a[where].astype(np.float64) - b[where])
        apart[~np.isfinite(apart)] = np.inf
        for at in (where[0], where[apart.argmax()]):
            index = tuple(map(int, np.unravel_index(start + at, shape)))
            element = Element(name, index, a[at], b[at])
            self.first = self.first or element
            if self.largest is None or element.apart > self.largest.apart:
                self.largest = element
        return True


def compare_checkpoints(a, b):
    """{vector: ComparedVector} for the common vectors of two Manifests with the same shapes.

    If one has float32 and the other float64, they are compared in float64.
    """
    dtype = np.result_type(a.dtype, b.dtype)
    with Readers(a, OPEN_FILES) as of_a, Readers(b, OPEN_FILES) as of_b:
        return {
            vector: _compare_vector((a, of_a), (b, of_b), vector, dtype)
            for vector in a["vectors"]
            if vector in b["vectors"]
        }


def _compare_vector(one, other, vector, dtype):
    found, shapes = ComparedVector(), one[0].shapes
    for name, shape in shapes.items():
        differs, length = False, prod(shape)
        for start in range(0, length, CHUNK_ELEMENTS):
            stop = min(length, start + CHUNK_ELEMENTS)
            a, b = (
                manifest.read_elements(name, vector, start, stop, readers).astype(dtype, copy=False)
                for manifest, readers in (one, other)
            )
            differs |= found.add(name, shape, start, a, b)
        found.parameters += 1
        found.parameters_differ += differs
    return found
