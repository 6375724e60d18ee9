"""P2, exact accounting: the elements and bytes moved, and the bytes owned."""

from zmpi.core.stages import STAGES, elements_moved, state_bytes
from zmpi.messages.ledger import Moved
from zmpi.proof.rows import Finding, as_count, judged

MOVING = ("all_gather", "reduce_scatter")


def volumes_are_exact(trial):
    """Each collective's elements and bytes equal the formula, with one and three micro-batches."""
    for reduction in trial.reductions:
        found = []
        for model in trial.models:
            for stage in STAGES:
                for accumulate in (1, 3):
                    one = trial.reduced(reduction).but(model=model, stage=stage.number)
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
        for stage in (STAGES[0], STAGES[-1]):
            found += _moved(
                trial.but(precision=precision, stage=stage.number, model=[*trial.models][-1])
            )
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
            pairs = zip(
                ("elements", "bytes"), (entry.elements, entry.bytes_sent), expected, strict=True
            )
            for what, here, there in pairs:
                if here != there:
                    pair = f"{here:,} {what} here, {there:,} by the formula"
                    text = f"{name}, step 1, {kind} of {unit.layout.name}: {pair}"
                    yield Finding(abs(here - there), text)
    if not zero.comm.declared_bytes:
        yield from _padding(zero, payload, name)
    yield from _evaluated(zero, trial.data(0), booked, name)


def _padding(zero, payload, name):
    """Findings of the bytes without padding, over all ranks. Collective."""
    totals = zero.comm.gather_scalars([*payload.values()]).sum(axis=0)
    itemsize = zero.policy.recipe.parameter.itemsize
    for total, kind in zip(totals, MOVING, strict=True):
        moved = sum(entry.elements for (of, _), entry in zero.ledger.moved.items() if of == kind)
        expected = (zero.comm.shards - 1) * moved * itemsize
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
    """{collective: (elements, bytes sent by this rank, with padding)} of one unit per step.

    A communicator may declare one call's bytes: `declared_bytes(kind, layout, itemsize, whole)`,
    where `whole`: the stage keeps the gathered vector whole.
    """
    layout, comm = unit.layout, zero.comm
    calls = elements_moved(zero.stage, zero.schedule, {layout.name: 1}, micro_batches, comm.ordered)
    itemsize = zero.policy.recipe.parameter.itemsize
    declared = comm.declared_bytes
    found = {}
    for kind in MOVING:
        whole = kind == "all_gather" and not zero.stage.parameters
        plain = (comm.shards - 1) * layout.shard_length * itemsize
        one = declared(kind, layout, itemsize, whole) if declared else plain
        found[kind] = calls[kind] * layout.elements, calls[kind] * one
    return found


def state_is_exact(trial):
    """The bytes of a rank's owned arrays equal the stage's formula over the padded sizes."""
    found = []
    for model in trial.models:
        for stage in STAGES:
            one = trial.but(model=model, stage=stage.number)
            zero = one.make()
            moments, recipe = len(zero.optimizer.moments), zero.policy.recipe
            for unit in zero.units.values():
                padded = unit.layout.padded
                formula = state_bytes(stage, padded, zero.comm.shards, recipe, moments)
                for kind, owned in unit.owned_bytes().items():
                    if owned != formula[kind]:
                        pair = f"{owned:,} bytes here, {formula[kind]:,} by the formula"
                        text = f"{one}: {kind} of {unit.layout.name}: {pair}"
                        found.append(Finding(abs(owned - formula[kind]), text))
    yield judged(
        trial, "P2", "owned bytes with the stage's formula, stages 0-3", found, "equal", as_count
    )
