"""The GPU's transports, and the engine, without a GPU: fake_cuda.py says what it can find."""

from functools import cache
from itertools import product

import numpy as np
import pytest
from fake_cuda import Array, Cuda
from training import adamw, assert_same_bits, gpt, mlp, share, world_of

from zmpi import Policy, ZeRO
from zmpi.core.layout import Layout
from zmpi.messages.comm import Communicator
from zmpi.messages.device import Gpu
from zmpi.messages.ledger import Ledger
from zmpi.messages.transport import Direct, Staged
from zmpi.process.errors import UsageError
from zmpi.proof.accounts import volumes_are_exact
from zmpi.proof.lifetimes import nothing_is_kept
from zmpi.proof.messages import messages_arrive
from zmpi.proof.training import order_is_kept, schedule_changes_nothing, stages_agree
from zmpi.proof.trial import Trial
from zmpi.proof.walks import walks_are_whole
from zmpi.verify import CHECKS, promises

SIZES = (1, 2, 3, 4)
# Which streams are late (the computing one, the copying one): what is forgotten shows in one of
# these orders.
ORDERS = [(True, True), (True, False), (False, True)]

transports = pytest.mark.parametrize("transport", ["direct", "staged"])
reductions = pytest.mark.parametrize("reduction", ["mpi", "ordered"])
orders = pytest.mark.parametrize("late", ORDERS)
chunk_limits = pytest.mark.parametrize("chunk_bytes", [16 << 20, 1000, 100])


def gpu_world(transport, late=(True, True), reduction="auto"):
    world = world_of(reduction)
    world.device, world.transport = Gpu(Cuda(late), index=0), transport
    return world


def communicator(transport, late, reduction="ordered", chunk_bytes=16 << 20, dtype=np.float32):
    """(communicator, the layout of one unit)."""
    world = gpu_world(transport, late)
    comm = Communicator(world, Ledger(), reduction, chunk_bytes)
    layout = Layout("unit", "", {"a": (100,)}, world.size)
    comm.reserve([layout], dtype)
    return comm, layout


def vector_of(rank, length, dtype=np.float32):
    """Numbers of very different size, so that every order of a sum gives other bits."""
    rng = np.random.default_rng([rank, length])
    return (rng.standard_normal(length) * 10.0 ** rng.integers(-3, 4, length)).astype(dtype)


def computed(cuda, values):
    """An array that a kernel is still to write, in memory that held something else."""
    cuda.stream.synchronize()
    array = cuda.put(values)
    array *= values.dtype.type(2)
    array *= values.dtype.type(0.5)
    return array


# ---- the collectives -----------------------------------------------------------------------------


@transports
@orders
@chunk_limits
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_all_gather_puts_the_shards_one_after_another(comm, transport, late, chunk_bytes, dtype):
    talk, layout = communicator(transport, late, chunk_bytes=chunk_bytes, dtype=dtype)
    cuda = talk.xp
    expected = np.concatenate(
        [vector_of(rank, layout.shard_length, dtype) for rank in range(comm.size)]
    )
    for _ in range(2):  # the second time with buffers that were used
        shard = computed(cuda, vector_of(comm.rank, layout.shard_length, dtype))
        full = cuda.empty(layout.padded, dtype)
        talk.all_gather(layout, shard, full).wait()
        twice = full + full  # a kernel launched at once sees what arrived
        assert cuda.asnumpy(full).tobytes() == expected.tobytes()
        assert cuda.asnumpy(twice).tobytes() == (expected + expected).tobytes()
    assert talk.in_flight == 0


@transports
@orders
@chunk_limits
def test_all_gather_in_place_leaves_the_own_slice(comm, transport, late, chunk_bytes):
    talk, layout = communicator(transport, late, chunk_bytes=chunk_bytes)
    full = talk.xp.empty(layout.padded, np.float32)
    mine = full[layout.shard(comm.rank)]
    np.copyto(mine, computed(talk.xp, vector_of(comm.rank, layout.shard_length)))
    talk.all_gather(layout, mine, full).wait()
    expected = np.concatenate([vector_of(rank, layout.shard_length) for rank in range(comm.size)])
    assert talk.xp.asnumpy(full).tobytes() == expected.tobytes()


