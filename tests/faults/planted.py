"""Mistakes that a change can make, planted one at a time: zmpi.verify must find each, in a row that
says where.

By hand (some minutes): python tests/faults/planted.py [NAME ...]
Each with the one check that must find it: mpirun -n 3 python tests/faults/planted.py --all
For each it runs zmpi.verify on 3 ranks with that mistake in the code, and prints the first red row.
A quick part of the table runs in tests/world/test_verify.py.
"""

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from inspect import getattr_static
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from mpirun import run_world  # before zmpi, which sets this process's threads

import zmpi.core.engine
import zmpi.core.unit
import zmpi.messages.comm
import zmpi.messages.world
import zmpi.numbers.optim
import zmpi.verify
from models.layer import Recomputed
from zmpi.core.engine import ZeRO
from zmpi.core.gradient import ReducedEach, ReducedOnce
from zmpi.core.layout import Layout
from zmpi.core.owned import Shared
from zmpi.core.schedule import Schedule, training_schedule
from zmpi.core.unit import Unit
from zmpi.messages.comm import Communicator, Gather
from zmpi.messages.ledger import Ledger
from zmpi.numbers.optim import SGD, AdamW, Slice
from zmpi.proof.trial import Trial
from zmpi.text.data import Batches


@dataclass(frozen=True)
class Mistake:
    """One mistake: what is replaced, and the check that must find it."""

    found_by: str  # a function of zmpi.verify's CHECKS
    patches: list  # [(object, attribute, what takes its place), ...]

    def planted(self):
        """A context in which the code has the mistake."""
        stack = ExitStack()
        for thing, name, mistake in self.patches:
            stack.enter_context(patch.object(thing, name, mistake))
        return stack


PLANTED = {}


def mistake(name, found_by, *places):
    """Enter what is decorated, a function (real, ...) -> result, as a mistake in each of the
    (object, attribute).
    """

    def enter(wrong):
        patches = []
        for thing, attribute in places:
            replaced = _around(getattr(thing, attribute), wrong)
            static = isinstance(getattr_static(thing, attribute), staticmethod)
            patches.append((thing, attribute, staticmethod(replaced) if static else replaced))
        PLANTED[name] = Mistake(found_by, patches)
        return wrong

    return enter


def _around(real, wrong):
    def replaced(*arguments, **named):
        return wrong(real, *arguments, **named)

    return replaced


# -- messages --------------------------------------------------------------------------------------


@mistake("the last chunk is left out", "messages_arrive", (zmpi.messages.comm, "chunks"))
def _(real, length, limit):
    cuts = real(length, limit)
    return cuts[:-1] or cuts


@mistake("a vector is used before its request is complete", "messages_arrive", (Gather, "wait"))
def _(real, gather):
    gather._comm.in_flight -= 1


@mistake("the owner's own share is not added", "messages_arrive", (Communicator, "_exchange"))
def _(real, comm, *chunk):
    rows = real(comm, *chunk)
    if len(rows) > 1:
        rows[comm.rank] = 0
    return rows


@mistake("ranks are added from the last to the first", "order_is_kept", (Communicator, "_exchange"))
def _(real, *chunk):
    return real(*chunk)[::-1]


@mistake("micro-batches overwrite each other", "messages_arrive", (Communicator, "reduce_scatter"))
def _(real, comm, layout, full, out, fresh):
    return real(comm, layout, full, out, True)


@mistake(
    "16-bit sums of micro-batches",
    "narrow_types_follow",
    (Communicator, "reduce_scatter"),
)
def _(real, comm, layout, full, out, fresh):
    real(comm, layout, full, out, fresh)
    if full.itemsize == 2:
        out[...] = out.astype(full.dtype)


@mistake("weights of the step before, with prefetch", "schedule_changes_nothing", (ZeRO, "gather"))
def _(real, zero, visit):
    unit = zero.units[visit.unit]
    weights = real(zero, visit)
    if zero.policy.prefetch and visit.forward and weights and zero.stage.parameters:
        before, unit.before = getattr(unit, "before", unit.full.copy()), unit.full.copy()
        unit.full[...] = before
    return weights


# -- accounts --------------------------------------------------------------------------------------


@mistake("bytes of float32 in every precision", "volumes_are_exact", (Communicator, "_book"))
def _(real, comm, kind, layout, calls, itemsize):
    real(comm, kind, layout, calls, 4)


