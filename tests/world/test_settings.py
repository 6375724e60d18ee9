"""Wrong numbers and differing ranks in World, ZeRO and save are one error on all ranks."""

import math

import numpy as np
import pytest
from training import adamw, gpt, share, train

from zmpi import Policy, World, ZeRO
from zmpi import bench as bench_command
from zmpi import train as train_command
from zmpi.process.errors import UsageError

SIZES = (1, 3)


@pytest.mark.parametrize("timeout", [True, 0, -1, math.nan, math.inf, None, "300"])
def test_a_timeout_is_a_number_above_0(timeout):
    with pytest.raises(UsageError, match=r"^--timeout: expected a finite number above 0, got"):
        World(device="cpu", timeout=timeout)


def test_a_stage_a_seed_and_a_number_kept_are_whole_numbers(world, folder):
    for stage in (True, 1.0, 4, -1, None, "3"):
        with pytest.raises(UsageError, match=r"^--stage: expected 0, 1, 2 or 3, got"):
            ZeRO(gpt(), world, stage)
    for seed in (True, 1.5, math.nan, None, "0"):
        with pytest.raises(UsageError, match=r"^--seed: expected a whole number, got"):
            ZeRO(gpt(), world, seed=seed)
    zero = ZeRO(gpt(), world, np.int64(2), adamw(), seed=np.int64(7))
    for keep in (True, 0, 1.5, None):
        with pytest.raises(
            UsageError, match=r"^--keep: expected a whole number of at least 1, got"
        ):
            zero.save(folder / "kept", keep)
    assert not (folder / "kept").exists()


def test_numbers_of_numpy_are_saved_and_loaded(world, folder):
    """They were written into the manifest's JSON, which knows no such number."""
    optimizer = adamw(lr=np.float32(0.5), warmup=np.int64(2))
    zero = ZeRO(gpt(), world, np.int64(2), optimizer, np.int64(7), Policy(prefetch=np.int64(1)))
    train(zero, 1, steps=1)
    zero.save(folder / "numpy", np.int64(2))
    again = ZeRO(gpt(), world, 3, adamw(lr=0.5, warmup=2))
    again.load(folder / "numpy")
    assert (again.step, again.seed) == (1, 7)
    again.train_step(share(again.model, 1, world, 1))


@pytest.mark.sizes(3)
def test_ranks_that_keep_different_numbers_are_told_so(world, folder, comm):
    zero = ZeRO(gpt(), world, 3, adamw())
    with pytest.raises(UsageError, match=r"^--keep: expected the same on all ranks, got 3 on"):
        zero.save(folder / "kept", 4 if comm.rank == 2 else 3)
    assert not (folder / "kept").exists()


TEXT = bytes(range(32, 127)) * 50
OTHERS = {  # what the last rank reads instead
    "of the same length": (TEXT[:3000] + b"?" + TEXT[3001:], "crc32"),
    "cut short": (TEXT[:-900], "tokens"),
    "cut short, its end filled up": (TEXT[:-900] + bytes(900), "crc32"),
}


@pytest.mark.sizes(3)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("command", [train_command, bench_command], ids=["train", "bench"])
def test_ranks_that_read_different_texts_are_told_so(comm, folder, command, other):
    """A copy on each node, say. Nothing is trained, and no file is opened to be written."""
    text, differs = OTHERS[other]
    path = folder / f"text-{comm.rank}"
    path.write_bytes(text if comm.rank == 2 else TEXT)
    tiny = [
        "--device",
        "cpu",
        "--layers",
        "1",
        "--width",
        "8",
        "--heads",
        "2",
        "--context",
        "8",
        "--micro-batch",
        "1",
    ]
    out = ["--log" if command is train_command else "--json", str(folder / "out")]
    with pytest.raises(
        UsageError, match=rf"^--data: {differs}: expected .*, got .* on rank 0 and .* on rank 2"
    ):
        command.main([*tiny, *out, "--data", str(path)])
    assert not (folder / "out").exists()
