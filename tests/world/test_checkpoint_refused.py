"""Checkpoints refused: foreign, damaged, missing, locked, a full disk; and the agreed signal."""

import resource

import numpy as np
import pytest
from saving import engine, state, steps
from training import mlp, sgd, share

import zmpi.saving.checkpoint
from models import GPT
from zmpi import ZeRO
from zmpi.cli.resume import init_from
from zmpi.core.step import Stopped
from zmpi.process.errors import UsageError
from zmpi.saving import pretrained
from zmpi.saving.checkpoint import Keeper, find
from zmpi.saving.folder import newest
from zmpi.saving.manifest import Manifest

SIZES = (1, 3)


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
        (
            {"model": GPT(layers=2, width=14, heads=2, context=7, vocab=24)},
            r"wte.weight: shape \(23, 14\).*shape \(24, 14\)",
        ),
        (
            {"model": GPT(layers=3, width=14, heads=2, context=7, vocab=23)},
            r"h.2.ln_1.weight: missing in the checkpoint",
        ),
        (
            {"model": GPT(layers=2, width=14, heads=7, context=7, vocab=23)},
            r"heads: 2 in the checkpoint, 7 in this model",
        ),
        (
            {"model": mlp()},
            r"wte.weight: shape \(23, 14\) in the checkpoint, missing in this model",
        ),
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


@pytest.mark.sizes(3)
def test_every_damage_is_found_and_nothing_is_loaded(world, comm, saved):
    """100 flipped bits and truncations over all files: each is reported, the engine unchanged."""
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


@pytest.mark.parametrize(
    "limit", [0, 1000, 100_000], ids=["not a byte", "in the first unit", "on one rank only"]
)
def test_a_full_disk_leaves_the_last_checkpoint_and_the_training(world, comm, saved, limit):
    """A limit on file size, like a full disk: an error on all ranks, and training continues."""
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
        with pytest.raises(
            UsageError, match=r"saving-step-00000003-save-2/rank-\d+.bin: File too large"
        ):
            zero.save(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    comm.barrier()
    assert sorted(path.name for path in saved.iterdir()) == before
    assert steps(zero, 4, 5) == steps(other, 4, 5) and state(zero) == state(other)
    zero.save(saved)
    assert find(saved, world)["step"] == 5


def test_a_manifest_that_cannot_be_written_is_an_error_on_all_ranks(
    world, comm, saved, monkeypatch
):
    def full(*_):
        raise ValueError("manifest.json: No space left on device")

    monkeypatch.setattr(Manifest, "write", full)
    with pytest.raises(
        UsageError, match=r"manifest.json: No space left on device( \(on rank 0\))?$"
    ):
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
    with pytest.raises(UsageError, match="deeper: its parent folder must exist"):
        engine(world).save(folder / "missing" / "deeper")


# ---- a signal that is agreed ---------------------------------------------------------------------


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


@pytest.mark.sizes(3)
def test_ranks_with_other_weights_to_start_from_are_refused(world, folder):
    """Each rank fills its own shard: two files would make a third model."""
    zero = ZeRO(GPT(layers=1, width=6, heads=3, context=5, vocab=11), world, 3, sgd())
    shapes = {n: s for unit in zero.units.values() for n, s in _full(unit.layout).items()}
    sizes = {"layers": 1, "width": 6, "heads": 3, "context": 5, "vocab": 11}
    mine = folder.with_name(f"{folder.name}-{world.rank}")
    pretrained.write(mine, sizes, shapes, lambda name: np.full(shapes[name], world.rank == 2))
    before = state(zero)
    told = (
        r"--init-from: checksum of model.safetensors: expected the same on all ranks, got \d+ on "
        r"rank 0 and \d+ on rank 2"
    )
    with pytest.raises(UsageError, match=told):
        init_from(zero, mine)
    assert state(zero) == before


def _full(layout):
    return {layout.prefix + name: shape for name, shape in layout.shapes.items()}


@pytest.mark.sizes(3)
def test_a_folder_that_is_another_on_one_rank_is_refused(world, comm, saved, monkeypatch):
    """Each node has its own disk, and one folder has another training's checkpoint."""
    real = zmpi.saving.checkpoint.read_checkpoint

    def read(folder):
        manifest = real(folder)
        if comm.rank == 2:
            manifest.entries["seed"] += 1
        return manifest

    monkeypatch.setattr(zmpi.saving.checkpoint, "read_checkpoint", read)
    zero = engine(world)
    before = state(zero)
    with pytest.raises(UsageError, match="manifest: expected the same on all ranks, got "):
        zero.load(saved)
    assert state(zero) == before
