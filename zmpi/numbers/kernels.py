"""Fused CuPy twins of what zmpi computes on shards: the same signatures; source in kernels.cu."""

from functools import cache, partial
from pathlib import Path

import cupy
import numpy as np

from models.cuda import NOTHING, contiguous, queue_kernel, wide

NORM_PARTS = 64  # parts of a piece of the norm: the same on every device

_launch = partial(queue_kernel, source=Path(__file__).with_name("kernels.cu"))


def add_in_order(rows, out, fresh):
    n, length = rows.shape
    if out.dtype == wide(rows):
        _launch("add_rows", rows.dtype, length, contiguous(rows), out, n, length, np.int32(fresh))
    elif out.dtype == rows.dtype and fresh:
        _launch("add_rows_rounded", rows.dtype, length, contiguous(rows), out, n, length)
    else:
        raise ValueError(f"sum: {rows.dtype} cannot be added onto {out.dtype}")


def sums_of_squares(vector, pieces):
    partial = cupy.empty((pieces, NORM_PARTS), np.float64)
    _launch(
        "squares",
        vector.dtype,
        32 * partial.size,
        vector,
        partial,
        len(vector) // pieces,
        pieces,
        NORM_PARTS,
    )
    return cupy.asnumpy(partial).sum(axis=1)


def adamw(master, owned, by):
    number = wide(owned.gradient).type
    stored = NOTHING if owned.stored is None else owned.stored
    arrays = (
        master,
        owned.gradient,
        owned.moments["m"],
        owned.moments["v"],
        stored,
        _table(tuple(owned.decayed)),
    )
    names = ("factor", "kept", "beta1", "beta2", "step_size", "root_of_correction", "eps")
    numbers = [number(getattr(by, name)) for name in names]
    _launch(
        "adamw",
        owned.gradient.dtype,
        len(master),
        *arrays,
        len(owned.decayed),
        len(master),
        *numbers,
    )


@cache
def _table(spans):
    """(start, stop, decays) of each parameter, on the device; made once per slice."""
    return cupy.asarray(np.array(spans, np.int64).reshape(-1, 3))