@transports
@orders
@chunk_limits
def test_gathers_and_a_reduction_may_be_under_way_together(comm, transport, late, chunk_bytes):
    talk, layout = communicator(transport, late, chunk_bytes=chunk_bytes)
    cuda = talk.xp
    shards = [computed(cuda, vector_of(comm.rank + k, layout.shard_length)) for k in (0, 10)]
    fulls = [cuda.empty(layout.padded, np.float32) for _ in shards]
    gathers = [talk.all_gather(layout, *pair) for pair in zip(shards, fulls, strict=True)]
    out = cuda.empty(layout.shard_length, np.float32)
    talk.reduce_scatter(
        layout, computed(cuda, vector_of(comm.rank, layout.padded)), out, fresh=True
    )
    for gather in gathers:
        gather.wait()
    for k, full in zip((0, 10), fulls, strict=True):
        expected = np.concatenate(
            [vector_of(rank + k, layout.shard_length) for rank in range(comm.size)]
        )
        assert cuda.asnumpy(full).tobytes() == expected.tobytes()
    assert cuda.asnumpy(out).tobytes() == left_to_right(layout, comm).tobytes()


def left_to_right(layout, comm, dtype=np.float32, onto=0.0):
    """The own part of the sum, added up one by one in the order of ranks."""
    total = np.full(layout.shard_length, onto, np.result_type(dtype, np.float32))
    for other in range(comm.size):
        total += vector_of(other, layout.padded, dtype)[layout.shard(comm.rank)]
    return total


@transports
@orders
@chunk_limits
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_ordered_adds_from_left_to_right_to_the_bit(comm, transport, late, chunk_bytes, dtype):
    talk, layout = communicator(transport, late, "ordered", chunk_bytes, dtype)
    cuda = talk.xp
    for fresh, onto in ((True, 0), (False, 7), (True, 0)):
        out = cuda.empty(layout.shard_length, np.result_type(dtype, np.float32))
        out.fill(7)
        talk.reduce_scatter(
            layout, computed(cuda, vector_of(comm.rank, layout.padded, dtype)), out, fresh
        )
        assert cuda.asnumpy(out).tobytes() == left_to_right(layout, comm, dtype, onto).tobytes()


@transports
@orders
@chunk_limits
def test_mpi_adds_the_same_numbers(comm, transport, late, chunk_bytes):
    talk, layout = communicator(transport, late, "mpi", chunk_bytes)
    cuda = talk.xp
    for fresh, onto in ((True, 0), (False, 7)):
        out = cuda.empty(layout.shard_length, np.float32)
        out.fill(7)
        talk.reduce_scatter(layout, computed(cuda, vector_of(comm.rank, layout.padded)), out, fresh)
        # another order of at most 5 numbers of up to 1e4: each rounding is at most 1e4 times the
        # type's precision
        np.testing.assert_allclose(
            cuda.asnumpy(out), left_to_right(layout, comm, onto=onto), rtol=0, atol=6e-3
        )


@transports
@reductions
@chunk_limits
def test_the_sum_may_lie_in_the_own_slice_of_what_is_sent(comm, transport, reduction, chunk_bytes):
    talk, layout = communicator(transport, (True, True), reduction, chunk_bytes)
    out = talk.xp.empty(layout.shard_length, np.float32)
    talk.reduce_scatter(
        layout, computed(talk.xp, vector_of(comm.rank, layout.padded)), out, fresh=True
    )
    full = computed(talk.xp, vector_of(comm.rank, layout.padded))
    talk.reduce_scatter(layout, full, full[layout.shard(comm.rank)], fresh=True)
    assert (
        talk.xp.asnumpy(full[layout.shard(comm.rank)]).tobytes() == talk.xp.asnumpy(out).tobytes()
    )


# ---- what must not be handed to MPI --------------------------------------------------------------


@transports
@reductions
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter"])
def test_a_buffer_that_is_not_contiguous_is_an_error(comm, transport, reduction, call, position):
    talk, layout = communicator(transport, (True, True), reduction)
    lengths = (
        (layout.shard_length, layout.padded)
        if call == "all_gather"
        else (layout.padded, layout.shard_length)
    )
    vectors = [talk.xp.empty(length, np.float32) for length in lengths]
    strange = talk.xp.empty(2 * lengths[position], np.float32)[::2]
    vectors[position] = strange
    with pytest.raises(ValueError, match="expected a contiguous vector"):
        talk.all_gather(layout, *vectors) if call == "all_gather" else talk.reduce_scatter(
            layout, *vectors, fresh=True
        )
    assert not talk.ledger.moved


def test_the_array_is_none_of_the_hosts():
    array = Cuda().put(np.ones(4, np.float32))
    for take in (
        np.asarray,
        np.array,
        memoryview,
        list(map(float, [1])).__add__,
        lambda x: np.ones(4) + x,
    ):
        with pytest.raises((TypeError, ValueError)):
            take(array)
    with pytest.raises(TypeError):
        array + np.ones(4, np.float32)
    assert array.__cuda_array_interface__["data"][0] == array.data.ptr


