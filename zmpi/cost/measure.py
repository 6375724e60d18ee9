"""What one stage costs here: the same steps four times over, timed bare, then traced, then probed, then written down."""

import os
from collections import Counter
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from zmpi.core.engine import ZeRO
from zmpi.core.stages import elements_moved, state_bytes
from zmpi.cost.estimate import Setting
from zmpi.cost.probes import PeakResident, ProbedZeRO, TracedZeRO
from zmpi.cost.trace import Trace, aligned
from zmpi.cost.watch import joined, watched
from zmpi.messages.ledger import OWNED
from zmpi.numbers.precision import Policy
from zmpi.process.errors import Agreed
from zmpi.process.launch import ranks_on_this_node
from zmpi.process.machine import free_node_memory
from zmpi.text.data import Batches

MOVED = ("all_gather", "reduce_scatter")
PROBED_STEPS = 3


@dataclass(frozen=True)
class Trial:
    """What every stage runs: the same model, weights and data."""

    build: callable  # build() makes the model
    policy: Policy
    optimizer: object
    seed: int
    batches: Batches
    accumulate: int
    warm_up: int  # steps that are not timed
    steps: int  # steps that are
    parts: type = ZeRO  # the engine, with parts of one's own

    def engine(self, kind, world, stage):
        """A fresh engine of that class with these parts, at step 0."""
        kind = joined(kind, self.parts)
        return kind(self.build(), world, stage, self.optimizer, self.seed, self.policy)

    def step(self, zero, how="train_step"):
        """One step of the engine on the data of its position; returns the loss."""
        return getattr(zero, how)(self.batches.of_step(self.seed, zero.step + 1, self.accumulate))

    def setting(self, world, policy=None):
        """The same as the planner takes it."""
        ranks, reduction = world.size, world.reduction_for(self.policy.recipe)
        return Setting(
            lambda _: self.build(),
            ranks,
            policy or self.policy,
            self.batches.micro_batch,
            self.accumulate,
            reduction,
            optimizer=self.optimizer,
        )

    def walk(self, world, stage, policy=None):
        """(a dry run of this rank's step, None), or (None, why there is none: arrays that are only counted cannot do all)."""
        try:
            return self.setting(world, policy).walk(stage, rank=world.rank), None
        except (TypeError, AttributeError, ValueError) as error:
            return None, f"{type(error).__name__}: {error}"


def measure_stage(trial, world, stage, lanes=False):
    """A stage's row, as JSON writes it: what the formula says and what was measured. The same on all ranks.

    All ranks call it. What fails on all of them is a row with "error". `lanes` adds the timeline of one step.
    """
    walk, unplanned = trial.walk(world, stage)
    row = {"stage": stage} | ({"unplanned": unplanned} if unplanned else {})
    lacking = _lacking(world, walk.peak) if walk else None
    if lacking:
        return row | {"error": lacking}
    try:
        row |= _timed(trial, world, stage)
        row |= _memory(trial, world, stage, walk)
        row |= _probed(trial, world, stage)
        if lanes:
            row["lanes"] = _lanes(trial, world, stage)
    except Agreed as error:
        return {"stage": stage, "error": str(error)}
    policy = Policy(trial.policy.precision, trial.policy.prefetch)
    bare = trial.walk(world, stage, policy)[0]  # recomputation is no work of the model's
    row["flops"] = bare.flops if bare else None
    row["flops_per_s"] = bare.flops / row["step_s"] if bare else None
    return row


def everyone(world, value):
    """Every rank's value, in rank order, on all ranks."""
    return world.share(value, "the bench's figures")


def available_bytes():
    """Memory that a rank may still take, if all ranks of its node take as much; None where the system does not say."""
    free = free_node_memory()
    return None if free is None else free // ranks_on_this_node(os.environ)


def _lacking(world, needed):
    """Why the stage cannot run, or None: a rank that runs out of memory would take all others down with it."""
    for rank, free in enumerate(everyone(world, available_bytes())):
        if free is not None and free < needed:
            return f"needs {needed:,} bytes of arrays per rank, rank {rank} has {free:,}"
    return None


def _timed(trial, world, stage):
    """Times, volumes, losses and booked memory, of an engine with nothing added."""
    resident = PeakResident()
    resident.reset()
    zero = trial.engine(ZeRO, world, stage)
    times, blocked, memory = [], [], Counter()
    for step in range(trial.warm_up + trial.steps):
        began = perf_counter()
        loss = trial.step(zero)
        seconds = perf_counter() - began
        if zero.last.skipped:  # float16: it updates nothing, gathers less and takes less time
            continue
        if step >= trial.warm_up:
            times.append(seconds)
            blocked.append(sum(kind["blocked_s"] for kind in zero.ledger["comm"].values()))
        comm, units = zero.ledger["comm"], _by_unit(zero.ledger.moved)
        memory |= Counter(zero.ledger["memory"])  # the highest of each
    if not times:
        raise Agreed(
            f"all {trial.steps} timed steps were skipped: gradients overflow {trial.policy.precision};"
            " its loss scale is still being lowered, so take more steps for --warm-up"
        )
    step_s = median(times)
    return {
        "step_s": step_s,
        "all_step_s": times,
        "skipped": trial.steps - len(times),
        "tokens_per_s": zero.last.tokens / step_s,
        "blocked_s": median(blocked),
        "blocked_share": everyone(world, sum(blocked) / sum(times)),
        "bytes_sent": sum(kind["bytes_sent"] for kind in comm.values()),
        "loss": loss,
        "resident_peak": everyone(world, resident.read()),
        "resident_exact": resident.exact,
        **_booked(trial, zero, memory),
        "moved": _volumes(zero, comm),
        "units": units,
    }


