"""Measures each stage on this machine: times in turns, then memory and messages one by one."""

import os
from collections import Counter
from dataclasses import dataclass
from statistics import median

from zmpi.core.engine import ZeRO
from zmpi.core.formulas import bytes_sent, elements_moved, state_bytes
from zmpi.core.stages import placement
from zmpi.cost.estimate import Setting
from zmpi.cost.probes import PeakResident, ProbedZeRO, TracedZeRO
from zmpi.cost.trace import Trace, aligned, by_verb, gathers_under_way
from zmpi.cost.turns import in_turns, quartiles_of, ratio, too_close
from zmpi.cost.watch import joined, watched
from zmpi.messages.ledger import OWNED
from zmpi.numbers.precision import Policy
from zmpi.process.errors import Agreed
from zmpi.process.launch import ranks_on_this_node
from zmpi.process.machine import free_node_memory
from zmpi.text.data import Batches

MOVED = ("all_gather", "reduce_scatter")
PROBED_STEPS = 3
BOOKED_STEPS = 2


@dataclass(frozen=True)
class Workload:
    """What every stage runs: the same model, weights and data."""

    build: callable  # build() makes the model
    policy: Policy
    optimizer: object
    seed: int
    batches: Batches
    accumulate: int
    warm_up: int  # steps that are not timed
    steps: int  # steps that are timed
    parts: type = ZeRO  # the engine, possibly with your own parts

    def engine(self, kind, world, stage):
        """A new engine of this class, with these parts, at step 0."""
        kind = joined(kind, self.parts)
        return kind(self.build(), world, stage, self.optimizer, self.seed, self.policy)

    def step(self, zero, how="train_step"):
        """One step of the engine, on its next data; returns the loss."""
        return getattr(zero, how)(self.batches.of_step(self.seed, zero.step + 1, self.accumulate))

    def setting(self, world, policy=None):
        """The planner's Setting for this workload."""
        ranks, reduction = world.size, world.reduction_for(self.policy.recipe)
        return Setting(
            lambda _: self.build(),
            ranks,
            policy or self.policy,
            self.batches.micro_batch,
            self.accumulate,
            reduction,
            optimizer=self.optimizer,
            group=world.group,
        )

    def walk(self, world, stage, policy=None):
        """(dry run of this rank's step, None), or (None, why counted arrays cannot do it)."""
        try:
            return self.setting(world, policy).walk(stage, rank=world.rank), None
        except (TypeError, AttributeError, ValueError) as error:
            return None, f"{type(error).__name__}: {error}"


def measure_stages(workload, world, stages, lanes=False):
    """({the report's keys about the turns}, [each stage's row]), for JSON. Collective.

    A stage that fails on all ranks has a row with "error". `lanes` adds the timeline of one step.
    """
    walks = {stage: workload.walk(world, stage) for stage in stages}
    errors = {
        stage: _lacking(world, walk.peak if walk else 0) for stage, (walk, _) in walks.items()
    }
    fitting = [stage for stage in stages if not errors[stage]]
    apart = _why_apart(world, [walks[stage][0] for stage in fitting])
    groups = [[stage] for stage in fitting] if apart else [fitting]
    timings = {}
    for group in filter(None, groups):
        timings |= in_turns(workload, world, group)
    rows = []
    for stage, (walk, unplanned) in walks.items():
        error = errors[stage] or timings[stage].error
        row = {"stage": placement(stage, len(world.axes)).number} | (
            {"unplanned": unplanned} if unplanned else {}
        )
        try:
            rows.append(
                row
                | (
                    {"error": error}
                    if error
                    else _row(workload, world, stage, walk, timings, lanes)
                )
            )
        except Agreed as failure:
            rows.append({"stage": placement(stage, len(world.axes)).number, "error": str(failure)})
    close = too_close([row for row in rows if "error" not in row])
    return {"one_after_the_other": apart, "too_close": everyone(world, close)[0]}, rows


def _row(workload, world, stage, walk, timings, lanes):
    """A stage's formulas and measurements, with one engine alive."""
    first = next(timing for timing in timings.values() if timing.error is None)
    row = _times(world, timings[stage], first)
    row |= _booked(workload, world, stage)
    row |= _memory(workload, world, stage, walk)
    row |= _probed(workload, world, stage)
    row |= _traced(workload, world, stage, lanes)
    policy = Policy(workload.policy.precision, workload.policy.prefetch)
    bare = workload.walk(world, stage, policy)[0]  # without recomputation
    row["counts"] = walk.counts if walk else None
    row["flops"] = bare.flops if bare else None
    row["flops_per_s"] = bare.flops / row["step_s"] if bare else None
    return row


def _why_apart(world, walks):
    """Why the stages' engines cannot be alive together, or None: they take turns."""
    if not all(walks):
        return "the dry run cannot tell whether they fit into memory together"
    state = [sum(walk.state.values()) for walk in walks]
    most = max((walk.peak - own for walk, own in zip(walks, state, strict=True)), default=0)
    lacking = _lacking(world, sum(state) + most)
    return f"all stages together: {lacking}" if lacking else None


def everyone(world, value):
    """Every rank's value, in rank order, on all ranks."""
    return world.share(value, "the bench's figures")


def available_bytes():
    """Memory available to a rank if all on its node take the same; None if unknown."""
    free = free_node_memory()
    return None if free is None else free // ranks_on_this_node(os.environ)


