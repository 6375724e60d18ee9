"""P3, nothing kept: real lifetimes, by weak references and by NumPy's (or CuPy's) memory."""

import tracemalloc
import weakref
from collections import Counter

from zmpi.messages.ledger import Ledger
from zmpi.proof.rows import Row

# Unnamed bytes that NumPy (or CuPy, in blocks of 512) may hold after a step: a third of the large
# model's smallest unit.
SLACK = 64 << 10
PASSING = ("full", "partial", "widened", "sum")  # kinds that live within a step only


class Counting(Ledger):
    """A ledger that also counts the live arrays of each kind, by weak references."""

    def __init__(self):
        super().__init__()
        self.living, self.most = Counter(), Counter()

    def track(self, kind, array):
        """Count the array until its memory is freed."""
        self.living[kind] += 1
        self.most[kind] = max(self.most[kind], self.living[kind])
        weakref.finalize(array, self._count_down, kind).atexit = False
        return super().track(kind, array)

    def _count_down(self, kind):
        self.living[kind] -= 1


def nothing_is_kept(trial):
    """At stage 3 at most prefetch + 1 full vectors live, none after a step; no unnamed memory."""

    class Counted(trial.engine):
        make_ledger = Counting

    watched = trial.but(
        engine=Counted,
        models={"large model": trial.large},
        model="large model",
        stage=trial.stages[-1],
    )
    for prefetch in (0, 1):
        one = watched.but(prefetch=prefetch)
        tracemalloc.start()
        try:
            figures = _looked_at(one)
        finally:
            tracemalloc.stop()
        yield _row(one, figures)


def _looked_at(trial):
    """{moment: (most live full vectors, live vectors of a step, unnamed bytes)} of two steps.

    Bytes are counted only after the second step: tracing takes longer than the step.
    """
    before, figures = trial.world.device.held_bytes(), {}
    zero = trial.make()
    zero.ledger.most.clear()
    for step in (1, 2):
        zero.train_step(trial.data(step))
        # Before the evaluation, which would free what the step kept.
        figures[f"after step {step}"] = _alive(zero, before if step == 2 else None)
        zero.evaluate(trial.data(step))
        figures[f"after the evaluation of step {step}"] = _alive(zero, None)
    return figures


def _alive(zero, before):
    """What is alive now. `before`: bytes held before the engine was made; None: do not count."""
    ledger, device, unnamed = zero.ledger, zero.world.device, 0
    left = {kind: ledger.living[kind] for kind in PASSING}
    if before is not None:  # pinned memory is the host's
        pinned = ledger.alive["pinned"] if device.name != "cpu" else 0
        unnamed = device.held_bytes() - before - sum(ledger.alive.values()) + pinned
    return ledger.most["full"], left, unnamed


def _row(trial, figures):
    """The Row of all ranks' results. Collective."""
    everyone = trial.world.share(figures)
    wrong = ""
    for moment in figures:
        for rank, (most, left, unnamed) in enumerate(ranks[moment] for ranks in everyone):
            faults = [f"{most} full vectors were alive together"] * (most > trial.prefetch + 1)
            faults += [
                f"{number} {kind} vector{'s are' if number > 1 else ' is'} alive"
                for kind, number in left.items()
                if number
            ]
            faults += [f"{unnamed:,} bytes are held that are not named"] * (unnamed > SLACK)
            if faults and not wrong:
                wrong = f"{trial}, {moment}: {faults[0]} (on rank {rank})"
    seen = [figure for ranks in everyone for figure in ranks.values()]
    most = max(figure[0] for figure in seen)
    left = max(sum(figure[1].values()) for figure in seen)
    unnamed = max(figure[2] for figure in seen)
    words = f"{most} at most, {left} after, {unnamed / 1024:.0f} KiB more"
    text = f"full vectors alive at stage {trial.word}, prefetch {trial.prefetch}"
    return Row("P3", text, words, not wrong, wrong)
