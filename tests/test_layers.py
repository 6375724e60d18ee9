"""The contract that every layer keeps, the plain loop, and the types of arrays that both run on."""

import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from small_models import arrays_of, both_models, gpt_case, spread

import models
from models import ops, plain_step, transformer, unit_of
from models.layer import forward_backward, zeros_like

# ---- the contract of a layer ---------------------------------------------------------------------


def walk(case, dtype=np.float32):
    """Yields (layer, w, x, y, saved) along one forward."""
    model, weights, (x, _) = case(dtype)
    for layer in model.layers:
        y, saved = layer.forward(weights[unit_of(layer)], x)
        yield layer, weights[unit_of(layer)], x, y, saved
        x = y


@both_models
def test_saved_and_output_hold_no_weights(case):
    for layer, w, _, y, saved in walk(case):
        for place, array in arrays_of((y, saved)):
            for name, weight in w.items():
                assert not np.shares_memory(array, weight), (layer.name, place, name)


@both_models
def test_forward_leaves_its_input_and_the_weights_as_they_were(case):
    model, weights, (x, _) = case(np.float32)
    kept = {name: array.copy() for name, array in arrays_of(weights)}
    for layer in model.layers:
        before = x.copy()
        y, _ = layer.forward(weights[unit_of(layer)], x)
        np.testing.assert_array_equal(x, before)
        x = y
    for name, array in arrays_of(weights):
        np.testing.assert_array_equal(array, kept[name])


@both_models
def test_forward_twice_gives_the_same_bits(case):
    for layer, w, x, y, saved in walk(case):
        for (_, first), (place, second) in zip(
            arrays_of((y, saved)), arrays_of(layer.forward(w, x)), strict=True
        ):
            np.testing.assert_array_equal(first, second, err_msg=f"{layer.name} {place}")


@both_models
def test_backward_adds_onto_the_gradient(case):
    model, weights, batch = case()
    gradient, onto = zeros_like(weights), spread(zeros_like(weights))
    start = {name: array.copy() for name, array in arrays_of(onto)}
    forward_backward(model, weights, gradient, batch, 1)
    forward_backward(model, weights, onto, batch, 1)
    for (name, dw), (_, sum_) in zip(arrays_of(gradient), arrays_of(onto), strict=True):
        # float64: the tied weight's two parts are added in another order
        np.testing.assert_allclose(sum_, start[name] + dw, rtol=1e-13, atol=1e-13, err_msg=name)


@both_models
def test_the_first_layer_returns_no_gradient(case):
    model, weights, (inputs, _) = case()
    first = model.layers[0]
    y, saved = first.forward(weights[unit_of(first)], inputs)
    assert first.backward(None, zeros_like(weights)[unit_of(first)], saved, y) is None


@both_models
def test_results_do_not_depend_on_where_the_weights_lie(case):
    model, weights, batch = case(np.float32)
    gradients = zeros_like(weights)
    loss = forward_backward(model, weights, gradients, batch, 3)
    for offset in (1, 3, 6):
        moved, moved_gradients = at_offset(weights, offset), at_offset(zeros_like(weights), offset)
        assert forward_backward(model, moved, moved_gradients, batch, 3) == loss
        for (name, dw), (_, moved_dw) in zip(
            arrays_of(gradients), arrays_of(moved_gradients), strict=True
        ):
            np.testing.assert_array_equal(dw, moved_dw, err_msg=name)


def at_offset(weights, offset):
    """The same numbers as views into one flat vector a unit, from element `offset` on."""
    views = {}
    for unit, w in weights.items():
        vector, start, views[unit] = (
            np.zeros(offset + sum(a.size for a in w.values()), np.float32),
            offset,
            {},
        )
        for name, array in w.items():
            views[unit][name] = vector[start : start + array.size].reshape(array.shape)
            views[unit][name][...] = array
            start += array.size
    return views


# ---- the plain loop ------------------------------------------------------------------------------


@both_models
def test_the_plain_loop_learns_a_batch_by_heart(case):
    model, weights, batch = case(np.float32)

    def sgd(weights, gradients):
        for (_, w), (_, dw) in zip(arrays_of(weights), arrays_of(gradients), strict=True):
            w -= 0.3 * dw

    losses = [plain_step(model, weights, [batch], sgd) for _ in range(200)]
    assert losses[-1] < 0.05 * losses[0]


@both_models
def test_micro_batches_add_up_to_one_batch(case):
    model, weights, (inputs, targets) = case()
    seen = []

    def keep(weights, gradients):
        seen.append(gradients)

    whole = plain_step(model, weights, [(inputs, targets)], keep)
    parts = plain_step(model, weights, [(inputs[:1], targets[:1]), (inputs[1:], targets[1:])], keep)
    assert parts == pytest.approx(whole, rel=1e-14)  # float64: the same terms in another order
    for (name, one), (_, two) in zip(arrays_of(seen[0]), arrays_of(seen[1]), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-12, atol=1e-14, err_msg=name)  # likewise


