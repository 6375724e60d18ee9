"""The communicator's own calls (B16), and gathers under way during a computation (B14)."""

import time
from functools import partial

import numpy as np
import pytest
from training import adamw, assert_same_bits, gpt, share, train, world_of

from zmpi import Policy, ZeRO
from zmpi.core.layout import Layout
from zmpi.messages.comm import Communicator
from zmpi.messages.ledger import Ledger

SIZES = (1, 2, 3, 4)

reductions = pytest.mark.parametrize("reduction", ["mpi", "ordered"])
chunk_limits = pytest.mark.parametrize("chunk_bytes", [16 << 20, 1000, 4])
dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])


def communicator(reduction="ordered", chunk_bytes=16 << 20, elements=100, dtype=np.float32):
    """(communicator, the layout of one unit)."""
    world = world_of("auto")
    comm = Communicator(world, Ledger(), reduction, chunk_bytes)
    layout = Layout("unit", "", {"a": (elements,)}, world.size)
    comm.reserve([layout], dtype)
    return comm, layout


def vector_of(rank, length, dtype=np.float32):
    """Numbers of very different size, so that every order of a sum gives other bits."""
    rng = np.random.default_rng([rank, length])
    return (rng.standard_normal(length) * 10.0 ** rng.integers(-3, 4, length)).astype(dtype)


# ---- all_gather ----------------------------------------------------------------------------------


@dtypes
@chunk_limits
@pytest.mark.parametrize("elements", [1, 100, 121])
def test_all_gather_puts_the_shards_one_after_another(comm, elements, chunk_bytes, dtype):
    talk, layout = communicator(chunk_bytes=chunk_bytes, elements=elements)
    full = np.full(layout.padded, np.nan, dtype)
    talk.all_gather(layout, vector_of(comm.rank, layout.shard_length, dtype), full).wait()
    expected = np.concatenate(
        [vector_of(rank, layout.shard_length, dtype) for rank in range(comm.size)]
    )
    assert full.tobytes() == expected.tobytes()
    assert talk.in_flight == 0


@chunk_limits
def test_all_gather_in_place_leaves_the_own_slice(comm, chunk_bytes):
    talk, layout = communicator(chunk_bytes=chunk_bytes)
    full = np.full(layout.padded, np.nan, np.float32)
    mine = full[layout.shard(comm.rank)]
    mine[:] = vector_of(comm.rank, layout.shard_length)
    talk.all_gather(layout, mine, full).wait()
    expected = np.concatenate([vector_of(rank, layout.shard_length) for rank in range(comm.size)])
    assert full.tobytes() == expected.tobytes()


# ---- reduce_scatter ------------------------------------------------------------------------------


def left_to_right(layout, ranks, rank, dtype=np.float32, onto=0.0):
    """The own part of the sum, added up one by one in the order of ranks."""
    total = np.full(layout.shard_length, onto, np.result_type(dtype, np.float32))
    for other in range(ranks):
        total += vector_of(other, layout.padded, dtype)[layout.shard(rank)]
    return total


@dtypes
@chunk_limits
def test_ordered_adds_from_left_to_right_to_the_bit(comm, chunk_bytes, dtype):
    talk, layout = communicator("ordered", chunk_bytes, dtype=dtype)
    out = np.full(layout.shard_length, 7, np.result_type(dtype, np.float32))
    talk.reduce_scatter(layout, vector_of(comm.rank, layout.padded, dtype), out, fresh=True)
    assert out.tobytes() == left_to_right(layout, comm.size, comm.rank, dtype).tobytes()
    out.fill(7)
    talk.reduce_scatter(layout, vector_of(comm.rank, layout.padded, dtype), out, fresh=False)
    assert out.tobytes() == left_to_right(layout, comm.size, comm.rank, dtype, onto=7).tobytes()


@chunk_limits
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_mpi_adds_the_same_numbers(comm, chunk_bytes, dtype):
    talk, layout = communicator("mpi", chunk_bytes, dtype=dtype)
    out = np.full(layout.shard_length, 7, dtype)
    for fresh, onto in ((True, 0), (False, 7)):
        out.fill(7)
        talk.reduce_scatter(layout, vector_of(comm.rank, layout.padded, dtype), out, fresh)
        expected = left_to_right(layout, comm.size, comm.rank, dtype, onto)
        # another order of at most 6 numbers of up to 1e4: each rounding is at most 1e4 times the
        # type's precision
        np.testing.assert_allclose(out, expected, rtol=0, atol=6e4 * np.finfo(dtype).eps)


