"""B01, B03 and B04: the norm over shards, unequal ranks, accumulation; against one process.

The reference run is one process, the plain loop, float32 and the same global batch in the same
order. Tolerances: MPI's sums, and float32's 2^-24 for each of some hundred additions, come to less
than 1e-5 of a loss or norm.
"""

from functools import cache

import numpy as np
import pytest
from training import STAGES, Plain, copied, gpt, micro_batch, mlp, plain_run, share, world_of

from models import GPT
from zmpi import SGD, ZeRO
from zmpi.process.errors import UsageError

SIZES = (1, 2, 3, 4)

models = pytest.mark.parametrize("model", [gpt, mlp])
stages = pytest.mark.parametrize("stage", STAGES)
reductions = pytest.mark.parametrize("reduction", ["mpi", "ordered"])


def change(before, after):
    """The L2 length of the change over the distinct parameters."""
    return (
        sum(np.sum((after[name].astype(np.float64) - before[name]) ** 2) for name in before) ** 0.5
    )


# ---- B01: the norm, and clipping -----------------------------------------------------------------


@stages
@reductions
@models
def test_the_norm_is_the_references_at_every_size_and_stage(comm, model, reduction, stage):
    _, (norm,), _ = plain_run(model, SGD(lr=0.1), 12, steps=1)
    for clip in (0.0, norm / 2, norm * 10):
        zero = ZeRO(model(), world_of(reduction), stage, SGD(lr=0.1, clip=clip))
        before = copied(zero)
        zero.train_step(share(zero.model, 1, zero.world, 12 // comm.size))
        assert zero.last.grad_norm == pytest.approx(norm, rel=1e-5)
        expected = 0.1 * min(norm, clip or norm)
        # the change is a difference of float32 weights of about 1: each is rounded to 6e-8, of
        # changes of about 1e-3
        assert change(before, copied(zero)) == pytest.approx(expected, rel=1e-3)


@stages
@reductions
def test_a_clip_that_is_not_reached_changes_no_bit(comm, reduction, stage):
    found = []
    for clip in (0.0, 1e3):
        zero = ZeRO(gpt(), world_of(reduction), stage, SGD(lr=0.1, clip=clip))
        zero.train_step(share(zero.model, 1, zero.world, 12 // comm.size))
        found.append(copied(zero))
    for name in found[0]:
        assert found[0][name].tobytes() == found[1][name].tobytes()


@models
@stages
def test_ten_clipped_steps_end_at_the_references_parameters(comm, model, stage):
    losses, _, parameters = plain_run(model, SGD(lr=0.1, clip=0.3), 12, steps=10)
    zero = ZeRO(model(), world_of("auto"), stage, SGD(lr=0.1, clip=0.3))
    found = [
        zero.train_step(share(zero.model, step, zero.world, 12 // comm.size))
        for step in range(1, 11)
    ]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for name, array in copied(zero).items():
        np.testing.assert_allclose(
            array, parameters[name], rtol=0, atol=1e-5, err_msg=name
        )  # cases/README: reference run


# ---- B03: unequal ranks --------------------------------------------------------------------------


def uneven(model, world, counted):
    """(this rank's micro-batch, all in order): rank r's has counted[r] targets that count."""
    batches = []
    for rank in range(world.size):
        inputs, targets = micro_batch(model, 1, rank, b=2, ragged=False)
        targets.reshape(-1)[counted[rank % len(counted)] :] = -1
        batches.append((inputs, targets))
    return batches[world.rank], batches


@stages
@reductions
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("counted", [(8, 2), (0, 10), (3, 0, 5)])
def test_every_counted_target_weighs_the_same(comm, counted, reduction, stage):
    """The loss is the sum over all targets / their number, never a mean of the ranks' means."""
    plain = Plain(gpt(), SGD(lr=0.1))
    zero = ZeRO(gpt(), world_of(reduction), stage, SGD(lr=0.1))
    mine, batches = uneven(zero.model, zero.world, counted)
    loss = zero.train_step([mine])
    assert loss == pytest.approx(plain.step(batches), rel=1e-6)  # one forward pass of float32
    assert zero.last.tokens == sum(int((targets >= 0).sum()) for _, targets in batches)
    assert comm.allgather((loss, zero.last.grad_norm)) == [(loss, zero.last.grad_norm)] * comm.size
    for name, array in copied(zero).items():
        np.testing.assert_allclose(
            array, plain.parameters()[name], rtol=0, atol=1e-6, err_msg=name
        )  # one SGD step


@stages
def test_the_loss_is_the_mean_over_the_union_of_all_samples(comm, stage):
    """MLP, 7 samples over the ranks (3/2/2 on three), unequal batches; against one batch of 7."""
    model, whole = mlp(), micro_batch(mlp(), 1, 0, b=7, ragged=False)
    plain = Plain(model, SGD(lr=0.1))
    expected = plain.step([whole])
    zero = ZeRO(model, world_of("auto"), stage, SGD(lr=0.1))
    inputs, targets = (np.array_split(array, comm.size)[comm.rank] for array in whole)
    assert zero.train_step([(inputs, targets)]) == pytest.approx(expected, rel=1e-6)
    assert zero.last.tokens == 7
    for name, array in copied(zero).items():
        np.testing.assert_allclose(array, plain.parameters()[name], rtol=0, atol=1e-6, err_msg=name)


@stages
def test_evaluation_weighs_every_counted_target_the_same(comm, stage):
    plain = Plain(gpt(), SGD(lr=0.0))
    zero = ZeRO(gpt(), world_of("auto"), stage)
    mine, batches = uneven(zero.model, zero.world, (9, 0, 2))
    assert zero.evaluate([mine]) == pytest.approx(plain.step(batches), rel=1e-6)


def test_a_step_without_any_counted_target_is_one_error_on_all_ranks(comm):
    zero = ZeRO(gpt(), world_of("auto"), 3)
    inputs, targets = micro_batch(zero.model, 1, comm.rank)
    for call in (zero.train_step, zero.evaluate):
        with pytest.raises(UsageError, match="targets: expected one of at least 0"):
            call([(inputs, np.full_like(targets, -1))])


@pytest.mark.sizes(2, 3, 4)
def test_unequal_numbers_of_micro_batches_are_one_error_on_all_ranks(comm):
    zero = ZeRO(gpt(), world_of("auto"), 3)
    with pytest.raises(
        UsageError,
        match=r"micro-batches: expected the same number on every rank, none empty; got \[2, 1",
    ):
        zero.train_step(share(zero.model, 1, zero.world, 2 if comm.rank == 0 else 1))
    with pytest.raises(UsageError, match="got \\[0"):
        zero.train_step([])


# ---- B04: accumulation ---------------------------------------------------------------------------


SMALL = GPT(layers=1, width=12, heads=3, context=5, vocab=19)


@cache
def sixteen_at_once():
    """The batches of 5 steps; the plain loop's [(loss, norm) of each step] and parameters."""
    plain, batches = (
        Plain(SMALL, SGD(lr=0.1)),
        [micro_batch(SMALL, n, 0, b=16) for n in range(1, 6)],
    )
    return batches, [(plain.step([batch]), plain.norm) for batch in batches], plain.parameters()


@stages
@reductions
@pytest.mark.sizes(1, 2, 4)
def test_accumulation_divides_nothing_twice(comm, reduction, stage):
    """16 sequences in accumulate x size micro-batches (1 to 16 in all) train the same."""
    whole, expected, parameters = sixteen_at_once()
    for accumulate in [number for number in (1, 2, 4, 8) if number * comm.size <= 16]:
        zero = ZeRO(SMALL, world_of(reduction), stage, SGD(lr=0.1))
        found = []
        for inputs, targets in whole:
            mine = [m * comm.size + comm.rank for m in range(accumulate)]
            parts = [np.array_split(array, accumulate * comm.size) for array in (inputs, targets)]
            found.append(
                (zero.train_step([(parts[0][j], parts[1][j]) for j in mine]), zero.last.grad_norm)
            )
        np.testing.assert_allclose(found, expected, rtol=1e-6)  # the case's own figure
        for name, array in copied(zero).items():
            np.testing.assert_allclose(array, parameters[name], rtol=0, atol=1e-6, err_msg=name)