def _booked(trial, zero, memory):
    """Every rank's bytes of state, by the stage's formula and as booked, and of the other kinds of memory, as booked."""
    kinds = {kind: everyone(zero.world, memory[kind]) for kind in (*OWNED, "full_peak", "work")}
    padded = sum(unit.layout.padded for unit in zero.units.values())
    recipe, moments = trial.policy.recipe, len(trial.optimizer.moments)
    owned = state_bytes(zero.stage, padded, zero.comm.shards, recipe, moments)
    return {
        "state": {kind: {"formula": owned[kind], "measured": kinds[kind]} for kind in OWNED},
        "booked": {"full": kinds["full_peak"], "work": kinds["work"]},
    }


def _volumes(zero, booked):
    """{collective: elements and bytes of a step, by the closed form (paper, section 7) and as booked by this rank}."""
    ranks, itemsize = zero.comm.shards, zero.policy.recipe.gradient.itemsize
    sizes = {name: unit.layout.elements for name, unit in zero.units.items()}
    padded = {name: unit.layout.padded for name, unit in zero.units.items()}
    form = [zero.last.micro_batches, zero.comm.ordered]
    elements = elements_moved(zero.stage, zero.schedule, sizes, *form)
    flat = elements_moved(zero.stage, zero.schedule, padded, *form)
    found = {}
    for kind in MOVED:
        found[kind] = {
            "calls": booked[kind]["calls"],
            "elements": {"formula": elements[kind], "measured": booked[kind]["elements"]},
            "bytes_sent": {
                "formula": flat[kind] * (ranks - 1) // ranks * itemsize,
                "measured": booked[kind]["bytes_sent"],
            },
        }
    return found


def _by_unit(moved):
    """[{"collective", "unit", and its amounts}, ...] of the last step."""
    return [
        {"collective": kind, "unit": unit, **vars(entry)} for (kind, unit), entry in moved.items()
    ]


def _memory(trial, world, stage, walk):
    """All array memory of one step, by kind, beside the planner's dry run of this rank."""
    zero = trial.engine(TracedZeRO, world, stage)
    trial.step(zero)
    trial.step(zero, "traced_step")
    ledger, highest = zero.ledger, zero.ledger.highest()
    memory = ledger["memory"]
    measured = {
        "full": memory["full_peak"],
        "work": memory["work"],
        "activations": ledger.highest_activations(),
        "temporaries": highest.temporaries,
        "peak": highest.total,
    }
    planned = _planned(walk) if walk else dict.fromkeys(measured)
    both = {
        kind: {"planned": everyone(world, planned[kind]), "measured": everyone(world, nbytes)}
        for kind, nbytes in measured.items()
    }
    if not walk:
        both = {kind: {**figures, "planned": None} for kind, figures in both.items()}
    return {
        "arrays": both,
        "peak_at": f"{highest.verb} {highest.name}",
        "moments": [{"verb": m.verb, "name": m.name, **m.by_kind()} for m in ledger.moments],
    }


def _planned(walk):
    """Bytes of arrays by kind, as the dry run counted them."""
    return {
        "full": walk.full,
        "work": walk.work,
        "activations": walk.activations,
        "temporaries": walk.at_peak["temporaries"],
        "peak": walk.peak,
    }


def _probed(trial, world, stage):
    """Seconds of a step, this rank's, that went into waiting for the slowest rank and into messages."""
    zero = trial.engine(ProbedZeRO, world, stage)
    trial.step(zero)
    zero.comm.skew_s.clear()
    zero.comm.in_flight_s.clear()
    for _ in range(PROBED_STEPS):
        trial.step(zero)
    skew, flight = Counter(), Counter()
    for total, by_unit in ((skew, zero.comm.skew_s), (flight, zero.comm.in_flight_s)):
        for (kind, _), seconds in by_unit.items():
            total[kind] += seconds / PROBED_STEPS
    return {
        "skew_s": {kind: everyone(world, skew[kind]) for kind in MOVED},
        "in_flight_s": {kind: everyone(world, flight[kind]) for kind in MOVED},
    }


def _lanes(trial, world, stage):
    """The events of one step of every rank (trace.py); None on ranks other than 0."""
    zero = trial.engine(watched(ZeRO, Trace), world, stage)
    trial.step(zero)
    trial.step(zero)
    return aligned(world, list(zero.ledger.steps[-1]))
