"""Checkpoints through the Python API: go on to the same bits, refuse what is damaged or foreign, and cost no memory."""

import resource
import tracemalloc

import numpy as np
import pytest
from training import STAGES, adamw, copied, gpt, mlp, sgd, share

from models import GPT
from models.layer import Layer
from zmpi import Policy, ZeRO
from zmpi.blocks import BLOCK
from zmpi.checkpoint import Keeper, find
from zmpi.folder import newest
from zmpi.guard import Stopped, UsageError
from zmpi.manifest import Manifest
from zmpi.precision import RECIPES

SIZES = (1, 3)


def engine(world, stage=3, precision="float32", model=None, optimizer=None):
    """An engine whose loss scale, if it has one, doubles every 3 good steps: so that what is saved of it matters."""
    optimizer = optimizer or adamw(decay_steps=10)
    return ZeRO(model or gpt(), world, stage, optimizer, policy=Policy(precision, loss_scale_window=3))


def steps(zero, first, last, accumulate=1):
    """The losses, norms and scales of steps first ... last."""
    numbers = []
    for step in range(first, last + 1):
        loss = zero.train_step(share(zero.model, step, zero.world, accumulate))
        numbers.append((loss.hex(), zero.last.grad_norm.hex(), zero.last.loss_scale, zero.updates))
    return numbers


def state(zero):
    """Everything that an engine carries from step to step, as bytes: of this rank."""
    found = {}
    for name, unit in zero.units.items():
        vectors = {"parameters": unit.parameters, "master": unit.master, **unit.moments}
        found |= {(name, kind): vector.tobytes() for kind, vector in vectors.items() if vector is not None}
    return found | {"counts": (zero.step, zero.updates, zero.scaler.scale, zero.scaler.good_steps, zero.seed)}


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_is_the_run_that_never_stopped(world, folder, stage, precision, accumulate):
    """Losses, norms, loss scales, Adam's count, parameters and moments, all to the bit (B07)."""
    straight = engine(world, stage, precision)
    expected = steps(straight, 1, 10, accumulate)
    first = engine(world, stage, precision)
    assert steps(first, 1, 5, accumulate) == expected[:5]
    first.save(folder)
    second = engine(world, stage, precision)
    second.load(folder)
    assert state(second) == state(first)
    assert steps(second, 6, 10, accumulate) == expected[5:]
    assert state(second) == state(straight)


@pytest.mark.parametrize("optimizer", [sgd(), sgd(momentum=0.0)], ids=["momentum", "plain"])
def test_sgd_goes_on_too(world, folder, optimizer):
    first = engine(world, 2, optimizer=optimizer)
    steps(first, 1, 3)
    first.save(folder)
    second = engine(world, 2, optimizer=optimizer)
    second.load(folder)
    assert steps(second, 4, 6) == steps(first, 4, 6) and state(second) == state(first)


def test_saving_changes_nothing(world, folder):
    zero, other = engine(world), engine(world)
    for step in range(1, 5):
        zero.save(folder, keep=2)
        assert steps(zero, step, step) == steps(other, step, step)
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 2


def test_evaluation_and_the_log_do_not_see_a_save(world, folder):
    """What a load gathers is booked under "other", so that a step's account stays the step's."""
    zero = engine(world, 0)
    steps(zero, 1, 1)
    before = zero.ledger["comm"]["all_gather"]
    zero.save(folder)
    zero.load(folder)
    assert zero.ledger["comm"]["all_gather"] == before


def test_a_checkpoint_of_one_precision_goes_on_in_another(world, folder):
    """Masters and moments are the same; 16-bit parameters are the masters, rounded."""
    first = engine(world, 1, "bfloat16")
    steps(first, 1, 3)
    first.save(folder)
    for precision in ("float32", "float16"):
        second = engine(world, 3, precision)
        second.load(folder)
        for name, unit in second.units.items():
            for kind, shard in unit.shards().items():
                assert shard.tobytes() == first.units[name].shards()[kind].tobytes(), (name, kind)
            rounded = unit.shards()["master"].astype(RECIPES[precision].parameter)
            assert unit.parameters.tobytes() == rounded.tobytes()
        assert second.scaler.scale == second.policy.scaler().scale, "another precision's loss scale says nothing of this one's"
        second.train_step(share(second.model, 4, world, 1))


