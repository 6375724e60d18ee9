"""What is watched of a student's code while a case runs on this rank: values, calls, inputs,
lifetimes.
"""

import json
import tracemalloc
import weakref
from contextlib import contextmanager

import numpy as np

from zmpi.messages.memory import traced_array_bytes


class CaseWatch:
    """The notes of one case on one rank; `save` writes them for the judge."""

    def __init__(self, log, world=None):
        self.log, self.world = log, world
        self.values, self.calls, self.marks = {}, {}, {}
        self._inputs, self._lives, self._before, self._own = [], {}, 0, 0

    def keep(self, name, value):
        """Note a result: as an array, or as the name of what it was instead."""
        try:
            array = np.array(value)
        except Exception:
            array = np.array(type(value).__name__)
        if array.dtype.kind not in "biuf":
            array = np.array(type(value).__name__)
        self.values[name] = array
        self._own += array.nbytes

    @contextmanager
    def phase(self, name):
        """Note the MPI calls that are made inside."""
        since = len(self.log.calls)
        yield
        self.calls.setdefault(name, []).extend(self.log.taken(since))

    def untouched(self, name, array):
        """Note whether an input is changed from here on; returns it."""
        self._inputs.append((name, array, array.copy()))
        self._own += array.nbytes
        return array

    def highest(self, name, value):
        """Note the highest of a figure."""
        self.marks[name] = max(self.marks.get(name, value), value)

    # ---- lifetimes -------------------------------------------------------------------------------

    def begin_memory(self):
        """Count the bytes of arrays from here on."""
        tracemalloc.start()
        self._own = 0
        self._before = traced_array_bytes()

    def held(self):
        """Bytes of the arrays that were made since then and are alive: without these notes, and
        what is `lent`.
        """
        lent = sum(life[1] for life in self._living("lent"))
        return traced_array_bytes() - self._before - self._own - lent

    def follow(self, kind, array):
        """Follow an array's life, by the one that owns its memory; `lent` ones are the grader's
        own.
        """
        while isinstance(array.base, np.ndarray):
            array = array.base
        lives = self._living(kind)
        if all(life[0]() is not array for life in lives):
            lives.append((weakref.ref(array), array.nbytes))
        self._lives[kind] = lives

    def alive(self, kind):
        """How many of the arrays of a kind are alive."""
        return len(self._living(kind))

    def _living(self, kind):
        return [life for life in self._lives.get(kind, []) if life[0]() is not None]

    # ---- the end ---------------------------------------------------------------------------------

    def end(self):
        """Stop watching."""
        tracemalloc.stop()
        changed = [name for name, array, copy in self._inputs if not _same(array, copy)]
        self.marks["changed"] = list(dict.fromkeys(changed))

    def save(self, path):
        """Write the notes: arrays and JSON, nothing that could be code."""
        notes = json.dumps({"calls": self.calls, "marks": self.marks})
        values = {f"value {name}": array for name, array in self.values.items()}
        with open(path, "wb") as file:
            np.savez(file, notes=np.array(notes), **values)


def _same(array, copy):
    return array.shape == copy.shape and array.tobytes() == copy.tobytes()
