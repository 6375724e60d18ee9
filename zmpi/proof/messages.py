"""P1, messages: a gather delivers every owner's shard, a reduction the sum over ranks.

A communicator may round its messages, in blocks that share a scale; it then declares `block`, the
elements of one. Errors are relative to the block's largest number: rounding to k steps on each side
of zero gives at most 1 / 2k, for any weights.
"""

from time import sleep

import numpy as np

from zmpi.messages.comm import Communicator
from zmpi.proof.rows import CLOSE, Finding, both, judged
from zmpi.proof.trial import TRIAL_STEPS

LATE = 0.05  # seconds by which one rank enters a gather late
LEARNED = 50  # steps before losses are compared
SCALE_BLOCK = 64  # elements, where a communicator declares nothing


def messages_arrive(trial):
    """Gathers and reductions of known numbers; and the effect on the loss if they are rounded."""
    gathered, reduced, where = [], [], trial.but(stage=trial.stages[-1])
    for reduction in trial.reductions:
        zero = where.reduced(reduction).make()
        name = f"reduction {zero.comm.reduction}, {trial.model}, {trial.precision}"
        for unit in zero.units.values():
            gathered.append(_gathered(zero, unit, name, trial.tolerance))
            reduced.append(_reduced(zero, unit, name, trial.tolerance or CLOSE))
    block = f"of its block of {_block(zero.comm)}"
    yield judged(trial, "P1", f"gathered weights with their owners', {block}", gathered)
    yield judged(trial, "P1", f"reduced gradients with their sum, {block}", reduced)
    rounds = (
        max(found.size for found in gathered) > 0 or max(found.size for found in reduced) > CLOSE
    )
    if any(trial.world.share(bool(rounds))):
        yield _loss_follows(trial)


def _gathered(zero, unit, name, tolerance):
    """The Finding of one gather of a unit, which the last rank enters late."""
    comm, layout, dtype = zero.comm, unit.layout, unit.parameters.stored.dtype
    shards = [_numbers(layout.shard_length, [1, owner], dtype) for owner in range(comm.shards)]
    device = zero.world.device
    full = device.xp.empty(layout.padded, dtype)
    full.fill(np.nan)
    if zero.world.rank == zero.world.size - 1:
        sleep(LATE)
    comm.climb(unit.cut, device.put(shards[comm.shard]), comm.top, full).wait()
    expected = np.concatenate(shards).astype(np.float64)
    arrived = np.array(device.get(full), np.float64)
    where = f"all_gather of {layout.name}, {name}"
    return _block_error(comm, layout, (arrived, expected), where, tolerance)


def _reduced(zero, unit, name, bound):
    """The Finding of two reductions of a unit, the second added onto the first."""
    comm, layout, recipe = zero.comm, unit.layout, zero.policy.recipe
    ranks = [_numbers(layout.padded, [2, rank], recipe.gradient) for rank in range(comm.size)]
    device = zero.world.device
    out = device.xp.empty(layout.shard_length, recipe.master)
    for fresh in (True, False):
        sent = device.put(ranks[comm.rank].copy())  # coming down uses it up
        comm.come_down(unit.cut, sent, 0, comm.top, out, fresh)
    part = layout.shard(comm.shard)
    expected = 2 * sum(rank[part].astype(np.float64) for rank in ranks)
    arrived = np.array(device.get(out), np.float64)
    where = f"reduce_scatter of {layout.name}, {name}"
    return _block_error(comm, layout, (arrived, expected), where, bound)


def _numbers(length, seed, dtype):
    """Numbers of a different size in each block, different on every rank."""
    draw = np.random.default_rng(seed).standard_normal(length)
    return (draw * 2.0 ** -(np.arange(length) // SCALE_BLOCK % 5)).astype(dtype)


def _block_error(comm, layout, numbers, where, bound):
    """The Finding of (received, expected), each element relative to the largest of its block."""
    arrived, expected = (vector.reshape(-1, layout.shard_length) for vector in numbers)
    starts = np.arange(0, layout.shard_length, _block(comm))
    largest = np.maximum.reduceat(np.abs(expected), starts, axis=1)
    lengths = np.diff([*starts, layout.shard_length])
    scale = np.repeat(largest, lengths, axis=1) + np.finfo(np.float32).tiny
    error = np.abs(arrived - expected) / scale
    size, wrong = float(np.max(error)), np.argwhere(~(error <= bound))
    if not len(wrong):
        return Finding(size)
    row, column = wrong[0]
    shard = f"element {column} of rank {row if len(error) > 1 else comm.shard}'s shard"
    pair = both(arrived[row, column], expected[row, column], "as sent")
    return Finding(size, f"{where}, {shard}: {pair}")


def _block(comm):
    return comm.block or SCALE_BLOCK


def _loss_follows(trial):
    """The loss after some steps, next to that of the same run with exact messages."""

    class Exact(trial.engine):
        make_communicator = Communicator

    losses = []
    for engine in (trial.engine, Exact):
        zero = trial.but(engine=engine).make()
        for step in range(LEARNED):
            loss = zero.train_step(trial.data(step % TRIAL_STEPS))
        losses.append(loss)
    size = abs(losses[0] / losses[1] - 1)
    text = f"loss after {LEARNED} steps: {both(*losses, 'of the exact run')}"
    found = Finding(size, "" if size <= max(trial.tolerance, CLOSE) else f"{trial}, {text}")
    return judged(
        trial,
        "P1",
        f"{losses[0]:.5g} is the loss after {LEARNED} steps, {losses[1]:.5g} exactly",
        [found],
    )
