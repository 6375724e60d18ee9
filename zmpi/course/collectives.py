"""Task 1: an all-gather and a reduce-scatter from sends and receives, and what they move."""

import numpy as np

from zmpi.course.case import (
    Case,
    Fault,
    Idea,
    Task,
    apart,
    is_far,
    kept_in_float32,
    sent_faults,
    sum_in_order,
    untouched,
    used,
)

_IDEAS = (
    Idea("all-gather", 2, "every rank ends with every shard, in rank order"),
    Idea("reduce-scatter", 2, "every rank ends with its own shard of the sum"),
    Idea("order of sums", 2, "float32 sums depend on their order", needs=("reduce-scatter",)),
    Idea("messages", 2, "sends and receives only, and no element travels twice"),
    Idea("volume", 1, "a rank sends what the others need of it: (N - 1) / N of a vector"),
    Idea("float32 and inputs", 1, "types stay as they are, and inputs as they were"),
)
_P2P = {"Send", "Ssend", "Isend", "Issend", "Recv", "Irecv", "Sendrecv"}
_LARGE = 60_000  # elements: too many for a message that nobody has received yet
_VOLUMES = ("all_gather", "reduce_scatter", "all_reduce")


def _cases(draw):
    """Both collectives at 1 to 4 ranks, short and long shards."""
    found = []
    for size in (1, 2, 3, 4):
        n = int(draw.integers(130, 400))
        for kind in (np.float32, np.int64):
            shards = [draw.integers(-999, 999, n).astype(kind) for _ in range(size)]
            name = f"all_gather of {n} {np.dtype(kind)} a rank"
            ideas = ("all-gather", "messages", "float32 and inputs")
            found.append(Case(size, name, {"shards": shards}, ideas))
        fulls = [draw.standard_normal(n * size).astype(np.float32) for _ in range(size)]
        ideas = ("reduce-scatter", "order of sums", "messages", "float32 and inputs")
        found.append(Case(size, f"reduce_scatter, {n} a rank", {"fulls": fulls}, ideas))
    shards = [draw.standard_normal(_LARGE).astype(np.float32) for _ in range(3)]
    ideas = ("all-gather", "messages")
    found.append(Case(3, f"all_gather of {_LARGE:,} float32 a rank", {"shards": shards}, ideas))
    asked = [(int(draw.integers(2, 99)) * size, size) for size in (1, 2, 3, 8, 64)]
    asked = [(kind, e, b, n) for e, n in asked for kind in _VOLUMES for b in (2, 4)]
    found.append(Case(1, "bytes_sent", {"asked": asked}, ("volume",)))
    return found


def _run(student, comm, given, watch):
    """One collective, or the questions about volumes."""
    if "asked" in given:
        for i, asked in enumerate(given["asked"]):
            watch.keep(f"answer {i}", student.bytes_sent(*asked))
        return
    call = student.all_gather if "shards" in given else student.reduce_scatter
    vectors = given["shards"] if "shards" in given else given["fulls"]
    mine = watch.untouched("the input", vectors[comm.rank])
    with watch.phase("call"):
        result = call(comm, mine)
    watch.keep("result", result)
    watch.marks["shared"] = isinstance(result, np.ndarray) and np.shares_memory(result, mine)


def _judge(case, outcomes):
    """Values, order, messages and bytes."""
    if "asked" in case.given:
        yield from _volumes(case.given["asked"], outcomes[0])
        return
    gathers = "shards" in case.given
    vectors = case.given["shards"] if gathers else case.given["fulls"]
    yield from _results(vectors, gathers, case.size, outcomes)
    n = len(vectors[0]) // (1 if gathers else case.size)
    sent = (case.size - 1) * n * vectors[0].itemsize
    for rank, outcome in enumerate(outcomes):
        calls = outcome.calls["call"]
        if any(call["name"] not in _P2P and call["sent"] for call in calls):
            text = f"calls: expected sends and receives of arrays only, got {used(calls)}"
            yield Fault("messages", text, rank)
            return
    yield from sent_faults("messages", "call", sent, outcomes, "the call")
    yield from kept_in_float32("float32 and inputs", outcomes, ["result"] * (not gathers))
    yield from untouched("float32 and inputs", outcomes)
    for rank, outcome in enumerate(outcomes):
        if outcome.marks["shared"]:
            text = "the result: expected new memory, got a part of the input"
            yield Fault("float32 and inputs", text, rank)
            return


def _results(vectors, gathers, size, outcomes):
    for rank, outcome in enumerate(outcomes):
        if gathers:
            expected, idea = np.concatenate(vectors), "all-gather"
        else:
            expected, idea = np.split(sum_in_order(vectors), size)[rank], "reduce-scatter"
        got = outcome.values.get("result")
        text = apart("result", expected, got)
        if text:
            same = not gathers and got.shape == expected.shape and not is_far(expected, got)
            yield Fault("order of sums" if same else idea, text, rank)
            return


def _volumes(asked, outcome):
    for i, (kind, elements, itemsize, size) in enumerate(asked):
        once = (size - 1) * (elements // size) * itemsize
        expected = np.array(once * (2 if kind == "all_reduce" else 1))
        call = f"bytes_sent({kind!r}, {elements}, {itemsize}, {size})"
        text = apart(call, expected, outcome.values.get(f"answer {i}"))
        if text:
            yield Fault("volume", text)
            return


TASK_1 = Task(1, "collectives by hand", "t1_collectives.py", _IDEAS, _cases, _run, _judge)
