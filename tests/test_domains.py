"""Every number that a setting may have, as a flag and from Python. No bool, NaN or infinity."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest

from models import GPT, MLP
from zmpi import SGD, AdamW, Policy
from zmpi.numbers.domains import Domain
from zmpi.text.data import Batches, Text

NO_NUMBERS = [True, False, np.True_, None, "1", math.nan, math.inf, -math.inf, np.array(1.0), 1j]
REALS = {
    "AdamW": (AdamW, ("lr", "clip", "weight_decay", "beta1", "beta2", "eps")),
    "SGD": (SGD, ("lr", "clip", "weight_decay", "momentum")),
}
FLOAT16 = {"precision": "float16"}
WHOLE = [
    *((AdamW, {}, name) for name in ("warmup", "decay_steps")),
    *(
        (GPT, {"layers": 1, "width": 2, "heads": 1, "context": 2, "vocab": 2}, name)
        for name in ("layers", "width", "heads", "context", "vocab")
    ),
    *(
        (MLP, {"layers": 1, "width": 2, "context": 2, "vocab": 2}, name)
        for name in ("layers", "width", "context", "vocab")
    ),
    (Policy, {}, "prefetch"),
    (Policy, FLOAT16, "loss_scale_window"),
]


def named(kind):
    return [
        pytest.param(kind, name, id=f"{kind.__name__}-{name}") for name in REALS[kind.__name__][1]
    ]


@pytest.mark.parametrize(("kind", "name"), named(AdamW) + named(SGD))
def test_a_hyperparameter_is_a_finite_number(kind, name):
    for value in NO_NUMBERS:
        with pytest.raises(ValueError, match=f"^{name}: expected a finite number"):
            kind(**{name: value})


@pytest.mark.parametrize(("kind", "others", "name"), WHOLE)
def test_a_count_is_a_whole_number(kind, others, name):
    for value in [*NO_NUMBERS, 1.5, 2.0]:
        with pytest.raises(ValueError, match=f"^{name}: expected (a whole number|0 or 1)"):
            kind(**{**others, name: value})


@pytest.mark.parametrize("value", [True, 0, 0.5, (1 << 24) + 1, math.nan, "much", None])
def test_a_loss_scale_is_auto_or_a_number(value):
    with pytest.raises(
        ValueError, match=r"^loss_scale: expected auto, or a number from 1 to 2\^24"
    ):
        Policy("float16", loss_scale=value)


@pytest.mark.parametrize("value", [1, 0, "no", None])
def test_recompute_is_a_bool(value):
    with pytest.raises(ValueError, match=r"^recompute: expected True or False"):
        Policy(recompute=value)


@pytest.mark.parametrize("value", [None, 3, ["float32"], "float8"])
def test_a_precision_is_one_of_the_recipes(value):
    with pytest.raises(ValueError, match=r"^precision: expected one of"):
        Policy(value)


def test_numbers_of_numpy_become_pythons_own():
    """A checkpoint's manifest and the log are JSON, which knows no others."""
    optimizer = AdamW(lr=np.float32(0.5), warmup=np.int64(3), beta1=np.float64(0.5), clip=1)
    assert optimizer == AdamW(lr=0.5, warmup=3, beta1=0.5, clip=1.0)
    assert {type(x) for x in (optimizer.lr, optimizer.beta1, optimizer.clip)} == {float}
    model = GPT(np.int64(1), np.int32(4), np.uint8(2), np.int64(3), np.int64(5))
    json.dumps(
        [optimizer.warmup, model.depth, model.width, model.heads, model.context, model.vocab]
    )
    assert Policy(prefetch=np.int64(1), recompute=np.bool_(True)) == Policy(recompute=True)


def test_eps_keeps_adams_step_a_number():
    """Without gradients m / (sqrt(v) + eps) is 0 / eps: eps is far enough above 0 for float32."""
    with pytest.raises(
        ValueError, match=r"^eps: expected a finite number of at least 1e-30, got 0"
    ):
        AdamW(eps=0)
    smallest = AdamW(eps=1e-30, beta2=np.nextafter(1, 0))
    assert np.float32(smallest.eps * math.sqrt(1 - smallest.beta2)) > 0


def test_a_decay_that_ends_with_the_warm_up_is_refused():
    """The rate would fall tenfold in one step."""
    for steps in (0, 10, 20):
        with pytest.raises(ValueError, match=r"^decay_steps: expected more than the warm-up's 20"):
            AdamW(warmup=20, schedule="cosine", decay_steps=steps)
    rates = [AdamW(warmup=2, schedule="cosine", decay_steps=30).rate(t) for t in range(2, 31)]
    assert max(a / b for a, b in pairwise(rates)) < 1.2


def test_decay_never_turns_weights_over():
    with pytest.raises(ValueError, match=r"^weight_decay: expected at most 1/lr = 2, got 3"):
        AdamW(lr=0.5, weight_decay=3)


@pytest.mark.parametrize("value", [0, True, 2.0, -1])
def test_a_micro_batch_is_a_whole_number(value):
    text = Text(np.zeros(9, np.uint8), np.zeros(0, np.uint8), 4)
    with pytest.raises(ValueError, match=r"^micro_batch: expected a whole number of at least 1"):
        Batches(text, 0, 1, value, last_only=False)


def test_a_domain_names_the_bound_that_was_crossed():
    few = Domain(1, below=10, whole=True)
    assert [few.parse(text) for text in ("1", "9")] == [1, 9]
    told = {
        "0": "expected a whole number of at least 1, got 0",
        "10": "expected a whole number of at least 1 and below 10, got 10",
        "x": "expected a whole number of at least 1, got 'x'",
    }
    for text, line in told.items():
        with pytest.raises(ValueError, match=f"^{line}$"):
            few.parse(text)
    assert not Domain(above=True).fits(0) and Domain(above=True).fits(1e-300)
    assert not Domain().fits(10**400)  # beyond every float