class Line(Layer):
    """y = x * slope + shift: two parameters, fewer than there are ranks."""

    name = "line"

    def shapes(self):
        return {"slope": (1,), "shift": (1,)}

    def init(self, w, key):
        w["slope"][...], w["shift"][...] = 0.5, 0.25

    def forward(self, w, x):
        return x * w["slope"] + w["shift"], x

    def backward(self, w, dw, saved, dy):
        dw["slope"] += (dy * saved).sum()
        dw["shift"] += dy.sum()


class Lines:
    """Fits a line to targets; the loss is half the squared distance."""

    def __init__(self):
        self.layers = [Line()]

    def loss(self, y, targets, divisor):
        return float(((y - targets) ** 2).sum() / 2), (y - targets) / np.float32(divisor)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_own_nothing_but_padding_save_and_load(world, folder, stage):
    """B08: more ranks than parameters."""
    batch = [(np.float32([1.0, 2.0 + world.rank]), np.float32([3.0, 1.0]))]
    first = engine(world, stage, model=Lines())
    first.train_step(batch)
    first.save(folder)
    second = engine(world, stage, model=Lines())
    second.load(folder)
    assert first.train_step(batch) == second.train_step(batch) and state(first) == state(second)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(world, folder):
    """A folder with a checkpoint after 3 steps."""
    zero = engine(world)
    steps(zero, 1, 3)
    zero.save(folder)
    return folder


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"model": GPT(layers=2, width=14, heads=2, context=7, vocab=24)}, r"wte.weight: shape \(23, 14\).*shape \(24, 14\)"),
        ({"model": GPT(layers=3, width=14, heads=2, context=7, vocab=23)}, r"h.2.ln_1.weight: missing in the checkpoint"),
        ({"model": GPT(layers=2, width=14, heads=7, context=7, vocab=23)}, r"heads: 2 in the checkpoint, 7 in this model"),
        ({"model": mlp()}, r"wte.weight: shape \(23, 14\) in the checkpoint, missing in this model"),
        ({"optimizer": sgd()}, r"optimizer AdamW in the checkpoint, SGD in this run"),
        ({"precision": "float64"}, r"master: float32 in the checkpoint, float64 in this run"),
    ],
    ids=["vocabulary", "layers", "heads", "model", "optimizer", "master"],
)
def test_another_training_is_refused_by_the_first_name(world, saved, other, told):
    zero = engine(world, **other)
    before = state(zero)
    with pytest.raises(UsageError, match=told):
        zero.load(saved)
    assert state(zero) == before


