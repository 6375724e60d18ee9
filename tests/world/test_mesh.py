"""Two axes: a stage within groups of ranks, another between the groups.

Bits, volumes and memory of all ten placements, in groups of 2 (4 ranks) and of 3 (6 ranks), with
the nodes' ranks interleaved, so that a rank's number is neither its owner's nor the launcher's.
"""

import numpy as np
import pytest
from faults.planted_groups import GROUPED, shuffled_worlds
from training import adamw, copied, gpt, run, share

import zmpi.verify
from zmpi import Policy, World, ZeRO
from zmpi.core.formulas import elements_moved, elements_per_axis, placements, state_bytes
from zmpi.process.agree import same_on_all_ranks
from zmpi.process.errors import UsageError
from zmpi.proof.lifetimes import Counting
from zmpi.proof.plain import Plain
from zmpi.proof.trial import SMALL_MODELS, Trial
from zmpi.verify import promises

SIZES = (4, 6)
ALL = [tuple(stage.number for stage in one.stages) for one in placements(2)]
MOVING = ("all_gather", "reduce_scatter")


@pytest.fixture(scope="module")
def grouped():
    """Groups of 2 on 4 ranks, of 3 on 6; the ranks of two nodes take turns."""
    rank, size = (lambda world: (world.rank, world.size))(World(device="cpu"))
    return World(device="cpu", group=size // 2, node="ab"[rank % 2])


def outcome(world, stage, accumulate=1, precision="float32", **policy):
    policy = Policy(precision, **policy)
    return run(gpt(), world, stage, adamw(), accumulate, policy=policy)


def same(found, expected):
    assert found[:2] == expected[:2]  # losses, norms
    for name, array in expected[2].items():
        assert np.array_equal(found[2][name], array), name


def test_ranks_are_numbered_node_by_node(grouped, comm):
    half = comm.size // 2
    assert list(grouped.launched) == [*range(0, comm.size, 2), *range(1, comm.size, 2)]
    assert comm.allgather(grouped.rank) == [r // 2 + half * (r % 2) for r in range(comm.size)]
    zero = ZeRO(gpt(), grouped, (3, 1))
    words = f"{comm.size} ranks = 2 groups of {half}; stage 3 within, 1 between"
    assert str(zero.schedule).splitlines()[0] == words
    assert not grouped.straddles and [axis.size for axis in grouped.axes] == [half, 2]


@pytest.mark.parametrize("reduction", ["mpi", "ordered"])
def test_with_one_micro_batch_all_placements_give_the_same_bits(grouped, reduction):
    world = grouped.twin(reduction=reduction)
    expected = outcome(world, (0, 0))
    for stage in ALL[1:]:
        same(outcome(world, stage, prefetch=sum(stage) % 2, recompute=bool(stage[1] % 2)), expected)


def test_with_mpi_the_bits_depend_on_where_gradients_are_kept_alone(grouped):
    world, first = grouped.twin(reduction="mpi"), {}
    for placed, stage in zip(placements(2), ALL, strict=True):
        found = outcome(world, stage, accumulate=3)
        same(found, first.setdefault(placed.rung("gradients"), found))
    assert len(first) == 3


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_ordered_adds_up_in_blocks_of_a_group_at_every_placement(grouped, precision):
    """As the loop without ZeRO does, over the global batch of 12 micro-batches."""
    world = grouped.twin(reduction="ordered")
    accumulate = 12 // world.size
    plain = Plain(gpt(), adamw(), precision, seed=0)
    plain.block = world.axes[0].size
    for stage in ALL if precision == "float32" else [(0, 0), (3, 1), (3, 3)]:
        zero = ZeRO(gpt(), world, stage, adamw(), policy=Policy(precision))
        reference = plain if stage == ALL[0] else None
        losses = [zero.train_step(share(zero.model, s, world, accumulate)) for s in (1, 2)]
        if reference:
            alone = World(device="cpu").twin(alone=True)
            taken = [plain.step(share(zero.model, s, alone, 12)) for s in (1, 2)]
            expected = [step.loss for step in taken], copied(zero)
            assert losses == expected[0] and zero.last.grad_norm == taken[-1].norm
            for name, part in taken[-1].weights.items():
                assert np.array_equal(copied(zero)[name], part.values.reshape(part.shape)), name
        assert losses == expected[0]
        for name, array in copied(zero).items():
            assert np.array_equal(array, expected[1][name]), name


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("reduction", ["mpi", "ordered"])
def test_volumes_within_and_between_are_exact(grouped, comm, reduction, accumulate):
    world = grouped.twin(reduction=reduction)
    inner, outer = (axis.size for axis in world.axes)
    for placed, stage in zip(placements(2), ALL, strict=True):
        zero = ZeRO(gpt(), world, stage, adamw())
        zero.train_step(share(zero.model, 1, world, accumulate))
        sizes = {name: unit.layout.elements for name, unit in zero.units.items()}
        form = zero.schedule, sizes, accumulate, zero.comm.ordered
        within, between = (elements_moved(one, *form) for one in placed.stages)
        booked = zero.ledger["comm"]
        for kind in MOVING:
            entry = booked[kind]
            assert (entry["elements"], entry["elements_between"]) == (within[kind], between[kind])
            payload = comm.allreduce(entry["bytes_sent"] - entry["padding_bytes"])
            across = comm.allreduce(entry["bytes_between"] - entry["padding_between"])
            assert across == between[kind] * (outer - 1) * 4
            assert payload - across == within[kind] * (inner - 1) * outer * 4
        assert booked["all_reduce"]["bytes_between"] == 0
        totals = sum(within.values()), sum(between.values())
        closed = elements_per_axis(placed, sum(sizes.values()), accumulate, zero.comm.ordered)
        assert [*totals] == closed  # each unit of the GPT is gathered twice


def test_owned_bytes_and_full_vectors_are_those_of_the_placement(grouped):
    class Counted(ZeRO):
        make_ledger = Counting

    for placed, stage in zip(placements(2), ALL, strict=True):
        for prefetch in (0, 1):
            zero = Counted(gpt(), grouped, stage, adamw(), policy=Policy(prefetch=prefetch))
            zero.ledger.most.clear()
            zero.train_step(share(zero.model, 1, grouped, 2))
            padded = sum(unit.layout.padded for unit in zero.units.values())
            recipe = zero.policy.recipe
            formula = state_bytes(placed, padded, zero.comm.sizes, recipe)
            owned = [unit.owned_bytes() for unit in zero.units.values()]
            assert {kind: sum(one[kind] for one in owned) for kind in formula} == formula
            assert zero.ledger.most["full"] == ((prefetch + 1) if stage[0] == 3 else 0)
            assert zero.ledger.living["full"] == 0


def test_a_group_of_all_ranks_moves_the_flat_worlds_bytes(comm):
    """One micro-batch gives its bits too. Groups of one rank are no groups."""
    flat, one = World(device="cpu"), World(device="cpu", group=comm.size)
    assert World(device="cpu", group=1).axes[0].size == comm.size
    for stage in (0, 2, 3):
        engines = [ZeRO(gpt(), world, stage, adamw()) for world in (flat, one)]
        losses = [zero.train_step(share(zero.model, 1, flat, 1)) for zero in engines]
        assert losses[0] == losses[1]
        booked = [zero.ledger["comm"] for zero in engines]
        for kind in MOVING:
            for name in ("elements", "bytes_sent", "padding_bytes"):
                assert booked[0][kind][name] == booked[1][kind][name], (kind, name)
            assert booked[1][kind]["bytes_between"] == 0


@pytest.mark.sizes(4)
def test_a_checkpoint_loads_at_any_placement_and_on_fewer_ranks(grouped, comm, folder):
    saved = ZeRO(gpt(), grouped, (3, 1), adamw())
    for step in (1, 2):
        saved.train_step(share(saved.model, step, grouped, 1))
    saved.save(folder)
    flat, alone = World(device="cpu"), World(device="cpu").twin(alone=True)
    expected = copied(saved)
    for world, stage in ((grouped, (3, 3)), (grouped, (2, 0)), (flat, 3), (alone, 0)):
        loaded = ZeRO(gpt(), world, stage, adamw())
        loaded.load(folder)
        for name, array in copied(loaded).items():
            assert np.array_equal(array, expected[name]), name
        if world is grouped:
            batches = share(saved.model, 3, grouped, 1)
            other = ZeRO(gpt(), grouped, (3, 1), adamw())
            other.load(folder)
            assert loaded.train_step(batches) == other.train_step(batches)
            after = copied(other)
            for name, array in copied(loaded).items():
                assert np.array_equal(array, after[name]), name


def test_what_cannot_be_cut_is_one_error(comm):
    bad = {
        (): {"group": comm.size - 1},
        ("x",): {"group": 0},
        ("node",): {"group": "node", "node": "a" if comm.rank == 0 else "b"},
        ("differs",): {"group": 2 if comm.rank else comm.size},
    }
    for settings in bad.values():
        with pytest.raises(UsageError, match=r"^--group: "):
            World(device="cpu", **settings)
    world = World(device="cpu", group=2)
    for stage in ((1, 3), (3, 1, 0), (4, 0), (True, 0)):
        with pytest.raises(UsageError, match=r"^--stage: "):
            ZeRO(gpt(), world, stage, adamw())
    with pytest.raises(UsageError, match="needs a --group"):
        ZeRO(gpt(), World(device="cpu"), (3, 1), adamw())


def test_errors_name_the_launchers_rank(grouped, comm):
    """Here the last rank of the first node, which is the launcher's rank size - 2."""
    place = comm.size // 2 - 1
    assert grouped.launched[place] == comm.size - 2 != place
    odd = 1 + (grouped.rank == place)
    with pytest.raises(UsageError, match=rf"got 1 on rank 0 and 2 on rank {comm.size - 2}$"):
        same_on_all_ranks(grouped, {"--seed": odd})
    zero = ZeRO(gpt(), grouped, (3, 1), adamw())
    ((inputs, targets),) = share(zero.model, 1, grouped, 1)
    inputs[0, 0] = -1 if grouped.rank == place else 0
    with pytest.raises(UsageError, match=rf"^rank {comm.size - 2}, micro-batch 0: inputs"):
        zero.train_step([(inputs, targets)])


@pytest.mark.sizes(4)
@pytest.mark.parametrize("name", GROUPED)
def test_a_mistake_between_axes_is_a_red_row(name):
    planted, group = GROUPED[name]
    trial = Trial(shuffled_worlds()[group], models={"MLP": SMALL_MODELS["MLP"]}, model="MLP")
    check = getattr(zmpi.verify, planted.found_by)
    with planted.planted():
        rows = [row for row in promises(trial, (check,)) if not row.passed]
    assert rows