# ---- planted faults: each is found, so the tests above would find it -----------------------------


class Hasty(Direct):
    """Forgets to wait for the kernels."""

    def _settle(self):
        pass


class HastyStaged(Staged):
    """Forgets that copies come after what computes."""

    def _follow(self):
        pass


class Unwaited(Staged):
    """Forgets to wait for the copy before MPI reads it."""

    def outgoing(self, vector, rows, start, stop):
        slot = self._copy_out(vector, rows, start, stop)
        return slot.place(vector, rows, start, stop)


class Unordered(Staged):
    """Forgets that what computes comes after the copy in."""

    def arrived(self, vector, rows, start, stop):
        self._copy(self._expected.popleft(), vector, rows, (start, stop), out=False)


class HostCopy(Direct):
    """Brings the vector to the host by the way."""

    def outgoing(self, vector, rows, start, stop):
        self.kept = np.ascontiguousarray(vector)
        return super().outgoing(self.kept, rows, start, stop)


def gathered_right(comm, kind, late):
    """Whether a gather by such a way brings the right numbers, on any rank."""
    talk, layout = communicator("direct", late)
    talk._gathers = kind(talk._gathers.device, talk.ledger)
    talk._gathers.reserve(1 << 16)
    full = talk.xp.empty(layout.padded, np.float32)
    talk.all_gather(
        layout, computed(talk.xp, vector_of(comm.rank, layout.shard_length)), full
    ).wait()
    seen = full + np.float32(0)
    expected = np.concatenate([vector_of(rank, layout.shard_length) for rank in range(comm.size)])
    return all(comm.allgather(talk.xp.asnumpy(seen).tobytes() == expected.tobytes()))


@pytest.mark.parametrize("kind", [Hasty, HastyStaged, Unwaited, Unordered])
def test_a_missing_wait_is_found(comm, kind):
    sound = Direct if issubclass(kind, Direct) else Staged
    assert all(gathered_right(comm, sound, late) for late in ORDERS)
    assert not all(gathered_right(comm, kind, late) for late in ORDERS)


def test_a_copy_by_way_of_the_host_is_found(comm):
    with pytest.raises(TypeError):
        gathered_right(comm, HostCopy, (True, True))


# ---- the engine ----------------------------------------------------------------------------------


def run(world, model, stage, policy, accumulate=2, steps=2):
    """(losses, norms, final parameters as NumPy arrays)."""
    zero = ZeRO(model, world, stage, adamw(), policy=policy)
    losses, norms = [], []
    for step in range(1, steps + 1):
        losses.append(zero.train_step(share(zero.model, step, zero.world, accumulate)))
        norms.append(zero.last.grad_norm)
    with zero.gathered() as parameters:
        return (
            losses,
            norms,
            {name: np.array(world.device.get(array)) for name, array in parameters.items()},
        )


def like_the_gpu(world):
    """The CPU's world with the layout of a GPU: the same pieces of the norm."""

    class Aligned(type(world.device)):
        align = Gpu.align

    world.device = Aligned(world.device.name, world.device.xp)
    return world


@cache
def on_the_cpu(model, reduction, stage):
    return run(like_the_gpu(world_of(reduction)), model(), stage, Policy())


def orders_in_turn(shift, every=()):
    """(stage, order) pairs: orders take turns, beginning with `shift`; all at stages in `every`."""
    for stage in (0, 1, 2, 3):
        for late in ORDERS if stage in every else [ORDERS[(stage + shift) % 3]]:
            yield stage, late


@transports
@pytest.mark.parametrize(("reduction", "model"), [*product(("mpi", "ordered"), (gpt, mlp))])
def test_every_stage_on_the_gpu_gives_the_cpus_bits(comm, transport, reduction, model):
    """By each transport every stage meets every order, with one reduction and model or two."""
    shift = 2 * (reduction == "mpi") + (model is gpt)
    for stage, late in orders_in_turn(shift):
        policy = Policy(prefetch=int(late[0]))
        found = run(gpu_world(transport, late, reduction), model(), stage, policy)
        assert_same_bits(found, on_the_cpu(model, reduction, stage), (stage, late))


@transports
def test_16_bit_stages_on_the_gpu_agree(comm, transport):
    """Activations are of 16 bits there, so the CPU's bits are others; the stages' are the same."""
    expected = run(gpu_world("direct"), gpt(), 0, Policy("bfloat16"), accumulate=1)
    for stage, late in orders_in_turn(transport == "direct", every=(3,)):
        found = run(gpu_world(transport, late), gpt(), stage, Policy("bfloat16"), accumulate=1)
        assert_same_bits(found, expected, (stage, late))


