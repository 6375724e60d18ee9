"""Task 7: prefetch, and what it may not change."""

import numpy as np

from zmpi.course.case import Case, Fault, Idea, Task, apart, kept_in_float32, most, sent_faults
from zmpi.course.toy import STEPS

_IDEAS = (
    Idea("the same weights", 3, "prefetch changes when a gather starts, and nothing else"),
    Idea("prefetch", 3, "the next gather is under way while this layer is computed"),
    Idea("not across the update", 2, "what was gathered before an update is stale after it"),
    Idea("two layers alive", 1, "this layer's weights and the next one's, and none at the update"),
    Idea("bytes", 1, "every visit is gathered once"),
)


def _cases(draw):
    """1 to 4 ranks, walks of different lengths."""
    found = []
    for size in (1, 2, 3, 4):
        layers = int(draw.integers(2, 5))
        lengths = [int(draw.integers(150, 400)) for _ in range(layers)]
        shards = [
            [draw.standard_normal(n).astype(np.float32) for n in lengths] for _ in range(size)
        ]
        visits = [*range(layers), *reversed(range(layers))]
        found.append(Case(size, f"visits {visits}", {"shards": shards, "visits": visits}))
    return found


def updated(shard):
    """A shard after one update: other numbers everywhere."""
    return shard * np.float32(-0.75) + np.float32(0.5)


def _run(student, comm, given, watch):
    """Some steps; at every use: the weights, what is under way, and what is alive."""
    shards = [shard.copy() for shard in given["shards"][comm.rank]]
    visits, seen = given["visits"], []

    def use(k, full):
        step, at = len(seen) // len(visits), len(seen) % len(visits)
        watch.follow("whole", full)
        watch.keep(f"visit {len(seen)}", full)
        watch.keep(f"number {len(seen)}", k)
        watch.highest("alive at a use", watch.alive("whole") + watch.log.in_flight())
        if at + 1 < len(visits):
            watch.marks[f"under way {step} {at}"] = watch.log.in_flight()
        del full
        seen.append(k)

    def update():
        watch.highest("under way at an update", watch.log.in_flight())
        watch.highest("alive at an update", watch.alive("whole"))
        for shard in shards:
            shard[...] = updated(shard)

    with watch.phase("train"):
        student.train(comm, shards, visits, use, update, STEPS)
    watch.marks["uses"] = len(seen)


def _judge(case, outcomes):
    """The weights of every visit, and what was under way and alive."""
    visits, size = case.given["visits"], case.size
    yield from _visits(case, outcomes)
    for rank, outcome in enumerate(outcomes):
        idle = [m for m, n in outcome.marks.items() if m.startswith("under way ") and n == 0]
        idle = [mark for mark in idle if mark != "under way at an update"]
        if idle:
            text = f"gathers under way at {len(idle)} uses before a step's last: expected 1, got 0"
            yield Fault("prefetch", text, rank)
            break
    over = most("under way at an update", 0, outcomes)
    if over:
        text = f"gathers under way at an update: expected 0, got {over[0]}"
        yield Fault("not across the update", text, over[1])
    for mark, bound, when in (("use", 2, "when a layer is used"), ("update", 0, "at an update")):
        over = most(f"alive at {'an' if mark == 'update' else 'a'} {mark}", bound, outcomes)
        if over:
            text = (
                f"whole weights alive or under way {when}: expected at most {bound}, got {over[0]}"
            )
            yield Fault("two layers alive", text, over[1])
            break
    sent = STEPS * (size - 1) * sum(len(case.given["shards"][0][v]) for v in visits) * 4
    yield from sent_faults("bytes", "train", sent, outcomes, "all steps")
    yield from kept_in_float32("the same weights", outcomes, [])


def _visits(case, outcomes):
    """The weights that every visit should see; stale ones at a step's beginning are told apart."""
    shards, visits = [list(of_rank) for of_rank in case.given["shards"]], case.given["visits"]
    before, number = None, 0
    for step in range(STEPS):
        whole = [np.concatenate(parts) for parts in zip(*shards, strict=True)]
        for at, visit in enumerate(visits):
            for rank, outcome in enumerate(outcomes):
                got = outcome.values.get(f"visit {number}")
                text = apart(f"weights at visit {at} of step {step + 1}", whole[visit], got)
                stale = before and not apart("", before[visit], got)
                k = outcome.values.get(f"number {number}")
                if not text and int(k) != at:
                    text = f"use(k, ...) at visit {at}: expected k = {at}, got {k}"
                if text:
                    yield Fault(
                        "not across the update" if stale else "the same weights", text, rank
                    )
                    return
            number += 1
        before = whole
        shards = [[updated(shard) for shard in of_rank] for of_rank in shards]


TASK_7 = Task(7, "prefetch", "t7_prefetch.py", _IDEAS, _cases, _run, _judge)
