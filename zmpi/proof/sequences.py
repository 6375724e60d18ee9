"""P1, the data: sequence i of a step depends on (seed, step, i) only, for any split over ranks."""

import numpy as np

from zmpi.proof.rows import Finding, judged
from zmpi.proof.trial import TRIAL_SEED
from zmpi.text.data import Batches, Text

CONTEXT, EACH, ACCUMULATE = 5, 2, 3  # tokens, sequences per micro-batch, micro-batches
# each token is its own position, so a window tells where it starts
TOKENS = np.arange(60_000, dtype=np.uint16)


def data_is_shared_out(trial):
    """All ranks together see the sequences of one rank with the whole batch, in order, once."""
    text = Text(TOKENS[:50_000], TOKENS[50_000 : 50_000 + CONTEXT * 40], CONTEXT)
    size, found = trial.world.size, []
    for last_only in (False, True):
        mine = Batches.on(trial.world, text, EACH, last_only)
        alone = Batches(text, 0, 1, EACH, last_only)
        seen = {}
        for step in (1, 2):
            ranks = trial.world.share(_starts(mine.of_step(TRIAL_SEED, step, ACCUMULATE)))
            expected = _starts(alone.of_step(TRIAL_SEED, step, ACCUMULATE * size))
            here = [ranks[j % size][j // size] for j in range(ACCUMULATE * size)]
            found += _compared(f"step {step}", here, expected)
            found += _repeated(f"step {step}", here, seen)
        ranks = trial.world.share(_starts(mine.held_out(), counted=True))
        here = sorted(start for rank in ranks for batch in rank for start in batch)
        expected = sorted(
            start for batch in _starts(alone.held_out(), counted=True) for start in batch
        )
        found += _compared("evaluation", [here], [expected])
        found += _targets(mine, last_only)
    yield judged(trial, "P1", "data of all ranks with one rank's, each once", found, "equal")


def _starts(micro_batches, counted=False):
    """The first token of each micro-batch's sequences; `counted`: only with counted targets."""
    return [
        [
            int(row[0])
            for row, target in zip(*batch, strict=True)
            if not counted or np.all(target >= 0)
        ]
        for batch in micro_batches
    ]


def _compared(where, here, expected):
    for j, (mine, its) in enumerate(zip(here, expected, strict=True)):
        for i, (start, other) in enumerate(zip(mine, its, strict=False)):
            if start != other:
                pair = f"starts at token {start} here, {other} on one rank"
                text = f"{where}, micro-batch {j}, sequence {i}: {pair}"
                yield Finding(1.0, text)
        if len(mine) != len(its):
            yield Finding(
                1.0, f"{where}, micro-batch {j}: {len(mine)} sequences here, {len(its)} on one rank"
            )


def _repeated(where, here, seen):
    """Findings of repeated micro-batches: with so many positions, a draw never repeats."""
    for j, batch in enumerate(here):
        if tuple(batch) in seen:
            yield Finding(
                1.0, f"{where}, micro-batch {j}: the same sequences as {seen[tuple(batch)]}"
            )
        seen.setdefault(tuple(batch), f"{where}, micro-batch {j}")


def _targets(batches, last_only):
    """Findings of targets that are not the next tokens."""
    for inputs, targets in batches.of_step(TRIAL_SEED, 1, 1):
        expected = inputs[:, -1] + 1 if last_only else inputs + 1
        wrong = np.argwhere(targets != expected)
        if len(wrong):
            at = tuple(int(i) for i in wrong[0])
            text = (
                f"step 1, target {list(at)}: token {targets[at]} here, {expected[at]} in the text"
            )
            yield Finding(1.0, text)