@reductions
@chunk_limits
def test_the_sum_may_lie_in_the_own_slice_of_what_is_sent(comm, reduction, chunk_bytes):
    talk, layout = communicator(reduction, chunk_bytes)
    out = np.empty(layout.shard_length, np.float32)
    talk.reduce_scatter(layout, vector_of(comm.rank, layout.padded), out, fresh=True)
    full = vector_of(comm.rank, layout.padded)
    talk.reduce_scatter(layout, full, full[layout.shard(comm.rank)], fresh=True)
    assert full[layout.shard(comm.rank)].tobytes() == out.tobytes()


def test_a_sum_of_16_bit_numbers_is_made_in_float32(comm):
    """2048 + 1 + ... is 2048 in float16, whose spacing there is 2; the sum is rounded once."""
    talk, layout = communicator("ordered", dtype=np.float16)
    full = np.full(layout.padded, 2048 if comm.rank == 0 else 1, np.float16)
    out = np.empty(layout.shard_length, np.float16)
    talk.reduce_scatter(layout, full, out, fresh=True)
    assert set(out.tolist()) == {float(np.float16(2048 + comm.size - 1))}


def test_scalars_come_from_every_rank_in_order(comm):
    talk, _ = communicator()
    found = talk.gather_scalars([comm.rank, 0.1 * comm.rank])
    np.testing.assert_array_equal(found, [[rank, 0.1 * rank] for rank in range(comm.size)])
    assert talk.gather_scalars([]).shape == (comm.size, 0)


# ---- B16: what memory a buffer may be ------------------------------------------------------------


