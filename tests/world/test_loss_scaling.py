"""16 bits and the loss scale: cases B02 and B05, and what is around them."""

import warnings

import numpy as np
import pytest
from training import STAGES, Plain, adamw, copied, everything, gpt, mlp, share, world_of

from models import Layer
from zmpi import SGD, AdamW, Policy, ZeRO
from zmpi.cli import progress
from zmpi.messages.comm import Communicator
from zmpi.process.errors import Agreed, UsageError

stages = pytest.mark.parametrize("stage", STAGES)
narrow = pytest.mark.parametrize("precision", ["float16", "bfloat16"])


class Planting(Communicator):
    """Puts `planted` into the slice of h.0's gradient that `victim` owns, at one reduction."""

    planted = victim = None

    def reduce_scatter(self, layout, full, out, fresh):
        super().reduce_scatter(layout, full, out, fresh)
        if self.planted is not None and layout.name == "h.0" and self.rank == self.victim:
            out[3] = self.planted


class Planted(ZeRO):
    make_communicator = Planting


def state_of(zero):
    """Every owned vector but the gradient, as bytes; the counts."""
    vectors = []
    for unit in zero.units.values():
        kinds = unit.vectors()
        vectors += kinds["parameters"] + kinds["optimizer"]
    return [vector.tobytes() for vector in vectors], zero.updates


# ---- B02: one rank alone sees the overflow -------------------------------------------------------


@stages
@pytest.mark.parametrize("planted", [np.inf, -np.inf, np.nan])
def test_an_overflow_on_one_rank_is_skipped_by_all(comm, planted, stage):
    zero = Planted(gpt(), world_of("auto"), stage, adamw(), policy=Policy("float16"))
    zero.scaler.scale = 1024.0  # which overflows nowhere by itself
    zero.train_step(share(zero.model, 1, zero.world, 1))
    assert not zero.last.skipped
    before = state_of(zero)

    zero.comm.axes[0].planted, zero.comm.axes[0].victim = planted, comm.size - 1
    zero.train_step(share(zero.model, 2, zero.world, 1))
    zero.comm.axes[0].planted = None
    assert (
        comm.allgather((zero.last.skipped, zero.scaler.scale, zero.step))
        == [(True, 512.0, 2)] * comm.size
    )
    assert not np.isfinite(zero.last.grad_norm)
    assert state_of(zero) == before

    zero.train_step(share(zero.model, 3, zero.world, 1))
    assert (
        comm.allgather((zero.last.skipped, zero.scaler.scale, zero.updates))
        == [(False, 512.0, 2)] * comm.size
    )
    plain = Plain(gpt(), adamw(), precision="float16")
    plain.scaler.scale = 1024.0
    plain.step(everything(plain.model, 1, comm.size))
    plain.scaler.scale = 512.0
    plain.step(everything(plain.model, 3, comm.size))
    for name, array in copied(zero).items():
        assert array.tobytes() == plain.parameters()[name].tobytes(), name


@stages
def test_a_scale_that_is_too_high_comes_down_until_steps_succeed(comm, stage):
    zero = ZeRO(gpt(), world_of("auto"), stage, adamw(), policy=Policy("float16"))
    zero.scaler.scale = 2.0**24
    skipped = []
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error"
        )  # a skipped step is nothing to warn of, from every rank's stderr
        for step in range(1, 15):
            zero.train_step(share(zero.model, step, zero.world, 1))
            skipped.append(zero.last.skipped)
    assert skipped[0] and not skipped[-1]
    assert zero.updates == skipped.count(False)
    assert zero.last.loss_scale == 2.0 ** (24 - skipped.count(True))


