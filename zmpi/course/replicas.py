"""Task 2: data parallelism that is one process's training, to the bit."""

import numpy as np

from zmpi.course.case import (
    Case,
    Idea,
    Task,
    kept_in_float32,
    sent_faults,
    sum_in_order,
    untouched,
    value_faults,
)
from zmpi.course.toy import STEPS, micro_batch, pull_gradient

_IDEAS = (
    Idea("the mean", 4, "every rank's data count alike, and all ranks take the same step"),
    Idea("order of sums", 3, "float32 sums depend on their order", needs=("the mean",)),
    Idea("bytes", 2, "an all-reduce moves 2 (N - 1) / N of the gradient, whatever N is"),
    Idea("float32 and inputs", 1, "nothing is widened on the way, and inputs stay as they were"),
)


def _cases(draw):
    """1 to 4 ranks, each with other sizes and data."""
    found = []
    for size in (1, 2, 3, 4):
        parameters = 12 * int(draw.integers(120, 200))
        given = {
            "weights": draw.standard_normal(parameters).astype(np.float32),
            "batches": [[micro_batch(draw, parameters) for _ in range(size)] for _ in range(STEPS)],
            "lr": float(draw.uniform(0.05, 0.2)),
        }
        found.append(Case(size, f"{parameters} weights", given))
    return found


def _run(student, comm, given, watch):
    """Some steps; the weights after each."""
    weights = given["weights"].copy()
    for step in range(STEPS):
        batch = given["batches"][step][comm.rank]
        for array in batch:
            watch.untouched("micro_batch", array)
        with watch.phase(f"step {step + 1}"):
            student.train_step(comm, weights, pull_gradient, batch, given["lr"])
        watch.keep(f"weights after step {step + 1}", weights)


def _judge(case, outcomes):
    """The weights of one process, bytes, types."""
    weights, lr, size = case.given["weights"].copy(), case.given["lr"], case.size
    for step in range(STEPS):
        gradients = [pull_gradient(weights, batch) for batch in case.given["batches"][step]]
        wide = sum(g.astype(np.float64) for g in gradients) / size
        # What comes out where the sum was made in float64, and rounded at one place or another.
        known = [(weights - lr * wide).astype(np.float32), weights - lr * wide.astype(np.float32)]
        known = [("float32 and inputs", array, "as a sum in float64 gives") for array in known]
        known = known if size > 2 else []
        weights -= lr * (sum_in_order(gradients) / size)
        name = f"weights after step {step + 1}"
        faults = list(value_faults(("the mean", "order of sums"), name, weights, outcomes, known))
        yield from faults
        if faults:
            break
    sent = 2 * (size - 1) * (len(weights) // size) * 4
    yield from sent_faults("bytes", "step 1", sent, outcomes, "a step")
    yield from kept_in_float32("float32 and inputs", outcomes, [])
    yield from untouched("float32 and inputs", outcomes)


TASK_2 = Task(2, "data parallelism", "t2_data_parallel.py", _IDEAS, _cases, _run, _judge)
