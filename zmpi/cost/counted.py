"""Arrays without memory: NumPy's functions run on them, and only their bytes are counted.

So unchanged code measures its own needs: models/ops.py, unit.py and the optimizers run on them,
every array lives as long as the real one would, and nothing is declared twice. Every element counts
as 1. A function that is not supported raises a TypeError that names it.
"""

from math import prod

import numpy as np

_ONE = np.ones((), bool)


class Meter:
    """The memory and FLOPs of one run's counted arrays."""

    def __init__(self):
        self.alive = 0  # bytes
        self.peak = 0  # highest bytes alive since the last reset_peak
        self.flops = 0  # of matrix products: 2 per multiplication and addition
        self.xp = _Module(self)  # the array module of a Device

    def take(self, nbytes):
        """Book a new array."""
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)

    def read(self):
        """(bytes alive, highest bytes alive since the last read)."""
        highest, self.peak = self.peak, self.alive
        return self.alive, highest


class _Module:
    """The part of an array module that creates arrays."""

    def __init__(self, meter):
        self._meter = meter

    def empty(self, shape, dtype):
        return Counted(shape if isinstance(shape, tuple) else (shape,), dtype, self._meter)


class Counted(np.lib.mixins.NDArrayOperatorsMixin):
    """An array's shape and type. It owns bytes on the meter, or is a view that keeps `root` alive.

    A reshape is always a view, as in models/ (where results are contiguous).
    """

    def __init__(self, shape, dtype, meter, root=None, value=True):
        self.shape, self.dtype, self.meter = shape, np.dtype(dtype), meter
        self.value = value  # of a bool array: the value of all its elements
        self.root = root  # None: not a view
        if root is None:
            meter.take(self.nbytes)

    def __del__(self):
        if self.root is None:
            self.meter.alive -= self.nbytes

    # -- what it looks like ------------------------------------------------------------------------

    @property
    def base(self):
        """The array that owns the bytes."""
        return self if self.root is None else self.root

    @property
    def size(self):
        return prod(self.shape)

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def itemsize(self):
        return self.dtype.itemsize

    @property
    def nbytes(self):
        return self.size * self.dtype.itemsize

    def __len__(self):
        return self.shape[0]

    def __float__(self):
        return 1.0

    # -- views -------------------------------------------------------------------------------------

    def _view(self, shape):
        return Counted(shape, self.dtype, self.meter, root=self.base, value=self.value)

    def _like(self):
        """A real one-byte array of this shape, from which NumPy derives the shapes of views."""
        return np.broadcast_to(_ONE, self.shape)

    def reshape(self, *shape):
        return self._view(self._like().reshape(*shape).shape)

    def swapaxes(self, a, b):
        return self._view(self._like().swapaxes(a, b).shape)

    @property
    def T(self):
        return self._view(self.shape[::-1])

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self._view((len(range(*index.indices(self.shape[0]))), *self.shape[1:]))
        parts = index if isinstance(index, tuple) else (index,)
        arrays = [part.shape for part in parts if isinstance(part, Counted)]
        if not arrays:
            return self._view(self._like()[index].shape)
        if len(arrays) != len(parts):
            raise TypeError("counted arrays: an index must be slices and numbers, or arrays only")
        return self.new(np.broadcast_shapes(*arrays) + self.shape[len(arrays) :])

    def __setitem__(self, index, value):
        pass

    # -- new memory --------------------------------------------------------------------------------

    def new(self, shape=None, dtype=None, value=True):
        """A new counted array; shape and type default to this one's."""
        shape = self.shape if shape is None else shape if isinstance(shape, tuple) else (shape,)
        return Counted(shape, self.dtype if dtype is None else dtype, self.meter, value=value)

    def astype(self, dtype):
        return self.new(dtype=dtype)

    def tolist(self):
        return np.ones(self.shape).tolist()

    def fill(self, value):
        pass

    def sum(self, axis=None, keepdims=False, dtype=None):
        return self.new(
            self._reduced(axis, keepdims),
            dtype or (np.int64 if self.dtype.kind in "bi" else self.dtype),
        )

    def max(self, axis=None, keepdims=False):
        return self.new(self._reduced(axis, keepdims))

    def _reduced(self, axis, keepdims):
        gone = range(self.ndim) if axis is None else [axis % self.ndim]
        kept = [
            1 if i in gone else n for i, n in enumerate(self.shape) if keepdims or i not in gone
        ]
        return tuple(kept)

    # -- NumPy's functions -------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, dtype=None, **_):
        if method == "reduceat":
            return inputs[0].new((len(inputs[1]), *inputs[0].shape[1:]))
        if method != "__call__":
            raise TypeError(f"counted arrays: numpy.{ufunc.__name__}.{method} is not supported")
        shape = _product(self.meter, *inputs) if ufunc is np.matmul else None
        if out is not None:
            return out[0]
        shape = shape or np.broadcast_shapes(*map(np.shape, inputs))
        if all(types.endswith("?") for types in ufunc.types):
            ones = [1 if isinstance(x, Counted) else x for x in inputs]
            return self.new(shape, bool, value=bool(np.all(ufunc(*ones))))
        return self.new(shape, dtype or _common_type(*inputs))

    def __array_function__(self, function, types, args, kwargs):
        if function not in _FUNCTIONS:
            raise TypeError(f"counted arrays: numpy.{function.__name__} is not supported")
        return _FUNCTIONS[function](self, *args, **kwargs)


def _product(meter, a, b):
    """The shape of a @ b; books its FLOPs."""
    if a.ndim == 1:  # a row, dropped from the result
        return _product(meter, a.reshape(1, -1), b)[1:]
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"matmul: {a.shape} and {b.shape} do not fit")
    meter.flops += 2 * prod(shape) * a.shape[-1]
    return shape


def _common_type(*values):
    """The result type of a computation on arrays and numbers."""
    types = [x.dtype if isinstance(x, Counted) else x for x in values]
    if (
        values[0].__class__ is Counted
        and types[0].kind == "f"
        and all(x is types[0] or isinstance(x, float) for x in types)
    ):
        return types[0]
    return np.result_type(*types)


def _empty_like(_, x, dtype=None, shape=None):
    return x.new(shape, dtype)


# Each takes the array that NumPy dispatched on, then the call's arguments.
_FUNCTIONS = {
    np.empty_like: _empty_like,
    np.full_like: lambda _, x, value, dtype=None, shape=None: x.new(shape, dtype),
    np.zeros_like: _empty_like,
    np.ones_like: _empty_like,
    np.arange: lambda like, length: like.new((length,), np.int64),
    np.argsort: lambda _, x, kind=None: x.new(dtype=np.int64),
    np.copyto: lambda _, into, x, casting=None: None,
    np.count_nonzero: lambda _, x: x.size if x.value else 0,
    np.flatnonzero: lambda _, x: x.new((x.size,), np.int64),
    np.shape: lambda _, x: x.shape,
    np.sum: lambda _, x, axis=None: x.sum(axis),
    np.where: lambda like, c, a, b: like.new(
        np.broadcast_shapes(*map(np.shape, (c, a, b))), _common_type(a, b)
    ),
}
