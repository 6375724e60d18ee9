"""Memory that MPI may still use is never freed, however a step ends (and P3 holds)."""

import gc
import weakref
from functools import partial

import numpy as np
import pytest
from training import STAGES, adamw, assert_same_bits, gpt, share, train, world_of

from zmpi import Policy, ZeRO
from zmpi.messages.comm import Communicator


class Boom(Exception):
    """What a test plants."""


def alive(vector):
    gc.collect()
    return vector() is not None


def engine_and_unit(world):
    """An engine at stage 3, and one of its units."""
    zero = ZeRO(gpt(), world, 3, adamw())
    return zero, zero.units["h.0"]


@pytest.mark.sizes(2, 3, 4)
def test_a_gather_that_is_dropped_keeps_its_vectors_until_mpi_is_done(world):
    """Rank 0 starts its gather last: until then the others' vectors are MPI's."""
    zero, unit = engine_and_unit(world)
    under_way = world.lane.under_way
    if world.rank:
        unit.gather()
        vector = weakref.ref(unit.full)
        unit.drop()
        under_way.test()
        assert alive(vector) and len(under_way) == 1
        world.mpi.send(None, dest=0)
    else:
        for rank in range(1, world.size):
            world.mpi.recv(source=rank)
        unit.gather()
        vector = weakref.ref(unit.full)
        unit.drop()
    zero.comm.drop()
    loss = zero.train_step(share(zero.model, 1, world, 1))  # brings the ranks into step
    assert not alive(vector) and not len(under_way)
    assert loss == ZeRO(gpt(), world, 3, adamw()).train_step(share(zero.model, 1, world, 1))


@pytest.mark.sizes(2, 3, 4)
def test_so_does_one_whose_engine_was_collected(world):
    zero, unit = engine_and_unit(world)
    if world.rank:
        unit.gather()
        vectors = [weakref.ref(unit.full), weakref.ref(unit.parameters.stored)]
    else:
        for rank in range(1, world.size):
            world.mpi.recv(source=rank)
        unit.gather()
        vectors = []
    del zero, unit
    assert all(alive(vector) for vector in vectors)
    if world.rank:
        world.mpi.send(None, dest=0)
    ZeRO(gpt(), world, 3, adamw())
    assert not any(alive(vector) for vector in vectors) and not len(world.lane.under_way)


def test_a_vector_that_is_freed_before_its_use_is_gathered_again(world):
    """gather, free, gather: the first vector is MPI's until it is there, and gone after that."""
    zero, unit = engine_and_unit(world)
    unit.gather()
    first = weakref.ref(unit.full)
    unit.free()
    assert not alive(first) and zero.comm.in_flight == 0
    unit.gather()
    weights = {name: w.copy() for name, w in unit.weights().items()}
    unit.free()
    with zero.gathered() as parameters:
        for name, w in weights.items():
            assert w.tobytes() == parameters["h.0." + name].tobytes()


class Drops(ZeRO):
    """Raises in layer 1 on one rank, in layer 2 on the others, which started one gather more."""

    first = None  # the rank that raises first

    def gather(self, visit):
        w = super().gather(visit)
        if visit.layer == (1 if self.world.rank == self.first else 2):
            raise Boom
        return w


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.sizes(2, 3, 4)
def test_ranks_that_left_a_step_at_different_places_train_on(world, precision, stage):
    """The same engine and a new one, the same bits as engines that nothing happened to."""

    def made(kind):
        return kind(gpt(layers=3), world_of("ordered"), stage, adamw(), policy=Policy(precision))

    expected = train(made(ZeRO), accumulate=2, steps=2)
    disturbed = made(Drops)
    for first in range(world.size):
        disturbed.first = first
        with pytest.raises(Boom):
            disturbed.train_step(share(disturbed.model, 9, world, 1))
    fresh = made(ZeRO)  # an engine that meets what another has left
    disturbed.gather = partial(ZeRO.gather, disturbed)
    assert_same_bits(train(disturbed, accumulate=2, steps=2), expected, "the same engine")
    assert_same_bits(train(fresh, accumulate=2, steps=2), expected, "a new engine")


@pytest.mark.parametrize("chunk_bytes", [0, -1, 0.5, True])
def test_a_chunk_holds_at_least_a_byte(world, chunk_bytes):
    zero = ZeRO(gpt(), world, 3, adamw())
    with pytest.raises(ValueError, match="chunk_bytes: expected"):
        Communicator(world, zero.ledger, "mpi", chunk_bytes=chunk_bytes)


def test_a_step_that_ended_holds_no_vector_of_its_own(world):
    """P3, at once: not only when the next step begins."""
    zero = ZeRO(gpt(), world, 3, adamw())
    too_long = np.zeros((1, zero.model.context + 1), int)
    with pytest.raises(ValueError, match="tokens per sequence, got"):
        zero.train_step([(too_long, too_long)])
    world.settle()
    gc.collect()
    assert zero.ledger.alive["full"] == zero.ledger.alive["partial"] == 0
