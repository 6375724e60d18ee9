"""zmpi.verify: green as it is, and each planted fault turns exactly its promise red."""

import numpy as np
import pytest

from zmpi import ZeRO
from zmpi.comm import Communicator
from zmpi.layout import PIECES
from zmpi.trial import Outcome, Trial
from zmpi.unit import Unit
from zmpi.verify import promises

SIZES = (1, 2, 3, 4, 6)


class Reversed(Communicator):
    """Adds the ranks' slices from the last to the first."""

    def _exchange(self, *chunk):
        return super()._exchange(*chunk)[::-1]


class OneTooMany(Communicator):
    """Moves one element too many with every gather."""

    def all_gather(self, layout, shard, full):
        self.ledger.book("all_gather", layout.name, elements=1)
        return super().all_gather(layout, shard, full)


class Stale(Communicator):
    """Hands out the weights of the step before where `stale` is set, as a gather that nobody waited for would."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.stale, self.before = False, {}

    def all_gather(self, layout, shard, full):
        if not self.stale:
            return super().all_gather(layout, shard, full)
        sent = self.before.get(layout.name, shard)
        self.before[layout.name] = self.ledger.track("message", shard.copy())
        return super().all_gather(layout, sent, full)


class Twice(Communicator):
    """Reduces the tied unit twice: once for the embedding, once for the head."""

    def _exchange(self, layout, *chunk):
        rows = super()._exchange(layout, *chunk)
        return np.concatenate([rows, rows]) if layout.name == "outer" else rows


class ReversedZeRO(ZeRO):
    make_communicator = Reversed


class OneTooManyZeRO(ZeRO):
    make_communicator = OneTooMany


class StaleZeRO(ZeRO):
    make_communicator = Stale

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.comm.stale = bool(self.policy.prefetch)


class TwiceZeRO(ZeRO):
    make_communicator = Twice


class UndividedZeRO(ZeRO):
    """Divides by this rank's share of the targets, on the average, instead of all ranks' targets."""

    def _open(self, micro_batches, training=True):
        return super()._open(micro_batches, training) / max(2, self.world.size)


class OtherSeedZeRO(ZeRO):
    """The last rank starts from other weights."""

    def _initialise(self):
        self.seed += self.world.rank and self.world.rank == self.world.size - 1
        super()._initialise()


class KeptZeRO(ZeRO):
    """Keeps a view of every vector that it frees: the leak that undoes stage 3."""

    def train_step(self, micro_batches):
        kept = self.kept = []
        free = Unit.free

        def free_and_keep(unit):
            kept.append(unit.full)
            free(unit)

        Unit.free = free_and_keep
        try:
            return super().train_step(micro_batches)
        finally:
            Unit.free = free


def red(trial):
    """The promises that a trial does not keep."""
    return [row.promise for row in promises(trial) if not row.passed]


def test_all_promises_are_kept(world):
    rows = list(promises(Trial(world)))
    assert [row for row in rows if not row.passed] == []
    assert len(rows) == 10
    assert any(row.promise == "P1 b" for row in rows) == (PIECES % world.size == 0)


@pytest.mark.sizes(1, 3)
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_all_promises_are_kept_in_16_bits(world, precision):
    rows = list(promises(Trial(world, precision=precision)))
    assert [row for row in rows if not row.passed] == []
    assert len(rows) == 8


@pytest.mark.sizes(3)
@pytest.mark.parametrize(
    ("engine", "broken"),
    [
        (ReversedZeRO, {"P1 b"}),  # the stages still agree with each other
        (KeptZeRO, {"P3"}),
        (OneTooManyZeRO, {"P2"}),
        (TwiceZeRO, {"P1", "P1 b"}),
        (UndividedZeRO, {"P1 b"}),  # loss and gradient are wrong alike
        (OtherSeedZeRO, {"P1", "P1 a", "P1 b"}),
        (StaleZeRO, {"P1 c"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_turns_its_promise_red(world, engine, broken):
    found = red(Trial(world, engine=engine))
    assert found and set(found) == broken


@pytest.mark.sizes(4)
def test_all_ranks_get_the_same_rows(world, comm):
    rows = [row.figure for row in promises(Trial(world, engine=OtherSeedZeRO))]
    assert comm.allgather(rows) == [rows] * comm.size


def test_a_weight_that_is_not_a_number_is_a_difference():
    bad, good = (Outcome([(1.0, 1.0)], {"w": np.array([1.0, value])}) for value in (np.nan, 2.0))
    assert np.isnan(bad.difference(good)) and np.isnan(good.difference(bad))
    assert good.difference(good) == 0.0
