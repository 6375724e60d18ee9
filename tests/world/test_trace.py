"""The trace: what the running engine did, event by event."""

import json
from itertools import pairwise

import pytest
from training import STAGES, adamw, gpt, share, world_of

from zmpi import Policy, ZeRO
from zmpi.cost.trace import (
    AMOUNTS,
    KEPT_STEPS,
    Trace,
    aligned,
    by_verb,
    gathers_under_way,
    open_trace,
    write_trace,
)
from zmpi.cost.watch import watched

Traced = watched(ZeRO, Trace)


def traced(stage, steps=2, accumulate=1, policy=None):
    zero = Traced(gpt(), world_of("auto"), stage, adamw(), policy=policy)
    for step in range(1, steps + 1):
        zero.train_step(share(zero.model, step, zero.world, accumulate))
    return zero


@pytest.mark.parametrize("stage", STAGES)
def test_the_events_are_the_verbs_of_the_schedule(comm, stage):
    """In order: each visit's forward and backward; the printed schedule's gathers and frees."""
    zero = traced(stage)
    events = [e for e in zero.ledger.steps[-1] if e["verb"] not in ("step", "agree")]
    layers = [layer.name for layer in zero.model.layers]
    passes = [
        ("turn" if v.turn else "forward" if v.forward else "backward", layers[v.layer])
        for v in zero.schedule
    ]
    computed = ("forward", "turn", "backward")
    assert [(e["verb"], e["name"]) for e in events if e["verb"] in computed] == passes
    reduced = [v.unit for v in zero.schedule if v.reduce]
    assert [e["name"] for e in events if e["verb"] == "reduce"] == reduced
    moves = [v.unit for v in zero.schedule if v.gather] if zero.stage.parameters else []
    assert (
        [e["name"] for e in events if e["verb"] == "gather"]
        == [e["name"] for e in events if e["verb"] == "wait"]
        == moves
    )
    assert [e["name"] for e in events if e["verb"] == "free"] == (
        [v.unit for v in zero.schedule if v.free] if moves else []
    )
    assert [e["name"] for e in events if e["verb"] == "update"] == list(zero.units)
    assert all(a["end"] <= b["start"] for a, b in pairwise(events))


@pytest.mark.parametrize("stage", STAGES)
def test_the_amounts_of_a_steps_events_are_its_ledgers(comm, stage):
    zero = traced(stage, accumulate=2)
    for amount in AMOUNTS:
        booked = sum(kind[amount] for kind in zero.ledger["comm"].values())
        assert sum(event.get(amount, 0) for event in zero.ledger.steps[-1]) == pytest.approx(booked)


def test_a_unit_is_gathered_before_it_is_used_and_freed_after(comm):
    events = traced(3, policy=Policy(prefetch=1)).ledger.steps[-1]
    order = [(e["verb"], e["name"]) for e in events]
    assert (
        order.index(("gather", "h.1"))
        < order.index(("forward", "h.0"))
        < order.index(("wait", "h.1"))
    )
    assert (
        order.index(("wait", "h.1"))
        < order.index(("forward", "h.1"))
        < order.index(("free", "h.1"))
    )


@pytest.mark.parametrize(("stage", "prefetch"), [(3, 1), (3, 0), (2, 1)])
def test_a_prefetch_puts_every_gather_but_the_first_beside_a_product(comm, stage, prefetch):
    """Counted from the order of the events; bytes are those that this rank sends in them."""
    events = traced(stage, policy=Policy(prefetch=prefetch)).ledger.steps[-1]
    gathers = [e for e in events if e["verb"] == "gather"]
    assert len(gathers) == (6 if stage == 3 else 0)
    beside = gathers[1:] if prefetch else []
    assert gathers_under_way(events) == {
        "gathers": len(gathers),
        "during_products": len(beside),
        "bytes": sum(e.get("bytes_sent", 0) for e in beside),
    }
    verbs = by_verb(events)
    assert sum(verbs.values()) == pytest.approx(events[0]["end"] - events[0]["start"])
    assert verbs["other"] > 0 and {"forward", "turn", "backward", "update"} <= verbs.keys()