@mistake("one element too many", "volumes_are_exact", (Communicator, "all_gather"))
def _(real, comm, layout, shard, full):
    comm.ledger.book("all_gather", layout.name, elements=1)
    return real(comm, layout, shard, full)


@mistake("padding is booked as payload", "volumes_are_exact", (Ledger, "book"))
def _(real, ledger, kind, unit, **amounts):
    real(ledger, kind, unit, **{k: v for k, v in amounts.items() if k != "padding_bytes"})


@mistake("an evaluation is booked as training", "volumes_are_exact", (Ledger, "as_other"))
def _(real, ledger):
    return ExitStack()


@mistake("moments in float64", "state_is_exact", (Shared, "own"))
def _(real, shared, kind, layout, sharded, dtype):
    return real(shared, kind, layout, sharded, np.float64 if kind == "optimizer" else dtype)


# -- the step --------------------------------------------------------------------------------------


@mistake("no division by the counted targets", "order_is_kept", (ZeRO, "_open"))
def _(real, zero, micro_batches, training=True):
    return real(zero, micro_batches, training) and 1


@mistake("each rank divides by its own targets", "order_is_kept", (ZeRO, "_open"))
def _(real, zero, micro_batches, training=True):
    real(zero, micro_batches, training)
    return max(1, sum(int((targets >= 0).sum()) for _, targets in micro_batches))


@mistake("an evaluation divides by its own targets", "evaluation_agrees", (ZeRO, "_open"))
def _(real, zero, micro_batches, training=True):
    counted = real(zero, micro_batches, training)
    own = sum(int((targets >= 0).sum()) for _, targets in micro_batches)
    return counted if training else max(1, own)


@mistake("a loss that differs between ranks", "order_is_kept", (ZeRO, "_agree"))
def _(real, zero, losses, counted):
    step = real(zero, losses, counted)
    return replace(step, loss=step.loss * (1 + 1e-9 * zero.world.rank))


@mistake(
    "the norm of the unreduced gradient", "updates_are_right", (Unit, "reduce"), (Unit, "squares")
)
def _(real, unit):
    if real.__name__ == "squares":
        return unit.own
    unit.own = zmpi.core.unit.sums_of_squares(unit.gradient.partial[unit.part], unit.layout.pieces)
    return real(unit)


@mistake("the norm is summed in float32", "order_is_kept", (Unit, "squares"))
def _(real, unit):
    pieces = np.split(unit.summed, unit.layout.pieces)
    return np.array([np.sum(piece**2, dtype=piece.dtype) for piece in pieces], np.float64)


@mistake("the norm is left scaled in float16", "updates_are_right", (ZeRO, "_agree"))
def _(real, zero, losses, counted):
    with patch.object(zmpi.core.engine, "sqrt", lambda square: sqrt(square) * zero.scaler.scale):
        return real(zero, losses, counted)


@mistake("float16 gradients are not unscaled", "updates_are_right", (ZeRO, "train_step"))
def _(real, zero, micro_batches):
    scale, update = zero.scaler.scale, Unit.update

    def scaled(unit, optimizer, t, factor):
        update(unit, optimizer, t, factor * scale)

    with patch.object(Unit, "update", scaled):
        return real(zero, micro_batches)


@mistake("a skipped step counts as an update", "updates_are_right", (ZeRO, "train_step"))
def _(real, zero, micro_batches):
    loss = real(zero, micro_batches)
    zero.updates += zero.last.skipped
    return loss


@mistake("clipping by each unit's own norm", "updates_are_right", (Unit, "update"))
def _(real, unit, optimizer, t, factor):
    norm = sqrt(sum(unit.squares()))
    real(unit, optimizer, t, optimizer.clip_factor(norm))


@mistake("the last rank starts from other weights", "stages_agree", (ZeRO, "_initialise"))
def _(real, zero):
    zero.seed += zero.world.size > 1 and zero.world.rank == zero.world.size - 1
    real(zero)


# -- units -----------------------------------------------------------------------------------------


