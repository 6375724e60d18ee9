"""P2, the walk: a schedule gathers, frees and reduces what the layers need, in any order."""

from zmpi.proof.rows import Finding, as_count, judged


def walks_are_whole(trial):
    """Units are gathered before use, freed after, and reduced once their gradient is complete."""
    found = []
    for model in trial.models:
        zero = trial.but(model=model).make()
        layers = zero.model.layers
        faults = {
            "schedule": [*_order(zero.schedule, layers), *_reductions(zero.schedule)],
            "evaluation": [],
        }
        faults["schedule"] += _moves(zero.schedule, layers)
        faults["evaluation"] += _moves(zero.evaluation, layers)
        for walk, texts in faults.items():
            found += [Finding(len(texts), f"{model}, {walk}: {text}") for text in texts[:1]]
    yield judged(
        trial, "P2", "gathers, frees and reductions of the schedule", found, "whole", as_count
    )


def _order(schedule, layers):
    """What is wrong with the order of the two passes, as texts."""
    order = [*range(len(layers))]
    forward = [visit.layer for visit in schedule if visit.forward]
    backward = [visit.layer for visit in schedule if visit.backward]
    if forward != order:
        yield f"the forward pass visits layers {forward}"
    if backward != order[::-1]:
        yield f"the backward pass visits layers {backward}"


def _moves(schedule, layers):
    """What is wrong with the gathers and frees, as texts."""
    held = {}  # unit -> the visit that gathered it
    for i, visit in enumerate(schedule):
        needs = visit.unit is not None and (
            visit.forward or layers[visit.layer].backward_needs_weights
        )
        if visit.gather:
            held[visit.unit] = i
        if needs and visit.unit not in held:
            yield f"visit {i} needs unit {visit.unit}, which is not gathered"
        if visit.free:
            held.pop(visit.unit, None)
    for unit, i in held.items():
        yield f"unit {unit}, gathered at visit {i}, is never freed"


def _reductions(schedule):
    """What is wrong with the reductions, as texts."""
    complete = {v.unit: i for i, v in enumerate(schedule) if v.backward and v.unit is not None}
    for unit, last in complete.items():
        visits = [i for i, v in enumerate(schedule) if v.reduce and v.unit == unit]
        if len(visits) != 1:
            yield f"unit {unit} is reduced {len(visits)} times, at visits {visits}"
        elif visits[0] < last:
            yield f"unit {unit} is reduced at visit {visits[0]}, its gradient complete at {last}"