def test_tracing_changes_no_bit_and_keeps_the_last_steps(comm):
    plain = ZeRO(gpt(), world_of("auto"), 3, adamw())
    zero = traced(3)
    assert [plain.train_step(share(plain.model, s, plain.world, 1)) for s in (1, 2, 3)][
        2
    ] == zero.train_step(share(zero.model, 3, zero.world, 1))
    zero.ledger.steps.extend([zero.ledger.steps[-1]] * (KEPT_STEPS + 5))
    assert len(zero.ledger.steps) == KEPT_STEPS


def test_an_evaluation_is_no_part_of_a_step(comm):
    zero = traced(3)
    before = len(zero.ledger.events())
    zero.evaluate(share(zero.model, 3, zero.world, 1))
    assert len(zero.ledger.events()) == before


def test_clocks_are_aligned(comm):
    """A clock that is an hour ahead is set right: all ranks' steps overlap (they meet in each)."""
    zero = traced(2)
    waits = zero.world.guard._state[0]
    if comm.rank == comm.size - 1:
        from zmpi.cost import trace

        real = trace.perf_counter
        trace.perf_counter = lambda: real() + 3600
        for step in zero.ledger.steps:
            for event in step:
                event["start"] += 3600
                event["end"] += 3600
    try:
        lanes = aligned(zero.world, list(zero.ledger.steps[-1]))
    finally:
        if comm.rank == comm.size - 1:
            trace.perf_counter = real
    waits = comm.allgather(zero.world.guard._state[0] - waits)
    assert len(set(waits)) == 1, "ranks are compared by the number of their waits"
    if comm.rank == 0:
        starts, ends = [lane[0]["start"] for lane in lanes], [lane[0]["end"] for lane in lanes]
        assert min(starts) == 0 and max(starts) < min(ends) and max(ends) < 60
    else:
        assert lanes is None


def written(path, zero):
    output = open_trace(path) if zero.world.rank == 0 else None
    write_trace(output, zero)
    if output:
        output.close()
    zero.world.mpi.Barrier()


def test_the_chrome_trace_is_valid_event_by_event(comm, folder):
    zero = traced(3)
    written(folder / "x.json", zero)
    found = json.loads((folder / "x.json").read_text())
    assert found["displayTimeUnit"] == "ms"
    names = [event for event in found["traceEvents"] if event["ph"] == "M"]
    assert [(event["tid"], event["args"]["name"]) for event in names] == [
        (r, f"rank {r}") for r in range(comm.size)
    ]
    spans = [event for event in found["traceEvents"] if event["ph"] != "M"]
    for event in spans:
        assert event.keys() == {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"}
        assert event["ph"] == "X" and event["pid"] == 0 and event["tid"] in range(comm.size)
        assert event["ts"] >= 0 and event["dur"] >= 0
        assert event["name"].split()[0] == event["cat"]
        assert event["args"].keys() <= {"step", *AMOUNTS}
    assert {event["cat"] for event in spans} == {
        "step", "agree", "gather", "wait", "forward", "turn", "backward", "free", "reduce", "update"
    }  # fmt: skip
    for rank in range(comm.size):  # events of a lane lie in a step, or one after the other
        lane = [event for event in spans if event["tid"] == rank]
        assert len(lane) == len(zero.ledger.events())


def test_the_text_is_one_step_in_readable_lines(comm, folder):
    zero = traced(3)
    written(folder / "x.txt", zero)
    lines = (folder / "x.txt").read_text().splitlines()
    assert len(lines) == comm.size * len(zero.ledger.steps[-1])
    elements = zero.units["h.1"].layout.elements
    start = f"rank {comm.rank}  gather h.1"
    gathers = [line for line in lines if line.startswith(start)]
    assert len(gathers) == zero.schedule.gathers["h.1"]
    assert all(f"{elements:,} elements from {comm.size} ranks" in line for line in gathers)
