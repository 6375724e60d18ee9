"""An engine's sharded gradient, against finite differences and the plain loop's gradient."""

import numpy as np

from zmpi.numbers.sums import add_up
from zmpi.proof.outcome import parts
from zmpi.proof.plain import Plain
from zmpi.proof.rows import Finding, both, first_index, largest, named_index, off

MOVE = 3e-6  # step of the weights, along a direction of standard normal numbers


def exact_slope(zero, data):
    """(slope by the gradient, slope by finite differences) along a random direction. Collective.

    For an engine after one step, with an optimizer that did not change the weights.
    """
    units = [*zero.units.values()]
    draws = [
        np.random.default_rng(i).standard_normal(unit.layout.padded) for i, unit in enumerate(units)
    ]
    directions = [zero.world.device.put(draw) for draw in draws]
    shares = [
        float(unit.summed @ along[unit.part]) for unit, along in zip(units, directions, strict=True)
    ]
    slope = add_up(zero.comm.gather_scalars([add_up(shares)]).ravel())
    losses = []
    for move in (MOVE, -2 * MOVE):
        for unit, along in zip(units, directions, strict=True):
            mine = along[unit.cut.slices[unit.parameters.rung]]
            unit.parameters.stored[...] += move * mine
        losses.append(zero.evaluate(data))
    return slope, (losses[0] - losses[1]) / (2 * MOVE)


def plain_gradient(trial, zero):
    """{full name: Part} of the plain loop's gradient at the gathered weights. Collective."""
    alone = trial.alone()
    plain = Plain.of(alone)
    with zero.gathered() as parameters:
        weights = plain.without | {
            unit: {
                name: np.array(zero.world.device.get(parameters[layout.prefix + name]))
                for name in layout.shapes
            }
            for unit, layout in plain.layouts.items()
        }
    return plain.named(plain.gradient(weights, alone.data(0))[0])


def gradient_at_gathered_weights(trial, zero, bound):
    """The Finding of this rank's gradient shards against `plain_gradient`, by array."""
    expected = plain_gradient(trial, zero)
    size = 0.0
    for unit in zero.units.values():
        for name, part in parts(unit.layout, unit.part, zero.world.device.get(unit.summed)).items():
            first, here, there = part.common(expected[name])
            scale = largest(expected[name].values)
            size = (
                max(size, off(here, there))
                if not scale
                else max(size, largest(here - there) / scale)
            )
            at = first_index(here, there, bound * scale)
            if at is not None:
                element = named_index(name, part.shape, first + at)
                numbers = both(here[at], there[at], "by the plain loop")
                return Finding(size, f"{trial}, step 1: gradient of {element}: {numbers}")
    return Finding(size)
