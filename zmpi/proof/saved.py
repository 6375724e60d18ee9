"""P5, nothing lost: save and load restore every bit, also at another stage and on one rank."""

import shutil
import tempfile
from pathlib import Path

from zmpi.proof.outcome import parts
from zmpi.proof.rows import Finding, Row, both, first_index, judged, named_index, off

TAKEN = 2  # steps before the save
COMPARED = "state after a save and a load, then one more step"


def saving_loses_nothing(trial):
    """Save after two steps; load at the same stage, another, and on one rank; take another step."""
    world = trial.world
    folder = Path(world.share(tempfile.mkdtemp() if world.rank == 0 else None)[0])
    try:
        if not all(world.share(folder.is_dir())):
            why = "the ranks share no temporary folder (set TMPDIR)"
            yield Row("P5", COMPARED, f"not checked: {why}", True, checked=False)
            return
        found = []
        for precision in sorted({trial.precision, "float16"}):
            one = trial.reduced("ordered").but(precision=precision, model=[*trial.models][-1])
            found += _round_trip(one, folder / precision)
        yield judged(trial, "P5", COMPARED, found)
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _round_trip(trial, folder):
    """Findings of a loaded engine against the saved one."""
    saved = trial.make()
    for step in range(TAKEN):
        saved.train_step(trial.data(step))
    saved.save(folder)
    for one in (trial.but(stage=1), trial.alone().but(stage=0), trial):
        loaded = one.make()
        loaded.load(folder)
        size = loaded.world.size
        name = f"saved at {trial}, loaded at stage {one.word} on {size} rank{'s' * (size > 1)}"
        yield from _differences(loaded, saved, name)
    both_steps = [zero.train_step(trial.data(TAKEN)) for zero in (loaded, saved)]
    if both_steps[0] != both_steps[1] and not trial.tolerance:
        text = f"{name}, step {TAKEN + 1}: loss {both(*both_steps, 'without the load')}"
        yield Finding(abs(both_steps[0] / both_steps[1] - 1), text, (1,))
    yield from _differences(loaded, saved, f"{name}, after step {TAKEN + 1}", (2,))


def _differences(loaded, saved, name, order=(0,)):
    """Findings of counters, then of vectors, each the first."""
    for what, here, there in zip(
        _counters(loaded), _counters(loaded).values(), _counters(saved).values(), strict=True
    ):
        if here != there:
            yield Finding(1.0, f"{name}: {what}: {here} here, {there} saved", order)
    mine, its = _vectors(loaded), _vectors(saved)
    for kind, parameter in (key for key in mine if key in its):
        part = mine[kind, parameter]
        first, here, there = part.common(its[kind, parameter])
        at = first_index(here, there)
        if at is not None:
            element = named_index(parameter, part.shape, first + at)
            text = f"{name}: {kind} of {element}: {both(here[at], there[at], 'saved')}"
            yield Finding(off(here, there), text, order)


def _counters(zero):
    scaler = zero.scaler
    return {
        "step": zero.step,
        "updates": zero.updates,
        "seed": zero.seed,
        "loss scale": scaler.scale,
        "good steps": scaler.good_steps,
    }


def _vectors(zero):
    """{(kind, full name): Part} of this rank's weights and moments."""
    found = {}
    for unit in zero.units.values():
        kinds = {**unit.moments, "master": unit.master, "parameters": unit.parameters}
        for kind, owned in kinds.items():
            kept = unit.cut.slices[owned.rung]
            named = parts(unit.layout, kept, zero.world.device.get(owned.stored))
            found |= {(kind, name): part for name, part in named.items()}
    return found
