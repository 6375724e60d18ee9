"""The sharded gradient of the global loss against finite differences in float64; who is summed."""

import numpy as np
import pytest
from training import STAGES, adamw, copied, gpt, mlp, sgd, share, world_of

from zmpi import Policy, ZeRO

SIZES = (1, 3, 4)

stages = pytest.mark.parametrize("stage", STAGES)
models = pytest.mark.parametrize("model", [gpt, mlp])
reductions = pytest.mark.parametrize("reduction", ["mpi", "ordered"])


def move(zero, directions, step):
    """Add step x direction onto the parameters that each rank owns."""
    for unit in zero.units.values():
        vector = np.zeros(unit.layout.padded)
        for name, view in unit.layout.views(vector).items():
            view[...] = directions[unit.layout.prefix + name]
        vector = vector[unit.cut.slices[unit.parameters.rung]]
        unit.parameters.stored[...] += step * vector


def directions_for(parameters, only=""):
    """A random direction; along parameters whose name begins with `only`."""
    rng = np.random.default_rng(3)
    drawn = {name: rng.standard_normal(array.shape) for name, array in parameters.items()}
    return {name: array * name.startswith(only) for name, array in drawn.items()}


def slope(zero, batches, directions, h=1e-3):
    """The global loss along a direction, by five points: error h^4, and 1e-16 / h of rounding."""
    losses = {}
    for k in (-2, -1, 1, 2):
        move(zero, directions, k * h)
        losses[k] = zero.evaluate(batches)
        move(zero, directions, -k * h)
    return (8 * (losses[1] - losses[-1]) - (losses[2] - losses[-2])) / (12 * h)


def spread(zero):
    """Weights far from their initial values, so that no gradient is tiny."""
    move(zero, directions_for(copied(zero)), 0.2)


def gradient(zero, batches):
    """{name: gradient}: what a step of SGD with a learning rate of 1 takes away."""
    before = copied(zero)
    zero.train_step(batches)
    after = copied(zero)
    return {name: before[name] - after[name] for name in before}


def float64(model, world, stage):
    return ZeRO(
        model,
        world,
        stage,
        sgd(lr=1.0, momentum=0.0, clip=0.0, weight_decay=0.0),
        policy=Policy("float64"),
    )


@stages
@models
@reductions
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_gradient_is_that_of_the_global_loss(comm, model, stage, reduction, accumulate):
    zero = float64(model(), world_of(reduction), stage)
    spread(zero)
    batches = share(
        zero.model, 1, zero.world, accumulate
    )  # with about a third of the targets not counted
    directions = directions_for(copied(zero))
    expected = slope(zero, batches, directions)
    found = gradient(zero, batches)
    # five points at h = 1e-3 are wrong by 1e-11 or so; the direction's terms cancel to a few per
    # cent of their size
    assert sum(np.sum(found[name] * directions[name]) for name in found) == pytest.approx(
        expected, rel=1e-6
    )


@stages
@pytest.mark.parametrize("name", ["wte", "wpe", "ln_f", "h.0.ln_1.bias", "h.1.mlp.c_proj.weight"])
def test_the_gradient_of_each_kind_of_parameter_is_right(comm, stage, name):
    """The tied weight's holds the embedding's part and the head's, each once."""
    zero = float64(gpt(), world_of("ordered"), stage)
    spread(zero)
    batches = share(zero.model, 1, zero.world, 2)
    directions = directions_for(copied(zero), only=name)
    expected = slope(zero, batches, directions)
    found = gradient(zero, batches)
    assert sum(np.sum(found[k] * directions[k]) for k in found) == pytest.approx(
        expected, rel=1e-6
    )  # as above


@stages
def test_the_gradients_length_is_the_norm(comm, stage):
    for reduction in ("mpi", "ordered"):
        zero = float64(gpt(), world_of(reduction), stage)
        spread(zero)
        found = gradient(zero, share(zero.model, 1, zero.world, 2))
        length = sum(np.sum(array**2) for array in found.values()) ** 0.5
        assert zero.last.grad_norm == pytest.approx(
            length, rel=1e-12
        )  # float64; a difference of weights loses digits


@stages
def test_tied_weights_are_reduced_once(comm, stage):
    calls = []

    class Counting(ZeRO):
        @staticmethod
        def make_communicator(world, ledger, reduction):
            comm = ZeRO.make_communicator(world, ledger, reduction)
            reduce_scatter = comm.reduce_scatter

            def counted(layout, *arguments):
                calls.append(layout.name)
                return reduce_scatter(layout, *arguments)

            comm.reduce_scatter = counted
            return comm

    zero = Counting(gpt(), world_of("ordered"), stage, adamw())
    zero.train_step(share(zero.model, 1, zero.world, 3))
    assert calls == ["h.1", "h.0", "outer"] * 3
    assert zero.schedule.reduces == {"outer": 1, "h.0": 1, "h.1": 1}


def test_the_tied_weight_exists_once(comm):
    zero = ZeRO(gpt(), world_of("ordered"), 3)
    assert sorted(name for name in copied(zero) if "wte" in name or "head" in name) == [
        "wte.weight"
    ]
    assert zero.units["outer"].layout.elements == 23 * 14 + 7 * 14 + 2 * 14  # wte, wpe, ln_f