def test_every_damage_is_found_and_nothing_is_loaded(world, comm, saved):
    """100 single flipped bits and truncations over all files: each one named, on all ranks, the engine as it was."""
    zero = engine(world)
    steps(zero, 1, 1)
    before, rng = state(zero), np.random.default_rng(3)
    files = sorted([*newest(saved).iterdir(), saved / "latest"])
    for trial in range(100):
        file = files[trial % len(files)]
        good = file.read_bytes()
        comm.barrier()
        position, cut = int(rng.integers(8 * len(good))), trial % 5 == 4
        if world.rank == 0:
            damaged = bytearray(good)
            damaged[position // 8] ^= 1 << position % 8
            file.write_bytes(good[: position // 8] if cut else damaged)
        comm.barrier()
        with pytest.raises(UsageError, match=file.name):
            zero.load(saved)
        assert state(zero) == before, file
        comm.barrier()
        if world.rank == 0:
            file.write_bytes(good)
        comm.barrier()
    zero.load(saved)
    assert zero.step == 3


def test_a_missing_file_is_named(world, comm, saved):
    zero = engine(world)
    for name in (f"rank-{world.size - 1:04d}.bin", "manifest.sha256"):
        if world.rank == 0:
            (newest(saved) / name).rename(saved / "away")
        comm.barrier()
        with pytest.raises(UsageError, match=f"{name}: No such file"):
            zero.load(saved)
        comm.barrier()
        if world.rank == 0:
            (saved / "away").rename(newest(saved) / name)
        comm.barrier()
    with pytest.raises(UsageError, match="nowhere: no such folder"):
        zero.load(saved / "nowhere")


def test_a_second_job_is_refused(world, saved):
    keeper = Keeper(saved, world)
    with pytest.raises(UsageError, match="in use by another job"):
        Keeper(saved, world)
    keeper.close()
    engine(world).save(saved)


@pytest.mark.parametrize("limit", [0, 1000, 100_000], ids=["not a byte", "in the first unit", "on one rank only"])
def test_a_full_disk_leaves_the_last_checkpoint_and_the_training(world, comm, saved, limit):
    """By a limit on the size of files, as if the disk were full: an error on all ranks, and training goes on unharmed."""
    zero, other = engine(world), engine(world)
    zero.load(saved)
    other.load(saved)
    before = sorted(path.name for path in saved.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if limit < 100_000:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        elif world.rank == world.size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
        with pytest.raises(UsageError, match=r"saving-step-00000003-save-2/rank-\d+.bin: File too large"):
            zero.save(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    comm.barrier()
    assert sorted(path.name for path in saved.iterdir()) == before
    assert steps(zero, 4, 5) == steps(other, 4, 5) and state(zero) == state(other)
    zero.save(saved)
    assert find(saved, world)["step"] == 5


def test_a_manifest_that_cannot_be_written_is_an_error_on_all_ranks(world, comm, saved, monkeypatch):
    def full(*_):
        raise ValueError("manifest.json: No space left on device")

    monkeypatch.setattr(Manifest, "write", full)
    with pytest.raises(UsageError, match=r"manifest.json: No space left on device( \(on rank 0\))?$"):
        engine(world).save(saved)
    comm.barrier()
    monkeypatch.undo()
    assert find(saved, world)["step"] == 3 and len(list(saved.iterdir())) == 3


def test_a_file_in_the_folders_place_is_an_error_on_all_ranks(world, comm, folder):
    if world.rank == 0:
        (folder / "file").write_text("")
    comm.barrier()
    with pytest.raises(UsageError, match=r"file: not a folder"):
        engine(world).save(folder / "file")
    with pytest.raises(UsageError, match=r"deeper: No such file or directory"):
        engine(world).save(folder / "missing" / "deeper")


# ---- a signal that is agreed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "status"), [(15, 143), (10, 0)], ids=["SIGTERM", "SIGUSR1"])
def test_a_signal_on_one_rank_stops_all_before_the_next_step(world, number, status):
    zero = engine(world)
    steps(zero, 1, 2)
    before = state(zero)
    world.guard.stop_requested = number if world.rank == world.size - 1 else 0
    try:
        with pytest.raises(Stopped) as stopped:
            zero.train_step(share(zero.model, 3, world, 1))
    finally:
        world.guard.stop_requested = 0
    assert stopped.value.status == status and state(zero) == before


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_saving_takes_no_memory_and_loading_one_block(world, folder, stage, precision):
    """A unit is 0.5 or 0.8 MiB here, all of the state 13 MiB. Beside a block: what JSON takes, and small change."""
    zero = engine(world, stage, precision, model=GPT(layers=5, width=128, heads=2, context=7, vocab=1000))
    smallest = min(4 * unit.layout.padded for unit in zero.units.values())
    small_change = 200 << 10
    peaks = []
    for call in (zero.save, zero.load):
        tracemalloc.start()
        call(folder)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    rounding = 0 if precision == "float32" else smallest  # where a 16-bit vector is compared with infinity
    assert small_change < smallest / 2
    assert peaks[0] < small_change, peaks
    assert peaks[1] < BLOCK + small_change + rounding, peaks


def test_a_rank_reads_its_share_of_the_check_and_the_ranges_it_needs(world, folder, monkeypatch):
    """At stage 3: together the ranks read each file about twice, each rank no more than its part of that."""
    zero = engine(world, model=GPT(layers=5, width=128, heads=2, context=7, vocab=1000))
    zero.save(folder)
    read, real = [], np.ndarray.__len__
    from zmpi import blocks

    def counting(descriptor, buffers, offset):
        read.append(sum(real(buffer) for buffer in buffers))
        return preadv(descriptor, buffers, offset)

    preadv = blocks.os.preadv
    monkeypatch.setattr(blocks.os, "preadv", counting)
    zero.load(folder)
    total = sum(record.bytes for record in find(folder, world).files)
    assert sum(read) <= 2 * total / world.size + 3 * BLOCK
    assert np.isfinite(copied(zero)["wte.weight"]).all()
