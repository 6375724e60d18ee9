"""P2, exact accounting: the elements and bytes moved, and the bytes owned."""

from zmpi.core.formulas import elements_moved, state_bytes
from zmpi.messages.ledger import Moved
from zmpi.proof.rows import Finding, as_count, judged

MOVING = ("all_gather", "reduce_scatter")


def volumes_are_exact(trial):
    """Each collective's elements and bytes equal the formula, with one and three micro-batches."""
    for reduction in trial.reductions:
        found = []
        for model in trial.models:
            for stage in trial.stages:
                for accumulate in (1, 3):
                    one = trial.reduced(reduction).but(model=model, stage=stage)
                    found += _moved(one.but(accumulate=accumulate))
        yield judged(
            trial,
            "P2",
            f"elements and bytes moved with the formula, {reduction}",
            found,
            "equal",
            as_count,
        )
    found = []
    for precision in ("float32", "float16", "bfloat16", "float64"):
        for stage in (trial.stages[0], trial.stages[-1]):
            found += _moved(trial.but(precision=precision, stage=stage, model=[*trial.models][-1]))
    yield judged(
        trial, "P2", "bytes moved in float32, float16, bfloat16, float64", found, "equal", as_count
    )


def _moved(trial):
    """Findings of one step: each unit's elements and bytes, and the padding of all ranks."""
    zero = trial.make()
    zero.train_step(trial.data(0))
    booked, name = dict(zero.ledger.moved), trial.reduced(zero.comm.reduction)
    payload = dict.fromkeys(MOVING, 0)
    for unit in zero.units.values():
        for kind, expected in _formula(zero, unit, trial.accumulate).items():
            entry = booked.get((kind, unit.layout.name), Moved())
            payload[kind] += entry.bytes_sent - entry.padding_bytes
            booked_here = entry.elements, entry.elements_between, entry.bytes_sent
            names = "elements", "elements between groups", "bytes"
            pairs = zip(names, booked_here, expected, strict=True)
            for what, here, there in pairs:
                if here != there:
                    pair = f"{here:,} {what} here, {there:,} by the formula"
                    text = f"{name}, step 1, {kind} of {unit.layout.name}: {pair}"
                    yield Finding(abs(here - there), text)
    if not zero.comm.declared_bytes:
        yield from _padding(zero, payload, name)
    yield from _evaluated(zero, trial.data(0), booked, name)


def _padding(zero, payload, name):
    """Findings of bytes without padding, over all ranks. Collective."""
    totals = zero.comm.gather_scalars([*payload.values()]).sum(axis=0)
    itemsize = zero.policy.recipe.parameter.itemsize
    ranks, groups = zero.comm.size, zero.comm.size // zero.comm.sizes[0]
    for total, kind in zip(totals, MOVING, strict=True):
        entries = [entry for (of, _), entry in zero.ledger.moved.items() if of == kind]
        within = sum(entry.elements for entry in entries) * (ranks - groups)
        between = sum(entry.elements_between for entry in entries) * (groups - 1)
        expected = (within + between) * itemsize
        if total != expected:
            pair = f"{total:,.0f} bytes without padding here, {expected:,} by the formula"
            yield Finding(abs(total - expected), f"{name}, step 1, {kind} of all ranks: {pair}")


def _evaluated(zero, data, booked, name):
    """Findings of an evaluation that is booked as the step's."""
    before = {key: (entry.elements, entry.bytes_sent) for key, entry in booked.items()}
    zero.evaluate(data)
    for key, entry in zero.ledger.moved.items():
        here, there = entry.elements, before.get(key, (0, 0))[0]
        if key[0] in MOVING and here != there:
            pair = f"{here:,} elements after it, {there:,} before"
            yield Finding(abs(here - there), f"{name}, evaluation, {' of '.join(key)}: {pair}")


def _formula(zero, unit, micro_batches):
    """{collective: (elements, those between groups, bytes sent, with padding)} of a unit per step.

    A communicator may declare one call's bytes: `declared_bytes(kind, layout, itemsize, whole)`,
    where `whole`: the stage keeps the gathered vector whole.
    """
    layout, comm = unit.layout, zero.comm
    itemsize = zero.policy.recipe.parameter.itemsize
    found = {kind: [0, 0, 0] for kind in MOVING}
    for number, (axis, stage) in enumerate(zip(comm.axes, zero.stage.stages, strict=True)):
        stretch = unit.cut.stretches[number]
        calls = elements_moved(stage, zero.schedule, {layout.name: 1}, micro_batches, comm.ordered)
        for kind in MOVING:
            whole = kind == "all_gather" and not stage.parameters
            plain = (axis.shards - 1) * stretch.shard_length * itemsize
            declared = axis.declared_bytes
            one = declared(kind, stretch, itemsize, whole) if declared else plain
            found[kind][number] += calls[kind] * layout.elements
            found[kind][2] += calls[kind] * one
    return {kind: tuple(figures) for kind, figures in found.items()}


def state_is_exact(trial):
    """The bytes of a rank's owned arrays equal the stage's formula over the padded sizes."""
    found = []
    for model in trial.models:
        for stage in trial.stages:
            one = trial.but(model=model, stage=stage)
            zero = one.make()
            moments, recipe = len(zero.optimizer.moments), zero.policy.recipe
            for unit in zero.units.values():
                padded = unit.layout.padded
                formula = state_bytes(zero.stage, padded, zero.comm.sizes, recipe, moments)
                for kind, owned in unit.owned_bytes().items():
                    if owned != formula[kind]:
                        pair = f"{owned:,} bytes here, {formula[kind]:,} by the formula"
                        text = f"{one}: {kind} of {unit.layout.name}: {pair}"
                        found.append(Finding(abs(owned - formula[kind]), text))
    yield judged(
        trial,
        "P2",
        f"owned bytes with the stage's formula, {trial.all_stages}",
        found,
        "equal",
        as_count,
    )
