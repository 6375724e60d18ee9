"""Worlds of 1, 2 and 4 ranks that share one GPU: the promises, and direct against staged."""

import json

import pytest
from mpirun import run_world

SIZES = (1, 2, 4)


def losses(log):
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def aware():
    """This MPI on GPU pointers: (yes or no, why). In a new process: importing MPI starts it."""
    text = "from zmpi import World; world = World(device='cpu');"
    text += " print('answer', *world.transport_for('cuda'))"
    ended = run_world(1, ["-c", text], timeout=60)
    name, why = ended.output.split("answer ")[1].strip().split(" ", 1)
    return name == "direct", why


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_all_promises_are_kept(size, precision):
    """Among them: the stages agree to the last bit, and CuPy's pool holds what the ledger names."""
    flags = ["--device", "cuda", "--transport", "staged", "--precision", precision]
    ended = run_world(size, ["-m", "zmpi.verify", *flags], timeout=300)
    assert ended.status == 0, ended.output
    assert "all promises kept" in ended.output


@pytest.mark.parametrize("size", SIZES)
def test_direct_and_staged_give_the_same_bits(size, tmp_path):
    yes, why = aware()
    if not yes:
        pytest.skip(f"this MPI is not CUDA-aware: {why}")
    found = []
    for transport in ("direct", "staged"):
        log = tmp_path / f"{transport}.jsonl"
        flags = ["--device", "cuda", "--transport", transport, "--steps", "10", "--log", log]
        ended = run_world(size, ["-m", "zmpi.train", *flags], timeout=200)
        assert ended.status == 0, ended.output
        found.append(losses(log))
    assert len(found[0]) == 10 and found[0] == found[1]


def test_the_gpu_follows_the_cpu(tmp_path):
    """The same training within the tolerance of promise P1: other kernels add in another order."""
    found = []
    for device in ("cuda", "cpu"):
        log = tmp_path / f"{device}.jsonl"
        ended = run_world(
            2, ["-m", "zmpi.train", "--device", device, "--steps", "5", "--log", log], timeout=200
        )
        assert ended.status == 0, ended.output
        found.append(losses(log))
    for (loss, norm), (loss_, norm_) in zip(*found, strict=True):
        assert loss_ == pytest.approx(loss, rel=1e-4) and norm_ == pytest.approx(norm, rel=1e-3)