def test_all_ranks_give_up_together_if_one_overflows_again_and_again(comm, monkeypatch):
    """The command's count of skipped steps: an overflow on one rank skips the step on all."""
    monkeypatch.setattr(progress, "GIVE_UP", 3)
    policy = Policy("float16", loss_scale=1024.0)
    zero = Planted(gpt(), world_of("auto"), 3, adamw(), policy=policy)
    counted, said = progress.Progress(zero), []
    for step, planted in enumerate([None, np.inf, None, np.inf, np.nan, np.inf], start=1):
        zero.comm.axes[0].planted, zero.comm.axes[0].victim = planted, comm.size - 1
        zero.train_step(share(zero.model, step, zero.world, 1))
        try:
            counted.step()
        except progress.NothingTrained as error:
            said.append((step, str(error)))
    texts = comm.allgather(said)
    assert texts == [texts[0]] * comm.size and len(texts[0]) == 1
    assert texts[0][0][0] == 6 and "step 6: the last 3 steps were skipped" in texts[0][0][1]
    assert counted.fault() is None  # two steps were taken


@stages
def test_a_loss_that_is_not_finite_ends_a_run_whose_scale_is_1(comm, stage):
    """float32 and bfloat16: one error on all ranks, and nothing is updated."""
    for precision in ("float32", "bfloat16"):
        zero = Planted(gpt(), world_of("auto"), stage, adamw(), policy=Policy(precision))
        zero.train_step(share(zero.model, 1, zero.world, 1))
        before = state_of(zero)
        zero.comm.axes[0].planted, zero.comm.axes[0].victim = np.nan, comm.size - 1
        with pytest.raises(Agreed, match=r"step 2: .*nothing was updated"):
            zero.train_step(share(zero.model, 2, zero.world, 1))
        assert state_of(zero) == before


# ---- B05: a gradient of zero ---------------------------------------------------------------------


@stages
@narrow
def test_a_row_without_gradient_stays_as_it_is(comm, precision, stage):
    zero = ZeRO(
        mlp(),
        world_of("auto"),
        stage,
        AdamW(lr=1e-2, eps=1e-8, weight_decay=0.0),
        policy=Policy(precision),
    )
    before = copied(zero)["embed.weight"]
    for step in (1, 2, 3):
        batches = [
            (inputs % 20, targets) for inputs, targets in share(zero.model, step, zero.world, 1)
        ]
        zero.train_step(batches)
    assert zero.updates >= 1
    after = copied(zero)
    assert all(np.isfinite(array).all() for array in after.values())
    assert after["embed.weight"][20:].tobytes() == before[20:].tobytes()
    assert (after["embed.weight"][:20] != before[:20]).any()
    for unit in zero.units.values():
        kinds = unit.vectors()
        assert {vector.dtype for vector in kinds["optimizer"]} == {np.dtype(np.float32)}
        narrow = kinds["parameters"] + kinds["gradients"]
        assert {vector.dtype for vector in narrow} == {zero.policy.recipe.parameter}
        assert all(np.isfinite(vector).all() for vector in kinds["optimizer"])


# ---- masters -------------------------------------------------------------------------------------


@stages
@narrow
def test_masters_move_although_the_16_bit_weight_does_not(comm, precision, stage):
    """Steps of 1e-6 on a gain of 1: below 16 bits' 2^-11 or 2^-8, so lost without a master."""
    zero = ZeRO(
        gpt(), world_of("auto"), stage, AdamW(lr=1e-6, weight_decay=0.0), policy=Policy(precision)
    )
    zero.scaler.scale = 256.0 if precision == "float16" else 1.0
    before = copied(zero)["h.0.ln_1.weight"]
    for step in range(1, 6):
        zero.train_step(share(zero.model, step, zero.world, 1))
    assert zero.updates == 5
    assert (copied(zero)["h.0.ln_1.weight"] == before).all()
    unit = zero.units["h.0"]
    spans = unit.layout.spans(unit.part if zero.stage.optimizer else slice(0, unit.layout.padded))
    moved = [
        np.abs(unit.master.stored[start:stop] - 1).max()
        for name, start, stop in spans
        if name == "ln_1.weight"
    ]
    assert max(comm.allgather(max(moved, default=0.0))) > 3e-6  # 5 steps of at most 1e-6


