"""P2, what is moved: each collective's elements and bytes equal the closed form, exactly."""

from collections import Counter
from functools import cache, partial

import numpy as np
import pytest
from training import STAGES, adamw, assert_same_bits, gpt, mlp, share, train, unit_names, world_of

from zmpi import Policy, ZeRO
from zmpi.messages.comm import Communicator

SIZES = (1, 2, 3, 4, 5)

CASES = [
    ("mpi", "float32"),
    ("ordered", "float32"),
    ("ordered", "float16"),
    ("ordered", "bfloat16"),
]
cases = pytest.mark.parametrize(("reduction", "precision"), CASES)
accumulations = pytest.mark.parametrize("M", [1, 3])
models = pytest.mark.parametrize("model", [gpt, mlp])
up_to_4 = pytest.mark.sizes(1, 2, 3, 4)  # at 5 the elements and bytes are enough


class Listening(Communicator):
    """Notes every collective of gradients and parameters, and every MPI call for them."""

    def __init__(self, world, ledger, reduction, **options):
        super().__init__(world, ledger, reduction, **options)
        self.calls, self.spy = [], Spy(world.lane.mpi)

    @property
    def mpi(self):
        return self.spy

    def all_gather(self, layout, shard, full):
        self.calls.append(("all_gather", layout.name, str(full.dtype)))
        return super().all_gather(layout, shard, full)

    def reduce_scatter(self, layout, full, out, fresh):
        first = len(self.mpi.calls)
        super().reduce_scatter(layout, full, out, fresh)
        self.calls.append(("reduce_scatter", layout.name, tuple(self.mpi.calls[first:])))


class Spy:
    """An MPI communicator that notes (call, count from each rank, type's size) of vectors."""

    def __init__(self, mpi):
        self._mpi, self.calls = mpi, []

    def __getattr__(self, name):
        function = getattr(self._mpi, name)

        def call(send, receive, **options):
            self.calls.append((name, receive[1], receive[2].size))
            return function(send, receive, **options)

        return call


class Heard(ZeRO):
    make_communicator = Listening


def heard_in_chunks(limit):
    """A Heard whose collectives are cut into chunks of at most `limit` bytes."""

    class Chunked(Heard):
        make_communicator = staticmethod(partial(Listening, chunk_bytes=limit))

    return Chunked


def one_step(model, world, stage, M, precision="float32", kind=Heard):
    zero = kind(model, world, stage, adamw(), policy=Policy(precision))
    zero.train_step(share(model, 1, world, M))
    return zero


@cache
def stepped(model, reduction, stage, M, precision="float32"):
    """The engine of a model() after `one_step`, for all tests that only read what it booked."""
    return one_step(model(), world_of(reduction), stage, M, precision)


def expected_elements(zero, stage, M):
    """{collective: elements} of the GPT (paper, section 7): 2 gathers, 1 reduction per unit."""
    total = sum(unit.layout.elements for unit in zero.units.values())
    reductions = M if stage >= 2 or zero.comm.ordered else 1
    return {
        "all_gather": (2 * M if stage == 3 else 1) * total,
        "reduce_scatter": reductions * total,
    }


@cases
@accumulations
@pytest.mark.parametrize("stage", STAGES)
def test_the_gpt_moves_the_papers_elements(comm, stage, M, reduction, precision):
    zero = stepped(gpt, reduction, stage, M, precision)
    moved = zero.ledger["comm"]
    assert {
        kind: moved[kind]["elements"] for kind in ("all_gather", "reduce_scatter")
    } == expected_elements(zero, stage, M)
    assert set(moved["other"].values()) == {0}


@accumulations
@pytest.mark.parametrize("stage", STAGES)
def test_the_mlp_moves_what_its_printed_schedule_says(comm, stage, M):
    zero = stepped(mlp, "ordered", stage, M)
    gathers, reduces = Counter(), Counter()
    for line in str(zero.schedule).splitlines()[1:]:
        _, _, unit, *verbs = line.replace(",", "").split()
        gathers[unit] += "gather" in verbs
        reduces[unit] += "reduce" in verbs
    sizes = {name: unit.layout.elements for name, unit in zero.units.items()}
    assert dict(reduces) == dict.fromkeys(sizes, 1)
    assert gathers == {"embed": 1, "hidden.0": 2, "hidden.1": 2, "head": 1}
    moved = zero.ledger["comm"]
    per_pass = sum(sizes[unit] * count for unit, count in gathers.items())
    assert moved["all_gather"]["elements"] == (per_pass * M if stage == 3 else sum(sizes.values()))
    assert moved["reduce_scatter"]["elements"] == sum(sizes.values()) * M


@cases
@accumulations
@models
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_sent_without_padding_are_the_elements_over_all_ranks(
    comm, stage, model, M, reduction, precision
):
    zero = stepped(model, reduction, stage, M, precision)
    itemsize = {"float32": 4, "float16": 2, "bfloat16": 2}[precision]
    for kind in ("all_gather", "reduce_scatter"):
        entry = zero.ledger["comm"][kind]
        everyone = comm.allgather(entry["bytes_sent"] - entry["padding_bytes"])
        assert sum(everyone) == (comm.size - 1) * entry["elements"] * itemsize


@cases
@pytest.mark.parametrize("stage", STAGES)
def test_every_rank_sends_the_others_shards_padding_included(comm, stage, reduction, precision):
    zero = stepped(gpt, reduction, stage, 1, precision)
    itemsize = 4 if precision == "float32" else 2
    padded = sum(unit.layout.padded for unit in zero.units.values())
    sent = padded // comm.size * (comm.size - 1) * itemsize
    gathers = 2 if stage == 3 else 1
    assert zero.ledger["comm"]["all_gather"]["bytes_sent"] == gathers * sent
    assert zero.ledger["comm"]["reduce_scatter"]["bytes_sent"] == sent


