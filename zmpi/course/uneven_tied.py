"""Task 6: uneven sizes, and tied weights."""

import numpy as np

from zmpi.course.case import (
    Case,
    Fault,
    Idea,
    Task,
    apart,
    kept_in_float32,
    sent_faults,
    untouched,
)
from zmpi.course.gather_free import (
    freed_faults,
    mean_update,
    model,
    one_step,
    shards_bytes,
    watched_layers,
)
from zmpi.course.toy import STEPS

_IDEAS = (
    Idea("padding", 2, "shards are of one length, filled up with zeros that stay zero"),
    Idea("tied weights", 2, "one unit, one gradient, one update, whichever layers use it"),
    Idea("the step", 1, "one process with all the data would take the same step"),
    Idea(
        "the norm",
        2,
        "the norm of the whole mean gradient: no padding, nothing twice",
        needs=("tied weights",),
    ),
    Idea("freed means freed", 1, "whole weights live for the moment of use"),
    Idea("bytes", 1, "a gather for every use, one reduce-scatter of every unit"),
    Idea("float32 and inputs", 1, "nothing is widened on the way, and inputs stay as they were"),
)


def _cases(draw):
    """Cuts alone; then 1 to 4 ranks, widths that no number of ranks divides, the first and the last
    layer tied.
    """
    cuts = [(int(draw.integers(1, 40)), size) for size in (1, 2, 3, 4) for _ in range(3)] + [(2, 4)]
    vectors = [(draw.standard_normal(n).astype(np.float32), size) for n, size in cuts]
    found = [Case(1, "cuts", {"vectors": vectors}, ("padding",))]
    for size in (1, 2, 3, 4):
        width = 12 * int(draw.integers(50, 80)) + int(draw.choice([1, 5, 7, 11]))
        rows = [int(n) for n in draw.permutation([1, 2, 3])]
        tied = [0, 1, 2, 0] if draw.integers(2) else [1, 0, 2, 1]
        given = model(draw, size, width, rows, tied)
        found.append(Case(size, f"units of {', '.join(str(n * width) for n in rows)}", given))
    return found


def _run(student, comm, given, watch):
    """Cuts, or some steps."""
    if "vectors" in given:
        for i, (vector, size) in enumerate(given["vectors"]):
            watch.keep(f"length {i}", student.shard_length(len(vector), size))
            for rank in range(size):
                shard = student.own_shard(vector.copy(), rank, size)
                watch.keep(f"shard {i} {rank}", shard)
        return
    watch.begin_memory()
    held = shards_bytes(given, comm.size)
    largest = max(len(w) for w in given["weights"].values())
    # The padded copy of a gathered vector is alive, and the gradient of the tied unit.
    layers = watched_layers(given, watch, held, incomplete=4 * largest + 64)
    stage = student.Stage3(comm, layers, {u: w.copy() for u, w in given["weights"].items()})
    watch.highest("over at first", watch.held() - held)
    for step in range(STEPS):
        watch.keep(f"norm of step {step + 1}", one_step(stage, comm, given, watch, step))
        watch.highest("over after", watch.held() - held)
        watch.highest("alive after", watch.alive("whole") + watch.alive("gradient"))
        for unit in given["weights"]:
            watch.keep(f"shards[{unit}] after step {step + 1}", stage.shards[unit])


def _judge(case, outcomes):
    """Cuts, or weights, norms, what was alive, bytes and types."""
    if "vectors" in case.given:
        yield from _cuts(case.given["vectors"], outcomes[0])
        return
    yield from _steps(case, outcomes)
    yield from freed_faults("freed means freed", outcomes, gradients=1)
    units = {unit: -(-len(w) // case.size) for unit, w in case.given["weights"].items()}
    gathers = 2 * sum(units[unit] for _, _, unit in case.given["shapes"])
    sent = (case.size - 1) * (gathers + sum(units.values())) * 4
    yield from sent_faults("bytes", "step 1", sent, outcomes, "a step")
    yield from kept_in_float32("float32 and inputs", outcomes, [])
    yield from untouched("float32 and inputs", outcomes)


def _cuts(vectors, outcome):
    for i, (vector, size) in enumerate(vectors):
        length = -(-len(vector) // size)
        padded = np.zeros(size * length, np.float32)
        padded[: len(vector)] = vector
        call = f"shard_length({len(vector)}, {size})"
        text = apart(call, np.array(length), outcome.values.get(f"length {i}"))
        for rank in range(size):
            part = padded[rank * length : (rank + 1) * length]
            call = f"own_shard of {len(vector)} elements, rank {rank} of {size}"
            text = text or apart(call, part, outcome.values.get(f"shard {i} {rank}"))
        if text:
            yield Fault("padding", text)
            return


def _steps(case, outcomes):
    given, size = case.given, case.size
    weights = {unit: w.copy() for unit, w in given["weights"].items()}
    units = [unit for _, _, unit in given["shapes"]]
    for step in range(STEPS):
        means = mean_update(given, weights, step)
        name = f"norm of step {step + 1}"
        norm = np.array(sum(np.sum(g.astype(np.float64) ** 2) for g in means.values()) ** 0.5)
        wrong = list(_norm(name, norm, outcomes))
        for unit in sorted(weights, key=units.count):
            idea = "tied weights" if units.count(unit) > 1 else "the step"
            wrong += _shards(idea, unit, step, _cut(weights[unit], size), outcomes)
            if wrong and wrong[-1].idea != "the norm":
                break
        yield from wrong
        if wrong:
            return


def _norm(name, norm, outcomes):
    for rank, outcome in enumerate(outcomes):
        # Its terms are squares of float32 numbers that are equal to the last bit; another order of
        # the float64 sum.
        text = apart(name, norm, outcome.values.get(name), 1e-9 * float(norm))
        if text:
            yield Fault("the norm", text, rank)
            return


def _shards(idea, unit, step, shards, outcomes):
    """Faults of a unit's shards: of its padding first, where the weights are right."""
    name = f"shards[{unit}] after step {step + 1}"
    for rank, outcome in enumerate(outcomes):
        got, (shard, real) = outcome.values.get(name), shards[rank]
        text = apart(name, shard, got)
        if text:
            only_padding = got.shape == shard.shape and not apart(name, shard[:real], got[:real])
            return [Fault("padding" if only_padding else idea, text, rank)]
    return []


def _cut(full, size):
    """[(shard, how many of its elements are weights), ...]."""
    length = -(-len(full) // size)
    padded = np.zeros(size * length, np.float32)
    padded[: len(full)] = full
    real = [min(length, max(0, len(full) - rank * length)) for rank in range(size)]
    return list(zip(np.split(padded, size), real, strict=True))


TASK_6 = Task(6, "uneven sizes, tied weights", "t6_uneven_tied.py", _IDEAS, _cases, _run, _judge)