def _lacking(world, needed):
    """Why the stage lacks memory, or None: one rank out of memory would take down all."""
    for rank, free in enumerate(everyone(world, available_bytes())):
        if free is not None and free < needed:
            return f"needs {needed:,} bytes of arrays per rank, rank {rank} has {free:,}"
    return None


def _times(world, timing, first):
    """Times of a stage's steps in the rounds, compared with the first stage's."""
    taken = timing.taken()
    times, blocked = zip(*taken, strict=True)
    step = quartiles_of(times)
    return {
        "step_s": step["median"],
        "step_s_quartiles": step["quartiles"],
        "all_step_s": timing.step_s,
        "ratio_to_first": ratio(timing.step_s, first.step_s),
        "skipped": len(timing.step_s) - len(taken),
        "tokens_per_s": timing.tokens / step["median"],
        "blocked_s": median(blocked),
        "blocked_share": everyone(world, sum(blocked) / sum(times)),
        "loss": timing.loss,
    }


def _booked(workload, world, stage):
    """State bytes by formula and as booked, other memory, and volumes, of an unprobed engine."""
    resident = PeakResident()
    resident.reset()
    zero = workload.engine(ZeRO, world, stage)
    memory, booked = Counter(), 0
    while booked < BOOKED_STEPS and zero.step < workload.warm_up + workload.steps:
        workload.step(zero)
        booked += not zero.last.skipped
        memory |= Counter(zero.ledger["memory"])  # the maximum of each
    comm = zero.ledger["comm"]
    kinds = {kind: everyone(world, memory[kind]) for kind in (*OWNED, "full_peak", "work")}
    padded = sum(unit.layout.padded for unit in zero.units.values())
    recipe, moments = workload.policy.recipe, len(workload.optimizer.moments)
    owned = state_bytes(zero.stage, padded, zero.comm.sizes, recipe, moments)
    return {
        "bytes_sent": sum(kind["bytes_sent"] for kind in comm.values()),
        "resident_peak": everyone(world, resident.read()),
        "resident_exact": resident.exact,
        "state": {kind: {"formula": owned[kind], "measured": kinds[kind]} for kind in OWNED},
        "booked": {"full": kinds["full_peak"], "work": kinds["work"]},
        "moved": _volumes(zero, comm),
        "units": _by_unit(zero.ledger.moved),
    }


def _volumes(zero, booked):
    """{collective: elements and bytes per step, by formula (paper, section 7) and as booked}."""
    itemsize = zero.policy.recipe.gradient.itemsize
    sizes = {name: unit.layout.elements for name, unit in zero.units.items()}
    padded = {name: unit.layout.padded for name, unit in zero.units.items()}
    form = [zero.last.micro_batches, zero.comm.ordered]
    elements = elements_moved(zero.stage, zero.schedule, sizes, *form)
    along = [elements_moved(stage, zero.schedule, padded, *form) for stage in zero.stage.stages]
    sent = bytes_sent(along, zero.comm.sizes, itemsize)
    return {
        kind: {
            "calls": booked[kind]["calls"],
            "elements": {"formula": elements[kind], "measured": booked[kind]["elements"]},
            "bytes_sent": {"formula": sent[kind], "measured": booked[kind]["bytes_sent"]},
        }
        for kind in MOVED
    }


def _by_unit(moved):
    """[{"collective", "unit", and its amounts}, ...] of the last step."""
    return [
        {"collective": kind, "unit": unit, **vars(entry)} for (kind, unit), entry in moved.items()
    ]


def _memory(workload, world, stage, walk):
    """All array memory of one step, by kind, next to the planner's dry run of this rank."""
    zero = workload.engine(TracedZeRO, world, stage)
    workload.step(zero)
    workload.step(zero, "traced_step")
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
    """Bytes of arrays by kind, from the dry run."""
    return {
        "full": walk.full,
        "work": walk.work,
        "activations": walk.activations,
        "temporaries": walk.at_peak["temporaries"],
        "peak": walk.peak,
    }


def _probed(workload, world, stage):
    """Seconds per step, by rank, of waiting for the slowest rank, and of messages in flight."""
    zero = workload.engine(ProbedZeRO, world, stage)
    workload.step(zero)
    for axis in zero.comm.axes:
        axis.skew_s.clear()
        axis.in_flight_s.clear()
    for _ in range(PROBED_STEPS):
        workload.step(zero)
    skew, flight = Counter(), Counter()
    for axis in zero.comm.axes:
        for total, by_unit in ((skew, axis.skew_s), (flight, axis.in_flight_s)):
            for (kind, _), seconds in by_unit.items():
                total[kind] += seconds / PROBED_STEPS
    return {
        "skew_s": {kind: everyone(world, skew[kind]) for kind in MOVED},
        "in_flight_s": {kind: everyone(world, flight[kind]) for kind in MOVED},
    }


def _traced(workload, world, stage, lanes):
    """Seconds per step by verb and rank, and gathers in progress during products.

    "other" is Python between verbs. `lanes` adds the events of one step (None except on rank 0).
    """
    zero = workload.engine(watched(ZeRO, Trace), world, stage)
    for _ in range(1 + PROBED_STEPS):
        workload.step(zero)
    steps = [by_verb(events) for events in list(zero.ledger.steps)[-PROBED_STEPS:]]
    verbs = {verb: median(step.get(verb, 0.0) for step in steps) for verb in steps[-1]}
    last = list(zero.ledger.steps[-1])
    found = {
        "verbs_s": {verb: everyone(world, seconds) for verb, seconds in verbs.items()},
        "under_way": gathers_under_way(last),
    }
    return found | ({"lanes": aligned(world, last)} if lanes else {})