def shapes_of(vector):
    """Buffers that hold the vector's numbers in another arrangement of memory, by name."""
    length = len(vector)
    yield "every second element", np.repeat(vector, 2)[::2]
    yield "reversed", vector[::-1].copy()[::-1]
    yield "columns of a matrix", np.stack([vector, vector], axis=1)[:, 0]
    yield "a matrix in Fortran order", np.asfortranarray(vector.reshape(2, length // 2))
    yield "a transposed matrix", vector.reshape(length // 2, 2).T
    yield "every second column", np.repeat(vector, 2).reshape(2, length)[:, ::2]
    yield "a matrix", vector.reshape(2, length // 2)
    yield "a part", vector[:-1]
    yield "nothing", vector[:0]


@reductions
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter"])
def test_a_buffer_that_is_not_what_it_seems_is_an_error_on_every_rank(
    comm, call, position, reduction
):
    talk, layout = communicator(reduction)
    lengths = (
        (layout.shard_length, layout.padded)
        if call == "all_gather"
        else (layout.padded, layout.shard_length)
    )
    vectors = [vector_of(comm.rank, length) for length in lengths]
    for name, strange in shapes_of(vectors[position]):
        handed = [strange if i == position else vector for i, vector in enumerate(vectors)]
        error = None
        try:
            talk.all_gather(layout, *handed) if call == "all_gather" else talk.reduce_scatter(
                layout, *handed, fresh=True
            )
        except ValueError as raised:
            error = str(raised)
        assert comm.allgather(error is not None) == [True] * comm.size, name
        assert "message buffer: expected a contiguous vector" in error
    assert talk.in_flight == 0
    assert not talk.ledger.moved  # nothing was sent


def reversed_in_memory(array):
    return array[..., ::-1].copy()[..., ::-1]


def every_second(array):
    return np.repeat(array, 2, axis=-1)[..., ::2]


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.float16])
def test_a_vector_of_another_type_than_was_reserved_is_an_error(comm, dtype):
    """It would be written past the message buffer's end, or be read as other numbers."""
    talk, layout = communicator("ordered")
    full, out = np.zeros(layout.padded, np.float32), np.zeros(layout.shard_length, np.float32)
    for wrong in (
        (full.astype(dtype), out),
        (full, out.astype(dtype)),
        (full.astype(dtype), out.astype(dtype)),
    ):
        with pytest.raises(ValueError, match="message buffer: expected a contiguous vector"):
            talk.reduce_scatter(layout, *wrong, fresh=True)
    with pytest.raises(ValueError, match="message buffer: expected a contiguous vector"):
        talk.all_gather(layout, out.astype(dtype), full)


def test_data_in_another_order_of_memory_are_read_element_by_element(comm):
    for stage in (0, 3):
        zero = ZeRO(gpt(), world_of("auto"), stage)
        batch = share(zero.model, 1, zero.world, 1)
        loss = zero.evaluate(batch)
        for arrange in (np.asfortranarray, reversed_in_memory, every_second):
            assert zero.evaluate([tuple(arrange(array) for array in batch[0])]) == loss


# ---- B14: gathers under way ----------------------------------------------------------------------


class Lazy(Communicator):
    """Its gathers read input and fill output in wait() only. `log`: starts and waits."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.log, self.open = [], 0

    def all_gather(self, layout, shard, full):
        if np.shares_memory(shard, full):  # of gathers in place: the own slice is all that is read
            shard = full[layout.shard(self.shard)]
        else:
            full.fill(np.nan)
        self.in_flight += 1
        self.open += 1
        self.log.append(f"gather {layout.name}")
        return Late(self, partial(super().all_gather, layout, shard, full))


class Late:
    def __init__(self, comm, start):
        self.comm, self.start = comm, start

    def wait(self):
        self.comm.in_flight -= 1
        self.comm.open -= 1
        self.start().wait()
        self.comm.log.append("wait")


class Sleepy(Communicator):
    """Rank 1 posts its gathers late."""

    def all_gather(self, layout, shard, full):
        if self.rank == 1:
            time.sleep(0.003)
        return super().all_gather(layout, shard, full)


class Logged(ZeRO):
    """Notes, at each computation, how many gathers are open; and that none is at the update."""

    make_communicator = Lazy

    def gather(self, visit):
        w = super().gather(visit)
        comm = self.comm.axes[0]
        comm.log += [f"compute with {comm.open} open"] * (visit.forward + visit.backward)
        return w

    def _agree(self, losses, counted):
        assert self.comm.axes[0].open == self.comm.in_flight == 0
        self.comm.axes[0].log.append("update")
        return super()._agree(losses, counted)


def result_of(kind, stage, prefetch, precision="float32"):
    zero = kind(
        gpt(layers=5), world_of("ordered"), stage, adamw(), policy=Policy(precision, prefetch)
    )
    return train(zero, accumulate=2), zero


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gathers_that_happen_in_their_wait_change_no_bit(comm, precision):
    for stage in (0, 1, 2, 3):
        expected, _ = result_of(ZeRO, stage, 0, precision)
        for prefetch in (0, 1):
            assert_same_bits(
                result_of(Logged, stage, prefetch, precision)[0], expected, (stage, prefetch)
            )


def test_gathers_that_one_rank_posts_late_change_no_bit(comm):
    class Slow(ZeRO):
        make_communicator = Sleepy

    expected, _ = result_of(ZeRO, 3, 0)
    for prefetch in (0, 1):
        assert_same_bits(result_of(Slow, 3, prefetch)[0], expected, prefetch)


def test_a_gather_is_open_while_a_layer_computes(comm):
    log = result_of(Logged, 3, 1)[1].comm.axes[0].log
    step = log[: log.index("update")]
    assert step.count("compute with 1 open") > len(step) / 4
    assert step.count("compute with 2 open") == 0
    assert (
        sum(entry.startswith("gather") for entry in step) == step.count("wait") == 2 * 6 * 2
    )  # 2 batches, 6 units, twice


def test_without_prefetch_no_gather_is_open_while_a_layer_computes(comm):
    log = result_of(Logged, 3, 0)[1].comm.axes[0].log
    assert {entry for entry in log if entry.startswith("compute")} == {"compute with 0 open"}


def test_a_gather_that_nobody_waited_for_is_found_at_the_update(comm):
    zero = ZeRO(gpt(), world_of("ordered"), 3, adamw())
    zero.comm.in_flight = 1
    with pytest.raises(AssertionError, match="a gather is under way at the update"):
        zero.train_step(share(zero.model, 1, zero.world, 1))
