"""zmpi.verify with your own model and optimizer: every check runs on them and finds mistakes."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from own.lion import Lion

import zmpi.verify
from zmpi.proof.trial import Trial
from zmpi.verify import promises

SIZES = (3,)
OWN = Path(__file__).resolve().parent.parent / "own"
CHECKS = ("stages_agree", "order_is_kept", "gradient_is_right", "volumes_are_exact")


@dataclass(frozen=True, kw_only=True)
class Whole(Lion):
    """Each element's step depends on the largest gradient of the slice that its rank owns."""

    def update(self, owned, t, factor):
        super().update(owned, t, factor / (1e-3 + float(np.abs(owned.gradient).max())))


def test_small_sizes_of_ones_own_classes_are_checked(world):
    flags = ["--model", f"{OWN}/bigram.py:Bigram", "--optimizer", f"{OWN}/lion.py:Lion"]
    trial = zmpi.verify._trial(zmpi.verify.parser().parse_args(flags), world)
    assert list(trial.models) == ["Bigram"] and trial.optimizer.moments == ("m",)
    assert (trial.models["Bigram"].vocab, trial.large.vocab) == (29, 401)
    assert trial.models["Bigram"].layers[0].width == 15  # the class's parameters get small sizes
    checks = [getattr(zmpi.verify, check) for check in CHECKS]
    rows = list(promises(trial, checks))
    assert rows and all(row.passed for row in rows), rows


def test_an_optimizer_whose_steps_depend_on_the_slice_is_red(world):
    found = promises(Trial(world, optimizer=Whole()), (zmpi.verify.stages_agree,))
    rows = [row for row in found if not row.passed]
    assert rows and {row.promise for row in rows} == {"P1 a"}
    assert all("stage" in row.where for row in rows)
