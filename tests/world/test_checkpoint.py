"""Checkpoints from Python: training continues with the same bits, and a save costs no memory."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from saving import engine, state, steps
from training import STAGES, copied, micro_batch, sgd, share

from models import GPT
from models.layer import Layer
from zmpi import ZeRO
from zmpi.export import export_weights
from zmpi.numbers.precision import RECIPES
from zmpi.saving import blocks
from zmpi.saving.blocks import CHECKED_BYTES
from zmpi.saving.checkpoint import find

SIZES = (1, 3)


# ---- the same bits -------------------------------------------------------------------------------


@pytest.mark.sizes(3)
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
            assert unit.parameters.stored.tobytes() == rounded.tobytes()
        assert second.scaler.scale == second.policy.scaler().scale, (
            "another precision's loss scale says nothing of this one's"
        )
        second.train_step(share(second.model, 4, world, 1))


def test_a_checkpoint_of_a_version_that_padded_otherwise_is_loaded(world):
    """It was saved on 2 ranks with 24 pieces in place of 192.

    Element c of the model (units in order, without padding) had the master c / 8, the first moment
    c / 8 + 1000 and the second c / 8 + 2000.
    """
    zero = ZeRO(GPT(layers=1, width=6, heads=2, context=4, vocab=7), world, 1)
    manifest = zero.load(Path(__file__).parent.parent / "saved_with_24_pieces")
    assert (zero.step, zero.updates) == (5, 4)
    first = 0
    for unit, saved in zip(zero.units.values(), manifest["units"], strict=True):
        layout = unit.layout
        assert saved["padded"] != layout.padded
        places = np.full(layout.padded, np.nan)
        for view in layout.views(places).values():
            view.ravel()[...] = first + np.arange(view.size)
            first += view.size
        mine, padding = places[unit.part], np.isnan(places[unit.part])
        for k, shard in enumerate(unit.shards().values()):
            assert shard.tolist() == np.where(padding, 0, mine / 8 + 1000 * k).tolist()
    assert first == 588


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


# ---- weights for other tools ---------------------------------------------------------------------


@pytest.mark.sizes(3)
@pytest.mark.parametrize("stage", STAGES)
def test_an_export_is_the_trained_model(world, folder, stage):
    """B12: every tensor, the tied one once, and one process's logits, all to the bit."""
    zero = engine(world, stage)
    steps(zero, 1, 5)
    zero.save(folder)
    if world.rank == 0:
        export_weights(find(folder, world.twin(alone=True)), folder / "gpt2")
    world.share(None)  # it is written
    exported = load_file(folder / "gpt2" / "model.safetensors")
    trained = copied(zero)
    assert {name: tensor.tobytes() for name, tensor in exported.items()} == {
        name: tensor.tobytes() for name, tensor in trained.items()
    }
    assert sum(tensor.size for tensor in exported.values()) == sum(
        unit.layout.elements for unit in zero.units.values()
    )
    tokens = micro_batch(zero.model, 6, world.rank)[0]
    expected, y = zero.forward(tokens), tokens
    for layer in zero.model.layers:
        prefix = "" if layer.unit else f"{layer.name}."
        y, _ = layer.forward({name: exported[prefix + name] for name in layer.shapes()}, y)
    assert y.tobytes() == expected.tobytes()


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "float32"), (1, "float16"), (3, "float32"), (3, "float16")]
)
def test_saving_takes_no_memory_and_loading_one_block(world, folder, stage, precision):
    """A unit is 0.5 or 0.8 MiB, the state 13 MiB. On top of a block: JSON, and small change."""
    zero = engine(
        world, stage, precision, model=GPT(layers=5, width=128, heads=2, context=7, vocab=1000)
    )
    smallest = min(4 * unit.layout.padded for unit in zero.units.values())
    small_change = 200 << 10
    peaks = []
    for call in (zero.save, zero.load):
        tracemalloc.start()
        call(folder)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # where a 16-bit vector is compared with infinity
    rounding = 0 if precision == "float32" else smallest
    assert small_change < smallest / 2
    assert peaks[0] < small_change, peaks
    assert peaks[1] < CHECKED_BYTES + small_change + rounding, peaks


def test_a_rank_reads_its_share_of_the_check_and_the_ranges_it_needs(world, folder, monkeypatch):
    """At stage 3 the ranks together read each file about twice, each rank only its part."""
    zero = engine(world, model=GPT(layers=5, width=128, heads=2, context=7, vocab=1000))
    zero.save(folder)
    read, real = [], np.ndarray.__len__

    def counting(descriptor, buffers, offset):
        read.append(sum(real(buffer) for buffer in buffers))
        return preadv(descriptor, buffers, offset)

    preadv = blocks.os.preadv
    monkeypatch.setattr(blocks.os, "preadv", counting)
    zero.load(folder)
    total = sum(record.bytes for record in find(folder, world).files)
    assert sum(read) <= 2 * total / world.size + 3 * CHECKED_BYTES
    assert np.isfinite(copied(zero)["wte.weight"]).all()