@both_models
def test_micro_batches_are_added_from_left_to_right(case):
    model, weights, (inputs, targets) = case(np.float32)
    batches = [(inputs[j : j + 1], targets[j : j + 1]) for j in (0, 1, 2)]
    counted, expected, loss_sum = (targets >= 0).sum(), zeros_like(weights), 0.0
    for batch in batches:
        partial = zeros_like(weights)
        loss_sum += forward_backward(model, weights, partial, batch, counted)
        for (_, total), (_, dw) in zip(arrays_of(expected), arrays_of(partial), strict=True):
            total += dw
    seen = []
    assert (
        plain_step(model, weights, batches, lambda weights, gradients: seen.append(gradients))
        == loss_sum / counted
    )
    for (name, total), (_, dw) in zip(arrays_of(expected), arrays_of(seen[0]), strict=True):
        np.testing.assert_array_equal(total, dw, err_msg=name)


def test_a_micro_batch_without_counted_targets_adds_nothing():
    model, weights, (inputs, targets) = gpt_case()
    seen = []

    def keep(weights, gradients):
        seen.append(gradients)

    one = plain_step(model, weights, [(inputs, targets)], keep)
    assert (
        plain_step(model, weights, [(inputs, targets), (inputs, np.full_like(targets, -1))], keep)
        == one
    )
    for (name, first), (_, second) in zip(arrays_of(seen[0]), arrays_of(seen[1]), strict=True):
        np.testing.assert_array_equal(first, second, err_msg=name)


def test_a_step_in_which_no_target_counts_is_an_error():
    model, weights, (inputs, targets) = gpt_case()
    with pytest.raises(ValueError, match="expected one of at least 0, got none in 1 micro"):
        plain_step(model, weights, [(inputs, np.full_like(targets, -1))], None)


# ---- types of arrays -----------------------------------------------------------------------------


def float64_arrays_seen_in(case):
    """Run a float32 step, looking at all local variables before every line of models/."""
    folder, found = str(Path(models.__file__).parent), set()

    def look(frame, event, arg):
        if not frame.f_code.co_filename.startswith(folder):
            return None
        for name, value in frame.f_locals.items():
            if any(array.dtype == np.float64 for array in arrays_within(value)):
                found.add(f"{frame.f_code.co_name}: {name}")
        return look

    model, weights, batch = case(np.float32)
    sys.settrace(look)
    try:
        plain_step(model, weights, [batch], lambda weights, gradients: None)
    finally:
        sys.settrace(None)
    return found


def arrays_within(value):
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from arrays_within(part)


@both_models
def test_no_float64_array_appears_in_float32(case):
    assert float64_arrays_seen_in(case) == set()


def test_a_float64_array_would_be_seen(monkeypatch):
    monkeypatch.setattr(transformer, "bias_gelu", lambda x, b: ops.gelu(x + b) * np.float64(1))
    assert "linear: x" in float64_arrays_seen_in(gpt_case)


class Elsewhere(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that, like a GPU's, computes only with its kind and numbers; notes dtypes."""

    dtypes: ClassVar = set()

    def __init__(self, array):
        self.array = array
        self.dtypes.add((array.dtype, array.ndim > 0))

    @staticmethod
    def out(value):
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("an array of NumPy's met one from elsewhere")
        if isinstance(value, (tuple, list)):
            return tuple(Elsewhere.out(v) for v in value)
        return value.array if isinstance(value, Elsewhere) else value

    def call(self, function, args, kwargs):
        result = function(*self.out(args), **{k: self.out(v) for k, v in kwargs.items()})
        if "out" in kwargs:
            return kwargs["out"][0]
        return Elsewhere(result) if isinstance(result, (np.ndarray, np.generic)) else result

    def __array_ufunc__(self, ufunc, method, *args, **kwargs):
        return self.call(getattr(ufunc, method), args, kwargs)

    def __array_function__(self, function, types, args, kwargs):
        return self.call(function, args, kwargs)

    def __getattr__(self, name):
        value = getattr(self.array, name)
        if callable(value):
            return lambda *args, **kwargs: self.call(value, args, kwargs)
        return Elsewhere(value) if isinstance(value, np.ndarray) else value

    def __getitem__(self, key):
        return Elsewhere(self.array[self.out(key)])

    def __setitem__(self, key, value):
        self.array[self.out(key)] = self.out(value)

    def __len__(self):
        return len(self.array)

    def __bool__(self):
        return bool(self.array)

    def __float__(self):
        return float(self.array)

    def __int__(self):
        return int(self.array)


def sent_elsewhere(nested):
    if isinstance(nested, dict):
        return {key: sent_elsewhere(value) for key, value in nested.items()}
    return Elsewhere(nested)


@both_models
def test_one_source_serves_arrays_that_are_not_numpys(case):
    model, weights, (inputs, targets) = case(np.float32)
    expected, result = [], []
    loss = plain_step(
        model, weights, [(inputs, targets)], lambda w, gradients: expected.append(gradients)
    )
    Elsewhere.dtypes.clear()
    batch = (Elsewhere(inputs), Elsewhere(targets))
    assert (
        plain_step(
            model, sent_elsewhere(weights), [batch], lambda w, gradients: result.append(gradients)
        )
        == loss
    )
    for (name, here), (_, there) in zip(arrays_of(expected[0]), arrays_of(result[0]), strict=True):
        np.testing.assert_array_equal(there.array, here, err_msg=name)
    # every result of every call: floats are float32; the loss sum, which has no axes, is float64
    assert {d for d, has_axes in Elsewhere.dtypes if has_axes and d.kind == "f"} == {
        np.dtype(np.float32)
    }
