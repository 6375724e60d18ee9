"""Task 4: sharded gradients, and accumulation."""

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
from zmpi.course.toy import STEPS, micro_batch, pull_gradient

_IDEAS = (
    Idea("the mean", 2, "all micro-batches of all ranks count alike"),
    Idea("from zero", 1, "a step's gradient knows its own micro-batches only", needs=("the mean",)),
    Idea("order of sums", 2, "one sum from left to right over j = m N + r", needs=("the mean",)),
    Idea("freed gradients", 2, "a whole gradient is gone before the next one is computed"),
    Idea("sharded gradient", 1, "what adds up is 1/N of the gradient", needs=("freed gradients",)),
    Idea("bytes", 1, "M reduce-scatters and one all-gather"),
    Idea("float32 and inputs", 1, "nothing is widened on the way, and inputs stay as they were"),
)


def _cases(draw):
    """1 to 4 ranks, with 1 to 3 micro-batches."""
    found = []
    for size in (1, 2, 3, 4):
        parameters, accumulate = 12 * int(draw.integers(120, 200)), int(draw.integers(2, 4))
        batches = [
            [[micro_batch(draw, parameters) for _ in range(size)] for _ in range(accumulate)]
            for _ in range(STEPS)
        ]
        given = {
            "weights": draw.standard_normal(parameters).astype(np.float32),
            "batches": batches,
            "lr": float(draw.uniform(0.05, 0.2)),
        }
        found.append(Case(size, f"{parameters} weights, {accumulate} micro-batches", given))
    return found


def _run(student, comm, given, watch):
    """Some steps; what is alive at every call of gradient_of, and the weights after each step."""
    watch.begin_memory()
    stage = student.Stage2(comm, given["weights"].copy())

    def gradient_of(weights, batch):
        watch.highest("whole gradients", watch.alive("gradient"))
        watch.highest("held", watch.held())
        found = pull_gradient(weights, batch)
        watch.follow("gradient", found)
        return found

    for step in range(STEPS):
        mine = [batches[comm.rank] for batches in given["batches"][step]]
        for batch in mine:
            for array in batch:
                watch.untouched("micro_batches", array)
        with watch.phase(f"step {step + 1}"):
            stage.step(gradient_of, mine, given["lr"])
        watch.highest("whole gradients", watch.alive("gradient"))
        watch.highest("held after", watch.held())
        watch.keep(f"weights after step {step + 1}", stage.weights)


def _judge(case, outcomes):
    """The weights of one process, what was alive, bytes, types."""
    yield from _weights(case, outcomes)
    parameters, accumulate = len(case.given["weights"]), len(case.given["batches"][0])
    alive = most("whole gradients", 0, outcomes)
    if alive:
        text = f"partial gradients alive at the next one's computation: expected 0, got {alive[0]}"
        yield Fault("freed gradients", text, alive[1])
    bound = 4 * (parameters + parameters // case.size)
    for mark, when in (("held", "when gradient_of is called"), ("held after", "after a step")):
        over = most(mark, bound + SPARE_BYTES, outcomes)
        if over:
            text = f"bytes of arrays {when}: expected {bound:,}, got {over[0]:,}"
            yield Fault("sharded gradient", text, over[1])
            break
    sent = (accumulate + 1) * (case.size - 1) * (parameters // case.size) * 4
    yield from sent_faults("bytes", "step 1", sent, outcomes, "a step")
    yield from kept_in_float32("float32 and inputs", outcomes, [])
    yield from untouched("float32 and inputs", outcomes)


def _weights(case, outcomes):
    weights, lr = case.given["weights"].copy(), case.given["lr"]
    for step in range(STEPS):
        batches = case.given["batches"][step]
        every = [pull_gradient(weights, batch) for ranks in batches for batch in ranks]
        weights -= lr * (sum_in_order(every) / len(every))
        far = "the mean" if step == 0 else "from zero"
        name = f"weights after step {step + 1}"
        faults = list(value_faults((far, "order of sums"), name, weights, outcomes))
        yield from faults
        if faults:
            return


TASK_4 = Task(
    4, "sharded gradients (stage 2)", "t4_sharded_gradients.py", _IDEAS, _cases, _run, _judge
)
