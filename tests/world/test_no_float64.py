"""In float32 no array of the training path is float64, by accident of types: twice the memory."""

import sys
from pathlib import Path

import numpy as np
import pytest
from training import STAGES, adamw, gpt, mlp, share, world_of

import models as models_package
import zmpi
from zmpi import Policy, ZeRO
from zmpi.numbers.optim import CACHE_BLOCK

SIZES = (1, 3, 4)

FOLDERS = tuple(str(Path(package.__file__).parent) for package in (models_package, zmpi))
# The few numbers that ranks tell each other: counts, losses and pieces of the norm; size x
# (micro-batches + 192) at most.
SCALARS = {
    "gather_scalars",
    "_update",
    "_open",
    "_agree",
    "columns",
    "evaluate",
    "add_up",
    "settle",
    "squares",
    "<genexpr>",
}


# The norm is summed in float64, in a block of a constant size.
NORM = "sums_of_squares"


def float64_arrays_seen(call):
    """{(function, variable, elements)} but for the norm's block, whose size is checked.

    Looks before every line in models/ and zmpi/ at all local variables.
    """
    found = set()

    def look(frame, event, arg):
        if not frame.f_code.co_filename.startswith(FOLDERS):
            return None
        for name, value in frame.f_locals.items():
            for array in arrays_within(value):
                if array.dtype == np.float64:
                    found.add((frame.f_code.co_name, name, array.size))
        return look

    sys.settrace(look)
    try:
        call()
    finally:
        sys.settrace(None)
    assert all(elements <= CACHE_BLOCK for function, _, elements in found if function == NORM)
    return {entry for entry in found if entry[0] != NORM}


def arrays_within(value):
    if isinstance(value, np.ndarray) and value.ndim:
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from arrays_within(part)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", [gpt, mlp])
@pytest.mark.parametrize("reduction", ["mpi", "ordered"])
def test_no_float64_array_appears_in_a_step(comm, model, reduction, stage):
    zero = ZeRO(model(), world_of(reduction), stage, adamw(), policy=Policy(recompute=True))
    batches = share(zero.model, 1, zero.world, 2)
    found = float64_arrays_seen(lambda: (zero.train_step(batches), zero.evaluate(batches)))
    assert {function for function, _, _ in found} <= SCALARS
    pieces = next(iter(zero.units.values())).layout.pieces
    assert max(elements for _, _, elements in found) <= comm.size * (2 + pieces)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_no_float64_array_appears_in_a_step_of_16_bits(comm, precision):
    zero = ZeRO(gpt(), world_of("auto"), 3, adamw(), policy=Policy(precision))
    batches = share(zero.model, 1, zero.world, 2)
    found = float64_arrays_seen(lambda: (zero.train_step(batches), zero.evaluate(batches)))
    assert {function for function, _, _ in found} <= SCALARS


def test_every_vector_that_is_owned_is_float32(comm):
    for stage in STAGES:
        zero = ZeRO(gpt(), world_of("auto"), stage, adamw())
        zero.train_step(share(zero.model, 1, zero.world, 1))
        for unit in zero.units.values():
            for vectors in unit.vectors().values():
                assert {vector.dtype for vector in vectors} <= {np.dtype(np.float32)}


def test_a_float64_array_would_be_seen(comm, monkeypatch):
    zero = ZeRO(gpt(), world_of("auto"), 3, adamw())
    head, forward = zero.model.layers[-1], type(zero.model.layers[-1]).forward
    monkeypatch.setattr(
        type(head), "forward", lambda layer, w, x: forward(layer, w, x * np.ones(1))
    )
    found = float64_arrays_seen(lambda: zero.train_step(share(zero.model, 1, zero.world, 1)))
    assert ("loss", "logits_BTV", 2 * 7 * 23) in found
