"""An error before a step, or within one, is one on all ranks, and leaves nothing behind."""

import signal

import numpy as np
import pytest
from saving import engine, state, steps
from training import STAGES, adamw, gpt, micro_batch, mlp, sgd, share

from zmpi import Policy, ZeRO
from zmpi.core.layout import Layout
from zmpi.core.step import Stopped
from zmpi.messages.comm import Communicator
from zmpi.messages.ledger import Ledger
from zmpi.process.errors import UsageError


class Boom(Exception):
    """What a test plants."""


# ---- ranks that were given different things ------------------------------------------------------

OTHER = {
    "stage": {"stage": 2},
    "seed": {"seed": np.int64(1)},
    "policy": {"policy": Policy(prefetch=0)},
    "optimizer": {"optimizer": adamw(lr=1e-3)},
    "model": {"model": gpt(layers=3)},
}


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.sizes(2, 3)
def test_what_differs_between_ranks_is_named_on_all(world, name):
    given = {"model": gpt(), "stage": 3, "seed": 0, "policy": Policy(), "optimizer": adamw()}
    given |= OTHER[name] if world.rank == world.size - 1 else {}
    with pytest.raises(
        UsageError,
        match=f"^{name}: expected the same on all ranks, got .* on rank 0 and .* on rank "
        f"{world.size - 1}$",
    ):
        ZeRO(given.pop("model"), world, **given)


@pytest.mark.sizes(2, 3)
def test_so_is_the_reduction(world):
    with pytest.raises(UsageError, match=r"reduction: .* got mpi on rank 0 and ordered on rank 1"):
        engine(world.twin("mpi" if world.rank != 1 else "ordered"))


def test_an_optimizer_of_ones_own_is_known_by_its_kind(world):
    """Its words hold an address, which differs between ranks."""

    class Mine:
        moments = ()

    ZeRO(gpt(), world, optimizer=Mine())


# ---- steps that do not end -----------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("verb", ["forward", "backward"])
def test_a_step_that_ended_by_an_exception_leaves_nothing_to_the_next(
    world, monkeypatch, stage, precision, prefetch, verb
):
    """On all ranks, in micro-batch 2, with half a gradient and (stage 3) a gather under way."""

    def made():
        return ZeRO(gpt(), world, stage, adamw(), policy=Policy(precision, prefetch))

    zero, other = made(), made()
    assert steps(zero, 1, 2, 2) == steps(other, 1, 2, 2)
    layer, calls = zero.model.layers[2 if verb == "forward" else 1], []
    real = getattr(layer, verb)

    def planted(*arguments):
        calls.append(verb)
        if len(calls) == 2:
            raise Boom
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(layer, verb, planted)
        with pytest.raises(Boom):
            zero.train_step(share(zero.model, 7, world, 2))
    assert steps(zero, 3, 4, 2) == steps(other, 3, 4, 2) and state(zero) == state(other)


def test_a_load_is_not_hidden_by_what_an_evaluation_left(world, folder):
    zero = engine(world)
    zero.save(folder)
    batch = [micro_batch(zero.model, 9, world.rank)]
    expected = zero.evaluate(batch)
    steps(zero, 1, 3)
    too_long = [(np.zeros((1, zero.model.context + 1), int),) * 2]
    with pytest.raises(ValueError, match="tokens per sequence, got"):
        zero.evaluate(too_long)
    zero.load(folder)
    assert zero.evaluate(batch) == expected and not zero.comm.in_flight


def test_a_signal_to_stop_ends_training_and_lets_an_evaluation_be(world):
    """An evaluation that is due belongs to the step before it, which is taken and saved."""
    zero = engine(world)
    batch = [micro_batch(zero.model, 9, world.rank)]
    expected = zero.evaluate(batch)
    world.guard.stop_requested = signal.SIGTERM if world.rank == world.size - 1 else 0
    try:
        assert zero.evaluate(batch) == expected
        with pytest.raises(Stopped, match="SIGTERM"):
            zero.train_step(batch)
    finally:
        world.guard.stop_requested = 0


# ---- what cannot be trained on -------------------------------------------------------------------


@pytest.mark.parametrize("model", [gpt(), mlp()], ids=["gpt", "mlp"])
def test_a_micro_batch_without_a_sequence_is_one_error_on_all_ranks(world, model):
    zero = ZeRO(model, world, 3, sgd())
    inputs, targets = micro_batch(model, 1, world.rank)
    kept = slice(0, 0) if world.rank == world.size - 1 else slice(None)
    for call in (zero.train_step, zero.evaluate):
        with pytest.raises(UsageError, match=r"none empty; got \[.*0\]"):
            call([(inputs[kept], targets[kept])])


@pytest.mark.parametrize("model", [gpt(), mlp()], ids=["gpt", "mlp"])
def test_a_token_outside_of_the_vocabulary_is_one_error_on_all_ranks(world, model):
    """Its id, position, rank and vocabulary; nothing is trained. Negative ids would wrap."""
    zero, other = ZeRO(model, world, 3, adamw()), ZeRO(model, world, 3, adamw())
    last = world.size - 1
    for name, token in (("inputs", -1), ("inputs", 23), ("targets", 23)):
        batches = [micro_batch(model, 1, m * world.size + world.rank) for m in range(2)]
        if world.rank == last:
            batches[1][name == "targets"].flat[-1] = token  # in the second micro-batch
        shape = batches[1][name == "targets"].shape
        place = [length - 1 for length in shape]
        expected = (
            f"rank {last}, micro-batch 1: {name}{place}: expected a token of"
            f" {'at most' if name == 'targets' else '0 to'} 22 (vocabulary 23), got {token}"
        )
        for call in (zero.train_step, zero.evaluate):
            with pytest.raises(UsageError) as found:
                call(batches)
            assert str(found.value) == expected
    assert steps(zero, 1, 1) == steps(other, 1, 1)


def test_memory_that_is_not_there_on_one_rank_is_one_error_on_all(world, monkeypatch):
    def full(layout, shared):
        raise MemoryError("Unable to allocate 224. GiB")

    if world.rank == world.size - 1:
        monkeypatch.setattr(ZeRO, "make_unit", staticmethod(full))
    expected = "memory: Unable to allocate 224. GiB" + (
        f" (on rank {world.size - 1})" if world.size > 1 else ""
    )
    with pytest.raises(UsageError) as found:
        engine(world)
    assert str(found.value) == expected


@pytest.mark.parametrize("reduction", ["mpi", "ordered"])
def test_a_unit_of_any_size_has_the_message_buffer_of_a_chunk(world, reduction):
    """And what it takes is not worked out by listing its chunks: there are 10^8 of them here."""
    comm = Communicator(world, Ledger(), reduction, chunk_bytes=1 << 20)
    comm.reserve([Layout("huge", "", {"w": (10**14,)}, world.size)], np.float32)
    assert comm._message.nbytes <= 2 << 20
