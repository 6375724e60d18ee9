"""B08 and B06: units smaller than the world, sizes that do not divide, decay by parameter."""

from functools import cache, partial
from itertools import chain

import numpy as np
import pytest
from training import (
    STAGES,
    Plain,
    adamw,
    assert_same_bits,
    copied,
    gpt,
    plain_run,
    run,
    sgd,
    share,
    train,
    world_of,
    zero_run,
)

from models import GPT, MLP, Layer, units
from zmpi import AdamW, Policy, ZeRO
from zmpi.core.layout import Layout

SIZES = (1, 2, 3, 4, 5)  # 5 does not divide 192: the norm has other pieces there

stages = pytest.mark.parametrize("stage", STAGES)
reductions = pytest.mark.parametrize("reduction", ["mpi", "ordered"])


class Line(Layer):
    """y = x weight + bias, one number in and one out: 2 parameters."""

    def __init__(self, name):
        self.name = name

    def shapes(self):
        return {"weight": (1, 1), "bias": (1,)}

    def init(self, w, key):
        w["weight"][...] = key("weight").standard_normal()
        w["bias"][...] = key("bias").standard_normal()

    def forward(self, w, x):
        return x * w["weight"] + w["bias"], x

    def backward(self, w, dw, saved, dy):
        dw["weight"] += np.sum(saved * dy, axis=0, keepdims=True)
        dw["bias"] += np.sum(dy, axis=0)
        return dy * w["weight"]


class Lines:
    """`layers` lines one after another, and half the squared distance to the targets."""

    def __init__(self, layers=1):
        self.layers = [Line(f"line.{i}") for i in range(layers)]

    def loss(self, y_N1, targets_N, divisor):
        difference_N1 = y_N1 - targets_N[:, None].astype(y_N1.dtype)
        return float(np.sum(difference_N1**2, dtype=np.float64)) / 2, difference_N1 / np.float32(
            divisor
        )


def points(step, j):
    rng = np.random.default_rng([step, j])
    return rng.standard_normal((3, 1), dtype=np.float32), rng.integers(0, 5, 3)


def trained(zero, accumulate=2):
    losses, norms = [], []
    for step in (1, 2, 3):
        losses.append(
            zero.train_step(
                [points(step, m * zero.world.size + zero.world.rank) for m in range(accumulate)]
            )
        )
        norms.append(zero.last.grad_norm)
    return losses, norms, copied(zero)


@cache
def plain_lines(layers, number):
    """(losses, norms, parameters) of the plain loop, with `number` micro-batches a step."""
    plain, losses, norms = Plain(Lines(layers), adamw()), [], []
    for step in (1, 2, 3):
        losses.append(plain.step([points(step, j) for j in range(number)]))
        norms.append(plain.norm)
    return losses, norms, plain.parameters()


@stages
@pytest.mark.parametrize("layers", [1, 3])
def test_a_model_of_2_parameters_trains_at_every_size(comm, layers, stage):
    expected = plain_lines(layers, 2 * comm.size)
    found = trained(ZeRO(Lines(layers), world_of("ordered"), stage, adamw()))
    if comm.size != 5:
        assert_same_bits(found, expected, stage)
    # at 5 ranks the norm has other pieces: float64's rounding
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    for name, array in expected[2].items():
        np.testing.assert_allclose(found[2][name], array, rtol=1e-6)
    by_mpi = trained(ZeRO(Lines(layers), world_of("mpi"), stage, adamw()))
    np.testing.assert_allclose(by_mpi[0], expected[0], rtol=1e-5)  # MPI sums in its own order


