"""Task 3: a sharded Adam, with a global norm."""

import numpy as np

from zmpi.course.case import (
    SPARE_BYTES,
    Case,
    Fault,
    Idea,
    Task,
    apart,
    kept_in_float32,
    most,
    sent_faults,
    untouched,
)
from zmpi.course.toy import STEPS

_IDEAS = (
    Idea("the norm", 2, "one norm, that of the whole mean gradient, on every rank"),
    Idea("Adam", 3, "the moments of the mean gradient, corrected for their start from zero"),
    Idea("clipping", 1, "the whole gradient is scaled by one number", needs=("the norm", "Adam")),
    Idea("sharded moments", 2, "a rank keeps 1/N of the optimizer's state"),
    Idea("bytes", 1, "a reduce-scatter and an all-gather: no more than data parallelism sends"),
    Idea("float32 and inputs", 1, "nothing is widened for good, and inputs stay as they were"),
)
# Absolute, weights below 5 and updates of about lr < 0.05: some roundings to float32 (6e-8
# relative) of each a step.
_CLOSE = 3e-6


def _cases(draw):
    """1 to 4 ranks, without clipping and with it."""
    found = []
    for size in (1, 2, 3, 4):
        for clips in (False, True):
            parameters = 12 * int(draw.integers(120, 200))
            settings = {
                "lr": float(draw.uniform(0.02, 0.05)),
                "beta1": float(draw.uniform(0.8, 0.9)),
                "beta2": float(draw.uniform(0.9, 0.98)),
                "eps": float(draw.uniform(1e-4, 1e-3)),
                "clip": float(draw.uniform(1, 5)) if clips else 1e9,
            }
            given = {
                "weights": draw.standard_normal(parameters).astype(np.float32),
                "gradients": draw.standard_normal((STEPS, size, parameters)).astype(np.float32),
                "settings": settings,
            }
            name = f"{parameters} weights, clip {settings['clip']:.3g}"
            ideas = tuple(
                idea.key for idea in _IDEAS if idea.key != ("Adam" if clips else "clipping")
            )
            found.append(Case(size, name, given, ideas))
    return found


def _run(student, comm, given, watch):
    """Some steps: norms, weights, and what is held between them."""
    weights = given["weights"].copy()
    watch.begin_memory()
    adam = student.ShardedAdam(comm, len(weights), **given["settings"])
    for step in range(STEPS):
        mine = watch.untouched("gradient", given["gradients"][step][comm.rank])
        with watch.phase(f"step {step + 1}"):
            norm = adam.step(weights, mine)
        watch.highest("held", watch.held())
        watch.keep(f"norm of step {step + 1}", norm)
        watch.keep(f"weights after step {step + 1}", weights)


def _judge(case, outcomes):
    """Norms and weights beside those in float64, bytes, types, and what was held."""
    parameters, settings = len(case.given["weights"]), case.given["settings"]
    norms, weights = expected(case.given["weights"], case.given["gradients"], settings)
    yield from _first("the norm", "norm of step {}", norms, outcomes)
    idea = "Adam" if settings["clip"] > 1e8 else "clipping"
    yield from _first(idea, "weights after step {}", weights, outcomes)
    bound = 2 * 4 * parameters // case.size
    over = most("held", bound + SPARE_BYTES, outcomes)
    if over:
        text = f"bytes of arrays between steps: expected {bound:,}, got {over[0]:,}"
        yield Fault("sharded moments", text, over[1])
    sent = 2 * (case.size - 1) * (parameters // case.size) * 4
    yield from sent_faults("bytes", "step 1", sent, outcomes, "a step")
    yield from kept_in_float32("float32 and inputs", outcomes, [])
    yield from untouched("float32 and inputs", outcomes)


def _first(idea, name, wanted, outcomes):
    for step, array in enumerate(wanted, 1):
        for rank, outcome in enumerate(outcomes):
            got = outcome.values.get(name.format(step))
            # A norm's terms are squares of numbers that were rounded to float32, each by 6e-8.
            close = _CLOSE if array.ndim else 1e-6 * float(array)
            text = apart(name.format(step), array, got, close)
            if text:
                yield Fault(idea, text, rank)
                return


def expected(weights, gradients, settings):
    """(norms, weights after each step) of Adam on one process (arXiv 1412.6980, algorithm 1), in
    float64.
    """
    lr, beta1, beta2, eps, clip = settings.values()
    w, m, v = weights.astype(np.float64), 0.0, 0.0
    norms, found = [], []
    for t, of_ranks in enumerate(gradients, 1):
        g = of_ranks.mean(axis=0, dtype=np.float64)
        norm = np.sqrt(np.sum(g**2))
        g = g * min(1.0, clip / norm)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        w = w - lr * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
        norms.append(norm)
        found.append(w)
    return norms, found


TASK_3 = Task(3, "a sharded Adam (stage 1)", "t3_sharded_adam.py", _IDEAS, _cases, _run, _judge)