def test_the_ledger_counts_the_bytes_that_mpi_was_given(comm):
    for reduction in ("mpi", "ordered"):
        zero = one_step(gpt(), world_of(reduction), 3, 2)
        handed = {"Iallgather": 0, "Alltoall": 0, "Reduce_scatter_block": 0}
        for name, count, size in zero.comm.axes[0].mpi.calls:
            handed[name] += count * size * (comm.size - 1)
        moved = zero.ledger["comm"]
        assert handed["Iallgather"] == moved["all_gather"]["bytes_sent"]
        assert (
            handed["Alltoall"] + handed["Reduce_scatter_block"]
            == moved["reduce_scatter"]["bytes_sent"]
        )


@up_to_4
@cases
@models
def test_all_stages_reduce_a_unit_by_the_same_calls_with_the_same_counts(
    comm, model, reduction, precision
):
    found = []
    for stage in STAGES:
        calls = stepped(model, reduction, stage, 1, precision).comm.axes[0].calls
        found.append([call for call in calls if call[0] == "reduce_scatter"])
    assert len(found[0]) == len(unit_names(model()))
    assert found == [found[0]] * 4


@up_to_4
def test_no_other_collective_carries_gradients(comm):
    for stage in STAGES:
        for reduction in ("mpi", "ordered"):
            zero = one_step(gpt(), world_of(reduction), stage, 2)
            used = {name for name, _, _ in zero.comm.axes[0].mpi.calls}
            assert used == {
                "Iallgather",
                "Alltoall" if reduction == "ordered" else "Reduce_scatter_block",
            }


@up_to_4
@pytest.mark.parametrize(("reduction", "precision"), CASES[:3])
def test_a_small_chunk_limit_changes_no_bit_and_no_volume(comm, reduction, precision):
    """B13 (b): chunks of 1,000 bytes, where the units have 1,400 to 11,000 each."""
    for stage in STAGES:
        found, results = [], []
        for chunk_bytes in (16 << 20, 1000):
            zero = heard_in_chunks(chunk_bytes)(
                gpt(layers=1), world_of(reduction), stage, adamw(), policy=Policy(precision)
            )
            results.append(train(zero, accumulate=2, steps=2))
            moved = zero.ledger["comm"]
            calls = {name: entry.pop("calls") for name, entry in moved.items()}
            found.append(
                [
                    (name, e["elements"], e["bytes_sent"], e["padding_bytes"])
                    for name, e in moved.items()
                ]
            )
            assert (calls["reduce_scatter"] > 4 * len(zero.units)) == (chunk_bytes == 1000)
        assert found[0] == found[1]
        if reduction == "ordered":
            assert_same_bits(*results, stage)
        else:  # MPI's order of sums may depend on a message's length; a loss is rounded to 2^-24
            np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6)


def test_no_chunk_is_larger_than_its_limit(comm):
    for reduction in ("mpi", "ordered"):
        zero = one_step(gpt(), world_of(reduction), 3, 1, kind=heard_in_chunks(1000))
        sizes = [count * size for _, count, size in zero.comm.axes[0].mpi.calls]
        assert max(sizes) * comm.size <= 1000
        assert len(sizes) > 3 * len(zero.units)


def test_evaluation_is_booked_apart(comm):
    zero = one_step(gpt(), world_of("ordered"), 3, 1)
    before = zero.ledger["comm"]
    zero.evaluate(share(zero.model, 2, zero.world, 1))
    after = zero.ledger["comm"]
    sizes = {name: unit.layout.elements for name, unit in zero.units.items()}
    assert all(after[kind] == before[kind] for kind in before if kind != "other")
    vectors = {
        unit: moved.elements for (kind, unit), moved in zero.ledger.moved.items() if kind == "other"
    }
    assert vectors.pop("scalars") < 10
    assert vectors == sizes | {"outer": 2 * sizes["outer"]}  # which the embedding and the head need


def test_what_moves_between_two_steps_is_in_the_books_of_the_second_once(comm):
    zero = one_step(gpt(), world_of("ordered"), 3, 1)
    assert zero.ledger["comm"]["other"]["calls"] == 0
    zero.evaluate(share(zero.model, 2, zero.world, 1))
    evaluation = zero.ledger["comm"]["other"]
    zero.train_step(share(zero.model, 2, zero.world, 1))
    assert zero.ledger["comm"]["other"] == evaluation and evaluation["elements"] > 0
    zero.train_step(share(zero.model, 3, zero.world, 1))
    assert zero.ledger["comm"]["other"]["calls"] == 0


def test_scalars_alone_are_booked_as_all_reduce(comm):
    """One small gather opens the step, one closes it, whatever the model's size."""
    found = []
    for model in (gpt(), gpt(layers=3)):
        zero = one_step(model, world_of("ordered"), 2, 3)
        entry, pieces = (
            zero.ledger["comm"]["all_reduce"],
            next(iter(zero.units.values())).layout.pieces,
        )
        found.append((entry["calls"], entry["elements"], entry["bytes_sent"]))
        assert entry["bytes_sent"] == (comm.size - 1) * entry["elements"] * 8
        assert (
            0 < entry["elements"] - (3 + pieces) < 10
        )  # losses, pieces of the norm, and what opens the step
    assert found[0] == found[1] and found[0][0] == 2