@pytest.mark.parametrize("model", [gpt(), mlp()], ids=["gpt", "mlp"])
def test_tokens_are_checked_before_they_are_on_the_gpu(comm, model):
    """Where an index wraps at both ends, and nobody would see it."""
    world = gpu_world("direct")
    zero = ZeRO(model, world, 3, adamw())
    put = world.device.put
    object.__setattr__(world.device, "put", lambda array: pytest.fail("copied"))
    for name, token in ((0, -1), (0, model.vocab), (1, model.vocab)):
        batch = share(model, 1, world, 1)
        batch[0][name].flat[0] = token
        for call in (zero.train_step, zero.evaluate):
            with pytest.raises(UsageError, match=f"^rank 0, micro-batch 0: .*got {token}$"):
                call(batch)
    object.__setattr__(world.device, "put", put)
    assert zero.train_step(share(model, 1, world, 1)) > 0


@transports
def test_the_ledger_names_all_that_the_pool_holds(comm, transport):
    for stage in (0, 1, 2, 3):
        world = gpu_world(transport)
        zero = ZeRO(gpt(), world, stage, adamw())
        zero.train_step(share(zero.model, 1, world, 2))
        alive = zero.ledger.alive
        assert alive["pinned"] == world.device.xp.pinned
        arrays = sum(len(unit.moments) + 2 for unit in zero.units.values()) + 1
        held = sum(alive.values()) - alive["pinned"]
        assert (
            0 <= world.device.xp.used - held < 512 * arrays
        )  # each array is rounded up to 512 bytes
        assert zero.ledger["memory"]["peak"] >= held


def test_messages_have_a_fixed_size(comm):
    for transport, limit in (
        ("direct", 1),
        ("staged", 9),
    ):  # staged: two buffers out and in, for each way
        sizes = set()
        for layers in (1, 4):
            zero = ZeRO(gpt(layers), gpu_world(transport), 3)
            zero.train_step(share(zero.model, 1, zero.world, 1))
            sizes.add(zero.ledger.alive["message"] + zero.ledger.alive["pinned"])
        largest = max(unit.layout.padded for unit in zero.units.values())
        assert len(sizes) == 1 and sizes.pop() <= limit * 8 * largest


def test_it_is_an_array_of_the_gpu_that_is_gathered(comm):
    zero = ZeRO(gpt(), gpu_world("direct"), 3)
    with zero.gathered() as parameters:
        assert all(isinstance(array, Array) for array in parameters.values())


@pytest.mark.parametrize("there", ["cpu", "direct"])
def test_a_checkpoint_goes_on_on_another_device(comm, folder, there):
    """Saved on the GPU at stage 3, loaded at stage 1 on CPU or GPU: the state's bits are equal."""
    first = ZeRO(gpt(), gpu_world("staged"), 3, adamw())
    first.train_step(share(first.model, 1, first.world, 1))
    first.save(folder)
    second = ZeRO(
        gpt(), world_of("auto") if there == "cpu" else gpu_world(there), 1, adamw(), seed=1
    )
    second.load(folder)
    assert second.step == 1
    loss = second.evaluate(share(second.model, 2, second.world, 1))
    assert loss == pytest.approx(first.evaluate(share(first.model, 2, first.world, 1)), rel=1e-6)
    with first.gathered() as here, second.gathered() as there:
        for name, array in here.items():
            one, other = first.world.device.get(array), second.world.device.get(there[name])
            assert np.array(one).tobytes() == np.array(other).tobytes(), name


# Each check on one of the two transports, those of messages and lifetimes on both: an operation of
# the fake is slow.
BOTH = (messages_arrive, stages_agree, nothing_is_kept)
DIRECT = (*BOTH, walks_are_whole, order_is_kept, schedule_changes_nothing, volumes_are_exact)
STAGED = (*BOTH, *(check for check in CHECKS if check not in DIRECT))


@pytest.mark.sizes(3)
@pytest.mark.limit(500)
@pytest.mark.parametrize(
    ("transport", "precision", "checks"),
    [("direct", "float32", DIRECT), ("staged", "bfloat16", STAGED)],
)
def test_all_promises_are_kept_on_the_gpu(comm, transport, precision, checks):
    trial = Trial(gpu_world(transport), precision=precision)
    rows = list(promises(trial, [check for check in CHECKS if check in checks]))
    assert len(rows) >= len(checks)
    assert [row for row in rows if not row.passed or not row.checked] == []