@mistake("the shard's offset from the unpadded size", "stages_agree", (Layout, "shard"))
def _(real, layout, owner):
    start = owner * (layout.elements // layout.shards)
    return slice(start, start + layout.shard_length)


MAKE_PARTIAL = (ReducedEach, "_make_partial"), (ReducedOnce, "_make_partial")


@mistake("an owned partial gradient is not zeroed", "order_is_kept", *MAKE_PARTIAL)
def _(real, gradient):
    owned, dtype = gradient.owned, gradient.shared.recipe.partial
    return real(gradient) if owned.rung or owned.stored.dtype != dtype else owned.stored


@mistake("padding of the gradient is not zero", "order_is_kept", (Unit, "partial"))
def _(real, unit):
    views = real(unit)
    unit.gradient.partial[unit.layout.elements :] = 0.01
    return views


@mistake("stage 2 does not gather after its update", "stages_agree", (Unit, "_complete"))
def _(real, unit):
    stage = unit.shared.placement
    if not (stage.gradients and not stage.parameters):
        real(unit)


@mistake("the tied unit is reduced twice", "walks_are_whole", (ZeRO, "make_schedule"))
def _(real, layers, units):
    walk = training_schedule(layers, units)
    return Schedule(replace(v, reduce=v.reduce or (v.turn and v.unit == "outer")) for v in walk)


@mistake("recomputed from the output", "schedule_changes_nothing", (Recomputed, "forward"))
def _(real, layer, w, x):
    y, _ = real(layer, w, x)
    return y, y


ALONE = "one rank raises alone"


@mistake(ALONE, "walks_are_whole", (ZeRO, "make_schedule"))
def _(real, layers, units):
    if zmpi.messages.world.MPI.COMM_WORLD.rank == 1:
        raise TypeError("this mistake was planted")
    return training_schedule(layers, units)


# -- memory ----------------------------------------------------------------------------------------


@mistake("weights are freed one visit late", "nothing_is_kept", (Unit, "free"))
def _(real, unit, late=[]):  # noqa: B006  (it remembers the unit before)
    for before in late:
        real(before)
    late[:] = [unit]


@mistake("a full vector is kept after the step", "nothing_is_kept", (ZeRO, "train_step"))
def _(real, zero, micro_batches):
    loss = real(zero, micro_batches)
    unit = next(iter(zero.units.values()))
    unit.gather()
    unit.weights()
    return loss


@mistake("every vector that is freed is kept by a view", "nothing_is_kept", (Unit, "free"))
def _(real, unit):
    unit.kept = unit.full
    real(unit)


@mistake("all units are gathered at once", "nothing_is_kept", (ZeRO, "gather"))
def _(real, zero, visit):
    if visit.layer == 0:
        for unit in zero.units.values():
            unit.gather()
    return real(zero, visit)


@mistake("partial gradients are kept", "nothing_is_kept", (Unit, "reduce"))
def _(real, unit):
    unit.kept = unit.gradient.partial
    real(unit)


class Keeping:
    """A layer that remembers what it was given in its backwards."""

    def __init__(self, layer):
        self._layer, self._kept = layer, []

    def __getattr__(self, name):
        return getattr(self._layer, name)

    def backward(self, w, dw, saved, dy):
        self._kept += [saved, dy]
        return self._layer.backward(w, dw, saved, dy)


@mistake("activations are kept", "nothing_is_kept", (ZeRO, "make_layer"))
def _(real, zero, layer):
    return Keeping(real(zero, layer))


# -- optimizers ------------------------------------------------------------------------------------


@mistake("weight decay on biases", "updates_are_right", (Slice, "blocks"))
def _(real, owned):
    return ((start, stop, True) for start, stop, _ in real(owned))


@mistake("Adam's bias correction with t + 1", "updates_are_right", (AdamW, "update"))
def _(real, adam, owned, t, factor):
    late = SimpleNamespace(**vars(adam), rate=lambda _: adam.rate(t))
    real(late, owned, t + 1, factor)


@mistake("Adam's eps inside the root", "updates_are_right", (zmpi.numbers.optim, "adamw"))
def _(real, master, owned, by):
    real(master, owned, SimpleNamespace(**{**vars(by), "eps": by.eps**0.5}))


@mistake("weight decay in the gradient", "updates_are_right", (AdamW, "update"))
def _(real, adam, owned, t, factor):
    for start, stop, decays in owned.decayed:
        if decays:
            weights = owned.master[start:stop] * adam.weight_decay / factor
            owned.gradient[start:stop] += weights.astype(owned.gradient.dtype)
    real(replace(adam, weight_decay=0.0), owned, t, factor)


@mistake("momentum that averages", "updates_are_right", (SGD, "update"))
def _(real, sgd, owned, t, factor):
    real(sgd, owned, t, factor * (1 - sgd.momentum))


@mistake("a warm-up off by one", "updates_are_right", (AdamW, "rate"), (SGD, "rate"))
def _(real, optimizer, t):
    return real(optimizer, t - 1) if t <= optimizer.warmup else real(optimizer, t)


@mistake("a cosine that ends at 0", "updates_are_right", (AdamW, "rate"), (SGD, "rate"))
def _(real, optimizer, t):
    rate = real(optimizer, t)
    if optimizer.schedule == "constant" or t < optimizer.warmup:
        return rate
    return (rate - optimizer.lr / 10) / 0.9


CLIPS = (AdamW, "clip_factor"), (SGD, "clip_factor")


@mistake("clipping that scales up", "updates_are_right", *CLIPS)
def _(real, optimizer, norm):
    return optimizer.clip / norm if optimizer.clip else 1.0


@mistake("clipping with an eps beside the norm", "updates_are_right", *CLIPS)
def _(real, optimizer, norm):
    return min(1.0, optimizer.clip / (norm + 1e-6)) if optimizer.clip else 1.0


# -- data and checkpoints --------------------------------------------------------------------------


@mistake("every rank gets rank 0's data", "data_is_shared_out", (Batches, "on"))
def _(real, world, text, micro_batch, last_only):
    return Batches(text, 0, world.size, micro_batch, last_only)


@mistake("every step gets the same data", "data_is_shared_out", (Batches, "of_step"))
def _(real, batches, seed, step, accumulate):
    return real(batches, seed, 1, accumulate)


@mistake("filled-up windows of an evaluation count", "data_is_shared_out", (Batches, "held_out"))
def _(real, batches):
    return [(inputs, np.abs(targets)) for inputs, targets in real(batches)]


@mistake("the moments are swapped by a load", "saving_loses_nothing", (Unit, "restore"))
def _(real, unit):
    first, second = (unit.shards()[name] for name in ("m", "v"))
    first[...], second[...] = second.copy(), first.copy()
    real(unit)


@mistake("Adam's count is not loaded", "saving_loses_nothing", (ZeRO, "load"))
def _(real, zero, folder):
    manifest = real(zero, folder)
    zero.updates = 0
    return manifest


@mistake("the loss scale is not loaded", "saving_loses_nothing", (ZeRO, "load"))
def _(real, zero, folder):
    scaler = zero.scaler.scale, zero.scaler.good_steps
    manifest = real(zero, folder)
    zero.scaler.scale, zero.scaler.good_steps = scaler
    return manifest


@mistake("masters are loaded in 16 bits", "saving_loses_nothing", (Unit, "restore"))
def _(real, unit):
    master = unit.shards()["master"]
    master[...] = master.astype(ml_dtypes.bfloat16)
    real(unit)


# -- the campaign ----------------------------------------------------------------------------------


def main(names):
    """Run zmpi.verify on 3 ranks with each of the mistakes, and print what it says."""
    missed = []
    for number, name in enumerate(names or PLANTED, 1):
        world = run_world(3, [__file__, "--planted", name], timeout=200)
        lines = world.output.splitlines()
        red = [i for i, line in enumerate(lines) if line.endswith("FAIL")]
        alone = [line for line in lines if line.startswith("zmpi: rank ")]
        last = lines[red[0] : red[0] + 2] if red else alone or lines[-2:]
        print(f"{number:2}. {name}: {len(red)} red", *last, sep="\n      ", flush=True)
        found = (
            (red or alone)
            and world.status == 1
            and not {"Traceback", "Warning"} & {*world.output.split()}
        )
        missed += [] if found else [name]
    print(f"missed: {', '.join(missed)}" if missed else "all were found")
    return 1 if missed else 0


def together():
    """Plant each mistake in turn in this world, and print the first red row of its check."""
    world, missed = zmpi.World(device="cpu"), []
    for number, (name, planted) in enumerate(PLANTED.items(), 1):
        if name == ALONE:
            continue  # it ends the world
        with planted.planted():
            check = getattr(zmpi.verify, planted.found_by)
            rows = [row for row in zmpi.verify.promises(Trial(world), (check,)) if not row.passed]
        missed += [] if rows else [name]
        for row in rows[:1] if world.rank == 0 else ():
            print(f"{number:2}. {name}\n    {row.promise:4}  {row.compared}: {row.figure}")
            print(f"          {row.where}", flush=True)
    if world.rank == 0:
        print(f"missed: {', '.join(missed)}" if missed else "all were found")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    if sys.argv[1:] == ["--all"]:
        together()
    elif sys.argv[1:2] == ["--planted"]:
        with PLANTED[sys.argv[2]].planted():
            zmpi.verify.main(sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:]))
