"""Recipes and their bytes, what a policy refuses, rounding to 16 bits, and the loss scaler."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmpi.core.unit import round_to
from zmpi.numbers.precision import RECIPES, LossScaler, Policy

NARROW = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def test_recipes_declare_their_bytes():
    found = {
        name: (r.parameter.itemsize, r.gradient.itemsize, r.optimizer_bytes(2))
        for name, r in RECIPES.items()
    }
    assert found == {
        "float32": (4, 4, 8),
        "float16": (2, 2, 12),
        "bfloat16": (2, 2, 12),
        "float64": (8, 8, 16),
    }


def test_a_recipe_is_written_as_the_paper_writes_it():
    assert RECIPES["float16"].describe() == "2 + 2 + 12 bytes per parameter (float16)"
    assert RECIPES["float32"].describe(moments=0) == "4 + 4 + 0 bytes per parameter (float32)"
    assert RECIPES["bfloat16"].bytes_per_parameter(1) == {
        "name": "bfloat16",
        "parameters": 2,
        "gradients": 2,
        "optimizer": 8,
    }


def test_only_16_bits_have_a_separate_master():
    assert {name: recipe.own_master for name, recipe in RECIPES.items()} == {
        "float32": True,
        "float64": True,
        "float16": False,
        "bfloat16": False,
    }


@pytest.mark.parametrize("name", NARROW)
def test_16_bits_are_computed_summed_and_updated_in_float32(name):
    assert RECIPES[name].compute == RECIPES[name].master == np.float32
    assert RECIPES[name].parameter == RECIPES[name].gradient == NARROW[name]


def test_recipes_and_policies_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECIPES["float32"].name = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().prefetch = 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"precision": "float8"},
            "precision: expected one of float32, bfloat16, float16, float64; got 'float8'",
        ),
        ({"prefetch": 2}, "prefetch: expected 0 or 1, got 2"),
        ({"loss_scale": 8.0}, "loss_scale: applies to precision float16 only, not to float32"),
        (
            {"precision": "bfloat16", "loss_scale": 8.0},
            "loss_scale: applies to precision float16 only, not to bfloat16",
        ),
        (
            {"precision": "float16", "loss_scale": 0.5},
            "loss_scale: expected auto, or a number from 1",
        ),
        (
            {"precision": "float16", "loss_scale": float("nan")},
            "loss_scale: expected auto, or a number from 1",
        ),
        (
            {"precision": "float16", "loss_scale": float("inf")},
            "loss_scale: expected auto, or a number from 1",
        ),
        (
            {"precision": "float16", "loss_scale_window": 0},
            "loss_scale_window: expected a whole number of at least 1, got 0",
        ),
    ],
)
def test_what_a_policy_cannot_be_is_an_error(wrong, message):
    with pytest.raises(ValueError, match="^" + message):
        Policy(**wrong)


# ---- rounding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NARROW)
def test_rounding_is_to_the_nearest_and_to_even(name):
    wide = np.array(
        [1, 1 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-9, 2048, 2049, 2051, -0.0, 1e-30], np.float32
    )
    narrow = np.empty(len(wide), NARROW[name])
    assert round_to(narrow, wide) in (0, None)
    exact = {
        "float16": [1, 1 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-9, 2048, 2048, 2052, 0, 0],
        "bfloat16": [1, 1, 1, 1 + 2**-7, 2048, 2048, 2048, 0, float(ml_dtypes.bfloat16(1e-30))],
    }
    assert narrow.astype(np.float64).tolist() == exact[name]


def test_what_is_too_large_becomes_infinite_without_a_warning():
    wide = np.array([65_504, 65_519, 65_521, -7e4, np.inf, np.nan], np.float32)
    narrow = np.empty(len(wide), np.float16)
    with np.errstate(all="raise"):
        round_to(narrow, wide)
    np.testing.assert_array_equal(
        narrow.astype(np.float32), [65_504, 65_504, np.inf, -np.inf, np.inf, np.nan]
    )


@given(st.floats(width=32, allow_nan=False))
def test_rounding_twice_is_rounding_once(value):
    for dtype in NARROW.values():
        once, twice = np.empty(1, dtype), np.empty(1, dtype)
        round_to(once, np.array([value], np.float32))
        round_to(twice, once.astype(np.float32))
        assert once.tobytes() == twice.tobytes()


# ---- the loss scaler -----------------------------------------------------------------------------


def test_float16_alone_starts_with_a_scale():
    assert {name: Policy(name).scaler().scale for name in RECIPES} == {
        "float32": 1.0,
        "float64": 1.0,
        "bfloat16": 1.0,
        "float16": 2.0**16,
    }


def test_an_overflow_halves_the_scale():
    scaler = Policy("float16").scaler()
    scaler.after_step(overflow=True)
    assert scaler.scale == 2.0**15


def test_good_steps_double_the_scale_only_in_a_row():
    scaler = Policy("float16", loss_scale_window=3).scaler()
    scales = []
    for overflow in (False, False, True, False, False, False, False):
        scaler.after_step(overflow)
        scales.append(scaler.scale / 2.0**16)
    assert scales == [1, 1, 0.5, 0.5, 0.5, 1, 1]


def test_more_good_steps_than_the_window_double_it_at_once():
    """As after a load into an engine whose window is shorter."""
    scaler = Policy("float16", loss_scale_window=3).scaler()
    scaler.good_steps = 10
    scaler.after_step(overflow=False)
    assert (scaler.scale, scaler.good_steps) == (2.0**17, 0)


def test_the_window_is_2000_steps_by_default():
    scaler = Policy("float16").scaler()
    for _ in range(1999):
        scaler.after_step(overflow=False)
    assert scaler.scale == 2.0**16
    scaler.after_step(overflow=False)
    assert scaler.scale == 2.0**17


@given(st.lists(st.booleans(), max_size=300), st.integers(1, 3))
def test_the_scale_is_a_power_of_2_from_1_to_2_to_the_24(overflows, window):
    scaler = Policy("float16", loss_scale_window=window).scaler()
    for overflow in overflows:
        scaler.after_step(overflow)
        assert 1 <= scaler.scale <= LossScaler.HIGHEST == 2.0**24
        assert np.log2(scaler.scale).is_integer()


def test_the_scale_never_grows_past_its_cap_nor_falls_below_1():
    scaler = Policy("float16", loss_scale_window=1).scaler()
    for _ in range(5000):
        scaler.after_step(overflow=False)
    assert scaler.scale == 2.0**24
    for _ in range(5000):
        scaler.after_step(overflow=True)
    assert scaler.scale == 1.0


@pytest.mark.parametrize(
    "policy", [Policy("float16", loss_scale=128), Policy("bfloat16"), Policy("float32")]
)
def test_a_fixed_scale_stays(policy):
    scaler = policy.scaler()
    start = scaler.scale
    for overflow in (True, False, True) * 2000:
        scaler.after_step(overflow)
    assert scaler.scale == start == (128 if policy.precision == "float16" else 1)
