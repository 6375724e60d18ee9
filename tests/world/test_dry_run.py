"""The planner's dry run is a real run: the same ledger, the same arrays, to the byte."""

import itertools

import numpy as np
import pytest
from training import STAGES, adamw, gpt, micro_batch, mlp, share, world_of

from models import GPT, MLP
from zmpi import Policy, ZeRO
from zmpi.cost.dryrun import CountedWorld, DryRun, Memo
from zmpi.cost.probes import ProbedZeRO, TracedZeRO

TOLERANCE = 0.02  # of the peak: tracemalloc includes Python's objects, some kB (promise: 10 %)


def without_times(comm):
    return {
        kind: {name: n for name, n in amounts.items() if name != "blocked_s"}
        for kind, amounts in comm.items()
    }


def without_process(memory):
    return {kind: nbytes for kind, nbytes in memory.items() if kind != "peak"}


def policy_of(precision, *options):
    """A fixed loss scale: a first step that overflows is skipped, and moves less."""
    return Policy(precision, *options, loss_scale=1.0 if precision == "float16" else "auto")


def both(model, world, stage, policy, accumulate=1, b=2, kind=ZeRO, memo=None):
    """The ledgers of a real engine's step and of a dry run."""
    zero = kind(model, world, stage, adamw(), policy=policy)
    getattr(zero, "traced_step", zero.train_step)(share(model, 1, world, accumulate, b=b))
    dry = DryRun(
        model, CountedWorld(world.size, world.rank, world.reduction), stage, adamw(), policy, memo
    )
    return zero.ledger, dry.count_step(b, accumulate)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("model", [gpt, mlp])
def test_the_ledger_of_a_dry_run_is_that_of_a_real_run(comm, model, precision, stage):
    memo = Memo()
    for accumulate, prefetch in itertools.product((1, 3), (0, 1)):
        for recompute in (False, True) if prefetch else (False,):
            policy = policy_of(precision, prefetch, recompute)
            real, dry = both(model(), world_of("auto"), stage, policy, accumulate, memo=memo)
            assert without_times(dry["comm"]) == without_times(real["comm"])
            assert without_process(dry["memory"]) == without_process(real["memory"])
            assert dry.moved.keys() == real.moved.keys()


@pytest.mark.parametrize("stage", STAGES)
def test_it_is_with_the_other_reduction_too(comm, stage):
    for accumulate in (1, 3):
        real, dry = both(gpt(), world_of("ordered"), stage, Policy(), accumulate)
        assert without_times(dry["comm"]) == without_times(real["comm"])
        assert without_process(dry["memory"]) == without_process(real["memory"])


@pytest.mark.sizes(1, 3)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize(
    "model",
    [GPT(2, 128, 4, 64, 256), GPT(3, 96, 6, 70, 500), MLP(2, 200, 8, 256)],
    ids=["gpt", "wide gpt", "mlp"],
)
def test_the_planned_peak_is_the_traced_one(comm, model, precision, stage):
    """Every kind to the byte, at every moment; the whole within the tolerance, at one place."""
    real, dry = both(model, world_of("auto"), stage, policy_of(precision), b=4, kind=TracedZeRO)
    planned, measured = dry.highest(), real.highest()
    assert (planned.verb, planned.name) == (measured.verb, measured.name)
    assert planned.total == pytest.approx(measured.total, rel=TOLERANCE)
    assert planned.total <= measured.total == max(moment.total for moment in real.moments)
    assert [(m.verb, m.name, m.tracked) for m in dry.moments] == [
        (m.verb, m.name, m.tracked) for m in real.moments
    ]
    layers = [i for i, m in enumerate(real.moments) if m.verb in ("forward", "turn", "backward")]
    assert [dry.moments[i].activations for i in layers] == [
        real.moments[i].activations for i in layers
    ]


def test_a_layer_that_was_walked_before_is_counted_as_if_it_were_walked(comm):
    class Forgetful(Memo):
        def __call__(self, key, function, *arguments):
            return function(*arguments)

    model, policy = gpt(4), Policy("bfloat16")
    runs = [
        DryRun(model, CountedWorld(3), 3, adamw(), policy, memo) for memo in (Forgetful(), Memo())
    ]
    for run in runs:
        run.count_step(2, 2)
    assert runs[0].ledger.moments == runs[1].ledger.moments
    assert runs[0].flops == runs[1].flops > 0


def test_a_dry_run_leaves_nothing_alive(comm):
    world = CountedWorld(comm.size, comm.rank)
    run = DryRun(gpt(), world, 3, adamw(), Policy("float16"))
    run.count_step(2, 3)
    owned = sum(
        run.ledger.alive[kind] for kind in ("parameters", "gradients", "optimizer", "message")
    )
    assert world.meter.alive == owned == sum(run.ledger.alive.values())


def test_watching_changes_no_bit(comm):
    """Engines that are traced, probed or neither compute the same."""
    losses = []
    for kind in (ZeRO, TracedZeRO, ProbedZeRO):
        zero = kind(gpt(), world_of("auto"), 3, adamw())
        losses.append(
            [
                getattr(zero, "traced_step", zero.train_step)(share(zero.model, s, zero.world, 2))
                for s in (1, 2)
            ]
        )
    assert losses[0] == losses[1] == losses[2]


def test_the_probe_sees_who_is_late(comm):
    """Rank 0 sleeps in its forward: the others wait for it; that is skew, not time in flight."""
    import time

    zero = ProbedZeRO(gpt(), world_of("auto"), 3, adamw())
    real = zero.model.layers[1].forward

    def slow(w, x):
        if comm.rank == 0:
            time.sleep(1)
        return real(w, x)

    zero.model.layers[1].forward = slow
    zero.train_step([micro_batch(zero.model, 1, comm.rank)])
    skew = comm.allgather(sum(zero.comm.axes[0].skew_s.values()))
    assert all(seconds > 0.4 for seconds in skew[1:]), skew
    assert np.all(np.array(list(zero.comm.axes[0].in_flight_s.values())) > 0)
