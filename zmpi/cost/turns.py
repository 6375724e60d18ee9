"""Times the stages in turns, so that other load on the machine affects all of them alike."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import perf_counter

from zmpi.core.engine import ZeRO
from zmpi.process.errors import Agreed


@dataclass
class Timing:
    """One stage's timed steps on this rank, one per round; None if float16 skipped the step."""

    step_s: list = field(default_factory=list)
    blocked_s: list = field(default_factory=list)
    loss: float = 0.0  # of the last step
    tokens: int = 0  # targets per step, over all ranks
    error: str | None = None  # why it stopped

    def taken(self):
        """[(step_s, blocked_s)] of the steps that were not skipped."""
        both = zip(self.step_s, self.blocked_s, strict=True)
        return [(step, blocked) for step, blocked in both if step is not None]


def in_turns(workload, world, stages):
    """{stage: Timing}. Every stage takes one step per round; each round starts with another.

    Collective. All engines are alive at once. A stage whose step fails on all ranks drops out.
    """
    timings, engines = {stage: Timing() for stage in stages}, {}
    for stage in stages:
        with _failing(timings[stage]):
            engines[stage] = workload.engine(ZeRO, world, stage)
    for number in range(workload.warm_up + workload.steps):
        for stage in _rotated(stages, number):
            if timings[stage].error is None:
                with _failing(timings[stage]):
                    _step(workload, engines[stage], timings[stage], number >= workload.warm_up)
    for timing in timings.values():
        if timing.error is None and not timing.taken():
            timing.error = (
                f"all {workload.steps} timed steps were skipped: gradients overflow"
                f" {workload.policy.precision}; its loss scale is still falling: use more --warm-up"
                " steps"
            )
    return timings


def _step(workload, zero, timing, timed):
    """One step of one stage, recorded if `timed`."""
    began = perf_counter()
    timing.loss = workload.step(zero)
    seconds = perf_counter() - began
    timing.tokens = zero.last.tokens
    if timed:  # a skipped step is shorter: no update, fewer gathers
        blocked = sum(kind["blocked_s"] for kind in zero.ledger["comm"].values())
        timing.step_s.append(None if zero.last.skipped else seconds)
        timing.blocked_s.append(blocked)


def _rotated(stages, number):
    first = number % len(stages)
    return [*stages[first:], *stages[:first]]


@contextmanager
def _failing(timing):
    """An error on all ranks ends this stage, not the others."""
    try:
        yield
    except Agreed as error:
        timing.error = str(error)


def quartiles_of(values):
    """{"median", "quartiles": [lower, upper]} of at least one value."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": median(values), "quartiles": [low, high]}


def ratio(steps, others):
    """The quartiles of steps / others over the rounds with both; None if there are none."""
    ratios = [a / b for a, b in zip(steps, others, strict=True) if a and b]
    return quartiles_of(ratios) if ratios else None


def too_close(rows):
    """Pairs of stages that these rounds cannot rank: their ratio's quartiles span 1."""
    pairs = []
    for i, row in enumerate(rows):
        for other in rows[i + 1 :]:
            found = ratio(row["all_step_s"], other["all_step_s"])
            if not found or found["quartiles"][0] <= 1 <= found["quartiles"][1]:
                pairs.append((row["stage"], other["stage"]))
    return pairs