@stages
def test_ranks_that_own_nothing_but_padding_join_in(comm, stage):
    zero = ZeRO(Lines(), world_of("ordered"), stage, adamw())
    owners = comm.allgather(bool(zero.units["line.0"].owned.decayed))
    assert owners == [True] + [comm.size == 1 or stage == 0] * (comm.size - 1)
    trained(zero)
    moved = comm.allgather(zero.ledger["comm"]["reduce_scatter"]["calls"])
    assert moved == [moved[0]] * comm.size


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_model_of_2_parameters_trains_in_16_bits(comm, precision):
    first, *others = (
        trained(ZeRO(Lines(3), world_of("auto"), stage, adamw(), policy=Policy(precision)))
        for stage in STAGES
    )
    for stage, found in enumerate(others, start=1):
        assert_same_bits(found, first, stage)


@stages
@reductions
def test_a_total_of_1_mod_every_size_gives_the_references_training(comm, reduction, stage):
    model = MLP(layers=1, width=5, context=5, vocab=21)
    assert sum(Layout(u, s.prefix, s.shapes, 1).elements for u, s in units(model).items()) % 60 == 1
    plain = plain_run(partial(MLP, 1, 5, 5, 21), adamw(), 2 * comm.size)
    found = run(model, world_of(reduction), stage, adamw(), 2)
    np.testing.assert_allclose(found[0], plain[0], rtol=1e-5)  # P1's figure
    for name, array in plain[2].items():
        np.testing.assert_allclose(found[2][name], array, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.sizes(5)
def test_stages_agree_in_16_bits_at_5_ranks(comm, precision):
    for accumulate in (1, 4):
        first = zero_run(gpt, "auto", 0, sgd(), accumulate, policy=Policy(precision))
        for stage in STAGES[1:]:
            found = zero_run(gpt, "auto", stage, sgd(), accumulate, policy=Policy(precision))
            assert_same_bits(found, first, stage)


@stages
def test_padding_stays_zero(comm, stage):
    """It is summed, updated and gathered with the rest: nothing in it may come to life."""
    zero = ZeRO(gpt(), world_of("ordered"), stage, adamw(lr=0.1))
    train(zero, accumulate=2)
    for unit in zero.units.values():
        padding = unit.layout.padding(unit.part)
        for vector in chain(*unit.vectors().values()):
            whole = len(vector) == unit.layout.padded
            tail = unit.layout.padded - unit.layout.elements if whole else padding
            assert not vector[len(vector) - tail :].any()


# ---- B06: weight decay ---------------------------------------------------------------------------


class Level(GPT):
    """Its loss has no gradient."""

    def loss(self, logits, targets, divisor):
        loss_sum, d = super().loss(logits, targets, divisor)
        d.fill(0)
        return loss_sum, d


def level():
    return Level(layers=2, width=22, heads=2, context=7, vocab=23)


@stages
@reductions
def test_matrices_decay_and_biases_and_gains_do_not(comm, reduction, stage):
    model = level()
    zero = ZeRO(model, world_of(reduction), stage, AdamW(lr=0.1, weight_decay=0.1))
    for unit in zero.units.values():  # biases are made 0, where decay would not show
        for _, start, stop in unit.layout.spans(
            unit.part if zero.stage.parameters else slice(0, unit.layout.padded)
        ):
            unit.parameters.stored[start:stop] += np.float32(0.25)
    before = copied(zero)
    zero.train_step(share(model, 1, zero.world, 1))
    for name, array in copied(zero).items():
        # embeddings are matrices
        decay = np.float32(1 - 0.1 * 0.1) if array.ndim == 2 else np.float32(1)
        np.testing.assert_array_equal(array, before[name] * decay, err_msg=name)


@pytest.mark.sizes(3)
def test_at_3_ranks_a_shard_ends_inside_a_bias(comm):
    """So one slice's decay stops half way, and one begins without it."""
    layout = ZeRO(level(), world_of("auto"), 3).units["h.0"].layout
    cuts = [layout.shard(rank).start for rank in range(comm.size)]
    spans = {name: (start, stop) for name, start, stop in layout.spans(slice(0, layout.padded))}
    start, stop = spans["mlp.c_fc.bias"]
    assert any(start < cut < stop for cut in cuts)
