"""A step of a world of any size, without running it: the real engine on counted arrays.

Units, layout, schedule, layers and optimizer are the real ones. Only repetition is left out: layers
of shapes already seen, all but an optimizer's first block, and the messages themselves. The ledger
equals that of a real run, to the byte.
"""

from collections.abc import Hashable
from contextlib import nullcontext
from copy import copy
from functools import partial
from types import SimpleNamespace

import numpy as np

from models.layer import Layer, one_target
from zmpi.cost.counted import Counted, Meter
from zmpi.cost.watch import Memory, WatchedUnit, WatchedZeRO
from zmpi.messages.comm import Communicator
from zmpi.messages.device import Device
from zmpi.messages.world import World
from zmpi.numbers.optim import CACHE_BLOCK, Slice, sums_of_squares
from zmpi.numbers.sums import REDUCE_BLOCK, add_in_order


class CountedWorld(World):
    """One rank of an imaginary world of `size`. `reduction` as in World, for a CPU."""

    def __init__(self, size, rank=0, reduction="auto", group=None):
        self.mpi, self.guard = None, SimpleNamespace(stop_requested=0)
        self.lane = SimpleNamespace(mpi=None, started=0)
        self.size, self.rank, self.reduction = size, rank, reduction
        self.meter = Meter()
        self.device = Device("cpu", self.meter.xp)
        self._axes = None
        if group not in (None, 1):
            self._axes = self._axis(group, rank % group), self._axis(size // group, rank // group)

    def _axis(self, size, rank):
        axis = copy(self)
        axis.size, axis.rank, axis._axes = size, rank, None
        return axis

    def agreed(self):
        return nullcontext()

    def share(self, thing, name="agreement"):
        return [thing]

    def settle(self, started=None):
        """Nothing is ever in progress."""


class CountedCommunicator(Communicator):
    """Books what would be sent, and sends nothing."""

    def all_gather(self, layout, shard, full):
        self._book("all_gather", layout, len(self._chunks(layout, full.itemsize)), full.itemsize)
        self.in_flight += 1
        return self

    def wait(self):
        self.in_flight -= 1

    def reduce_scatter(self, layout, full, out, fresh):
        block = min(len(out), self._chunk_elements(full.itemsize), REDUCE_BLOCK)
        add_in_order([self._message[:block]], out[:block], fresh)
        self._book("reduce_scatter", layout, len(self._cuts(layout, full.itemsize)), full.itemsize)

    def gather_scalars(self, values):
        sent = (self.size - 1) * 8 * len(values)
        self.ledger.book("all_reduce", "scalars", calls=1, elements=len(values), bytes_sent=sent)
        return np.tile(np.array(values, np.float64), (self.size, 1))


class CountedUnit(WatchedUnit):
    """A unit that squares only one block."""

    def squares(self):
        block = min(self.layout.shard_length, CACHE_BLOCK)  # the elements squared at once
        return np.repeat(sums_of_squares(self.gradient.owned.shard[:block], 1), self.layout.pieces)


class FirstBlock:
    """An optimizer that updates one block per unit: the others need the same memory."""

    def __init__(self, optimizer):
        self._optimizer, self.moments = optimizer, optimizer.moments
        self.rate, self.clip_factor = optimizer.rate, optimizer.clip_factor

    def update(self, owned, t, factor):
        moments = {name: vector[:CACHE_BLOCK] for name, vector in owned.moments.items()}
        decayed = [
            (a, min(b, CACHE_BLOCK), decays) for a, b, decays in owned.decayed if a < CACHE_BLOCK
        ]
        self._optimizer.update(
            Slice(owned.master[:CACHE_BLOCK], owned.gradient[:CACHE_BLOCK], moments, decayed),
            t,
            factor,
        )


class DryRun(WatchedZeRO):
    """An engine whose steps are only counted: `ledger` is a watch.Memory, `flops` of the last step.

    `model` is a real one (its weights are never made), `world` a CountedWorld. Dry runs of the same
    precision may share a `memo`, which remembers the layers already walked.
    """

    make_communicator = CountedCommunicator
    make_unit = CountedUnit

    def __init__(self, model, world, stage, optimizer, policy, memo=None):
        self.make_ledger = partial(Memory, world.meter.read)
        counted = CountedModel(model, Memo() if memo is None else memo)
        super().__init__(counted, world, stage, FirstBlock(optimizer), 0, policy)

    def _initialise(self):
        """No weights to initialise."""

    def count_step(self, micro_batch, accumulate=1):
        """Walk one training step with `micro_batch` sequences each; returns the ledger."""
        meter = self.world.meter
        inputs, targets = self.model.batch(micro_batch)
        batch = Counted(inputs, np.int64, meter), Counted(targets, np.int64, meter)
        before = meter.flops
        self.train_step([batch] * accumulate)
        self.flops = meter.flops - before
        return self.ledger


class CountedModel:
    """A model whose layers and loss are walked once per input shape."""

    def __init__(self, model, memo):
        self._model, self._memo = model, memo
        self.layers = [Remembered(layer, memo) for layer in model.layers]

    def loss(self, y, targets, divisor):
        return self._memo(
            "loss", lambda y, targets: self._model.loss(y, targets, divisor), y, targets
        )

    def batch(self, micro_batch):
        """The shapes of a micro-batch's inputs and targets."""
        inputs = micro_batch, self._model.context
        return inputs, inputs[:1] if one_target(self._model) else inputs


class Remembered(Layer):
    """A layer that is walked once per input shape, shared by layers of the same kind and sizes."""

    def __init__(self, layer, memo):
        self._layer, self._memo = layer, memo
        self.name, self.unit = layer.name, layer.unit
        self.backward_needs_weights = layer.backward_needs_weights
        settings = sorted(vars(layer).items())
        same = tuple(_hashable(setting) for setting in settings if setting[0] != "name")
        self._key = type(layer), repr(layer.shapes()), same

    def shapes(self):
        return self._layer.shapes()

    def forward(self, w, x):
        return self._memo((self._key, "forward"), lambda x: self._layer.forward(w, x), x)

    def backward(self, w, dw, saved, dy):
        return self._memo(
            (self._key, "backward"),
            lambda saved, dy: self._layer.backward(w, dw, saved, dy),
            saved,
            dy,
        )


class Memo:
    """What functions of counted arrays needed and returned, for each shape of their arguments."""

    def __init__(self):
        self._seen = {}  # key and shapes -> (peak bytes, FLOPs, result with Leafs for arrays)

    def __call__(self, key, function, *arguments):
        """function(*arguments): walked the first time; later only its result is made."""
        leaves = list(_arrays(arguments))
        key = key, tuple((leaf.shape, leaf.dtype.str) for leaf in leaves)
        meter = leaves[-1].meter
        if key not in self._seen:
            self._seen[key], result = self._walk(meter, function, arguments, leaves)
            return result
        needed, flops, pattern = self._seen[key]
        meter.peak = max(meter.peak, meter.alive + needed)
        meter.flops += flops
        bases = [leaf.base for leaf in leaves]
        return _rebuilt(pattern, bases, meter)

    def _walk(self, meter, function, arguments, leaves):
        before, outer, flops = meter.alive, meter.peak, meter.flops
        meter.peak = before
        result = function(*arguments)
        needed, meter.peak = meter.peak - before, max(outer, meter.peak)
        bases = [leaf.base for leaf in leaves]
        return (needed, meter.flops - flops, _pattern(result, bases)), result


def _hashable(setting):
    """A layer's setting as part of a key, by its repr if it is not hashable."""
    name, value = setting
    return name, value if isinstance(value, Hashable) else repr(value)


def _parts(value):
    """The items of a tuple, list or dictionary; None for anything else."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (tuple, list)) else None


def _same_nest(value, parts):
    """The parts in a container like `value`."""
    return dict(zip(value, parts, strict=True)) if isinstance(value, dict) else type(value)(parts)


def _arrays(value):
    """The counted arrays in nested tuples, lists and dictionaries."""
    if isinstance(value, Counted):
        yield value
    for part in _parts(value) or ():
        yield from _arrays(part)


def _pattern(value, bases):
    """`value` with a Leaf for each array; adds unknown bases to `bases`."""
    if _parts(value) is not None:
        return _same_nest(value, [_pattern(part, bases) for part in _parts(value)])
    if not isinstance(value, Counted):
        return value
    found = [i for i, base in enumerate(bases) if base is value.base]
    if not found:
        bases.append(value.base)
    return Leaf(
        found[0] if found else len(bases) - 1, value.base.shape, value.base.dtype, value.shape
    )


class Leaf:
    """An array in a pattern: the index of its base, the base's shape and type, its own shape."""

    def __init__(self, base, base_shape, dtype, shape):
        self.base, self.base_shape, self.dtype, self.shape = base, base_shape, dtype, shape


def _rebuilt(pattern, bases, meter):
    """The value of a pattern, with new arrays for new bases."""
    if _parts(pattern) is not None:
        return _same_nest(pattern, [_rebuilt(part, bases, meter) for part in _parts(pattern)])
    if not isinstance(pattern, Leaf):
        return pattern
    if pattern.base == len(bases):
        bases.append(Counted(pattern.base_shape, pattern.dtype, meter))
    base = bases[pattern.base]
    return (
        base
        if pattern.shape == base.shape
        else Counted(pattern.shape, base.dtype, meter, root=base)
    )
