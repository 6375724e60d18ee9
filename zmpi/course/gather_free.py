"""Task 5: gather, use, free."""

import numpy as np

from zmpi.course.case import (
    SPARE_BYTES,
    Case,
    Fault,
    Idea,
    Task,
    kept_in_float32,
    most,
    sent_faults,
    sum_in_order,
    untouched,
    value_faults,
)
from zmpi.course.toy import STEPS, ToyLayer, chain_gradients, loss_gradient

_IDEAS = (
    Idea("the step", 2, "one process with all the data would take the same step"),
    Idea("order of sums", 1, "float32 sums depend on their order", needs=("the step",)),
    Idea(
        "fresh weights",
        1,
        "what was gathered before an update is stale after it",
        needs=("the step",),
    ),
    Idea("one layer at a time", 2, "a gather puts together one layer, never the model"),
    Idea("freed means freed", 2, "whole weights live for the moment of use, whatever names them"),
    Idea("bytes", 1, "two gathers and one reduce-scatter of every layer"),
    Idea("float32 and inputs", 1, "nothing is widened on the way, and inputs stay as they were"),
)


def _cases(draw):
    """1 to 4 ranks, three or four layers of different sizes."""
    found = []
    for size in (1, 2, 3, 4):
        width = 12 * int(draw.integers(50, 80))
        rows = [int(n) for n in draw.permutation([1, 2, 3, 4])[: int(draw.integers(3, 5))]]
        given = model(draw, size, width, rows, list(range(len(rows))))
        found.append(Case(size, f"layers of {', '.join(str(n * width) for n in rows)}", given))
    return found


def model(draw, size, width, rows, layers_units):
    """A case of layers: unit u has rows[u] rows, and layer k is of unit layers_units[k]."""
    weights = {
        unit: (draw.standard_normal(n * width) * 0.3).astype(np.float32)
        for unit, n in enumerate(rows)
    }
    inputs = draw.standard_normal((STEPS, size, width)).astype(np.float32)
    targets = draw.standard_normal((STEPS, size, width)).astype(np.float32)
    shapes = [(rows[unit], width, unit) for unit in layers_units]
    lr = float(draw.uniform(0.02, 0.05))
    return {"weights": weights, "inputs": inputs, "targets": targets, "shapes": shapes, "lr": lr}


def _run(student, comm, given, watch):
    """Some steps; what is alive whenever a layer is called."""
    watch.begin_memory()
    held = shards_bytes(given, comm.size)
    layers = watched_layers(given, watch, held)
    stage = student.Stage3(comm, layers, [w.copy() for w in given["weights"].values()])
    watch.highest("over at first", watch.held() - held)
    for step in range(STEPS):
        one_step(stage, comm, given, watch, step)
        watch.highest("over after", watch.held() - held)
        watch.highest("alive after", watch.alive("whole") + watch.alive("gradient"))
        for unit, shard in enumerate(stage.shards):
            watch.keep(f"shards[{unit}] after step {step + 1}", shard)


def shards_bytes(given, size):
    """Bytes of one rank's shards, filled up where sizes do not divide."""
    return sum(-(-len(w) // size) * 4 for w in given["weights"].values())


def one_step(stage, comm, given, watch, step):
    """A step on this rank's data; returns what the student's does."""
    x = watch.untouched("x", given["inputs"][step][comm.rank])
    target = given["targets"][step][comm.rank]
    with watch.phase(f"step {step + 1}"):
        return stage.step(x, lambda y: loss_gradient(y, target), given["lr"])


def watched_layers(given, watch, held, incomplete=0):
    """The case's layers. At every call they note how many whole vectors of weights are alive, and
    how many bytes are held beyond shards, the sums of gradients that are done, this layer's
    weights, and activations of four a layer.
    """

    def used(verb, layer, w):
        watch.follow("whole", w)
        watch.highest("whole alive", watch.alive("whole"))
        watch.highest("gradients alive", watch.alive("gradient"))
        activations = (4 + len(given["shapes"])) * layer.width * 4
        allowed = held + (held if verb == "backward" else 0) + 4 * layer.size + incomplete
        watch.highest("over", watch.held() - allowed - activations)

    def handed(dw):
        watch.follow("gradient", dw)

    return [ToyLayer(n, width, unit, used, handed) for n, width, unit in given["shapes"]]


def _judge(case, outcomes):
    """The weights of one process, what was alive, the largest gather, bytes, types."""
    yield from _weights(case, outcomes)
    sizes = [n * width for n, width, _ in case.given["shapes"]]
    for rank, outcome in enumerate(outcomes):
        calls = [call for calls in outcome.calls.values() for call in calls]
        largest = max((call["largest"] for call in calls), default=0)
        if largest > 4 * max(sizes):
            text = f"bytes in one message: expected at most {4 * max(sizes):,}, got {largest:,}"
            yield Fault("one layer at a time", text, rank)
            break
    yield from freed_faults("freed means freed", outcomes, gradients=0)
    sent = 3 * (case.size - 1) * (sum(sizes) // case.size) * 4
    yield from sent_faults("bytes", "step 1", sent, outcomes, "a step")
    yield from kept_in_float32("float32 and inputs", outcomes, [])
    yield from untouched("float32 and inputs", outcomes)


def freed_faults(idea, outcomes, gradients):
    """Faults of what was alive when it should not be; `gradients` partial ones may be, at a layer's
    call.
    """
    bounds = (
        ("whole alive", 1, "layers whose whole weights are alive when a layer is called"),
        ("gradients alive", gradients, "partial gradients alive when a layer is called"),
        ("alive after", 0, "whole weights and partial gradients alive after a step"),
        ("over", SPARE_BYTES, "bytes of arrays that should be gone when a layer is called"),
        ("over at first", SPARE_BYTES, "bytes of arrays beside the shards, before the first step"),
        ("over after", SPARE_BYTES, "bytes of arrays beside the shards, after a step"),
    )
    for mark, bound, words in bounds:
        over = most(mark, bound, outcomes)
        if over:
            allowed = 0 if bound == SPARE_BYTES else bound
            yield Fault(idea, f"{words}: expected {allowed}, got {over[0]:,}", over[1])
            return


def _weights(case, outcomes):
    given, size = case.given, case.size
    weights = {unit: w.copy() for unit, w in given["weights"].items()}
    for step in range(STEPS):
        mean_update(given, weights, step)
        for unit, w in weights.items():
            shards = list(np.split(w, size))
            name = f"shards[{unit}] after step {step + 1}"
            ideas = ("the step" if step == 0 else "fresh weights", "order of sums")
            faults = list(value_faults(ideas, name, shards, outcomes))
            yield from faults
            if faults:
                return


def mean_update(given, weights, step):
    """One step of one process, on all ranks' data; returns {unit: mean gradient}. Changes
    `weights`.
    """
    layers = [ToyLayer(*shape) for shape in given["shapes"]]
    batches = zip(given["inputs"][step], given["targets"][step], strict=True)
    ranks = [chain_gradients(layers, weights, x, target) for x, target in batches]
    means = {unit: sum_in_order([g[unit] for g in ranks]) / len(ranks) for unit in weights}
    for unit, mean in means.items():
        weights[unit] -= given["lr"] * mean
    return means


TASK_5 = Task(
    5, "gather, use, free (stage 3)", "t5_gather_use_free.py", _IDEAS, _cases, _run, _judge
)