@stages
def test_a_master_that_is_too_large_for_16_bits_is_reported_and_not_trained_on(comm, stage):
    """One weight, on one rank (at stage 0 on all): every rank raises the same, with its count."""
    zero = ZeRO(gpt(), world_of("auto"), stage, SGD(lr=0.0), policy=Policy("float16"))
    zero.scaler.scale = 256.0
    unit = zero.units["h.1"]
    if comm.rank == 0 or not zero.stage.optimizer:
        unit.master.stored[5] = 65_600.0  # finite in float16 is what rounds to at most 65,504
    zero.train_step(share(zero.model, 1, zero.world, 1))
    before = state_of(zero)
    for call in (zero.train_step, zero.evaluate):
        with pytest.raises(Agreed) as raised:
            call(share(zero.model, 2, zero.world, 1))
        texts = comm.allgather(str(raised.value))
        assert texts == ["step 1: 1 weights became too large for float16"] * comm.size
    assert state_of(zero) == before


def test_the_largest_16_bit_weight_is_trained_on(comm):
    zero = ZeRO(gpt(), world_of("auto"), 3, SGD(lr=0.0), policy=Policy("float16"))
    zero.scaler.scale = 1.0
    if comm.rank == 0:
        zero.units["outer"].master.stored[0] = 65_519.0  # rounds to 65,504
    zero.train_step(share(zero.model, 1, zero.world, 1))
    assert zero.evaluate(share(zero.model, 1, zero.world, 1)) > 0


# ---- proof that the scale does something ---------------------------------------------------------


class Faint(Layer):
    """y = x weight; with Whisper's loss gradients are about 1e-8 (float16's least is 6e-8)."""

    name = "faint"

    def shapes(self):
        return {"weight": (5, 7)}

    def init(self, w, key):
        w["weight"][...] = 0.25

    def forward(self, w, x):
        return x @ w["weight"], x

    def backward(self, w, dw, saved, dy):
        dw["weight"] += saved.T @ dy
        return None


class Whisper:
    def __init__(self):
        self.layers = [Faint()]

    def loss(self, y, targets, divisor):
        return float(y.sum()) * 1e-8, np.full_like(y, 1e-8 / divisor)


@stages
def test_a_loss_scale_repairs_underflow(comm, stage):
    found = {}
    for scale in (1, "auto", 2.0**20):
        policy = Policy("float16", loss_scale=scale)
        zero = ZeRO(
            Whisper(),
            world_of("auto"),
            stage,
            AdamW(lr=0.01, eps=1e-10, weight_decay=0.0),
            policy=policy,
        )
        before = copied(zero)["faint.weight"]
        zero.train_step([(np.ones((2, 5), np.float32), np.zeros(2, np.int64))])
        found[scale] = np.abs(copied(zero)["faint.weight"] - before)
    assert not found[1].any()
    # Adam's first step is lr, whatever the gradient; to float16's spacing at 0.25 and eps / 1e-8
    np.testing.assert_allclose(found["auto"], 0.01, rtol=0.03)
    np.testing.assert_allclose(found[2.0**20], 0.01, rtol=0.03)


def test_mpi_sums_of_16_bit_gradients_are_refused(comm):
    for precision in ("float16", "bfloat16"):
        for stage in STAGES:
            with pytest.raises(UsageError, match="--reduction: mpi cannot sum"):
                ZeRO(gpt(), world_of("mpi"), stage, policy=Policy(precision))


def test_a_fixed_scale_skips_an_overflow_and_stays(comm):
    zero = ZeRO(gpt(), world_of("auto"), 3, adamw(), policy=Policy("float16", loss_scale=2.0**24))
    before = state_of(zero)
    zero.train_step(share(zero.model, 1, zero.world, 1))
    assert zero.last.skipped and zero.scaler.scale == 2.0**24
    assert state_of(zero) == before


@narrow
def test_the_norm_is_that_of_the_unscaled_gradient(comm, precision):
    plain = Plain(gpt(), adamw())
    plain.step(everything(plain.model, 1, comm.size))
    for scale in (1.0, 64.0, 4096.0) if precision == "float16" else (1.0,):
        zero = ZeRO(gpt(), world_of("auto"), 3, adamw(), policy=Policy(precision))
        zero.scaler.scale = scale
        zero.train_step(share(zero.model, 1, zero.world, 1))
        assert zero.last.grad_norm == pytest.approx(
            plain.norm, rel=0.01
        )  # bfloat16 keeps 8 bits of weights and gradients
