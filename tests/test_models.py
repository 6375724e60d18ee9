"""Both models: their gradients, names, sizes, errors and initial weights.

Gradients are compared in float64 with finite differences of five points at h = 1e-3 (error near
1e-12, see test_ops): 1e-6 of the expected value leaves room for directions along which many terms
cancel.
"""

import math

import numpy as np
import pytest
from small_models import SMALL_GPT, SMALL_MLP, arrays_of, both_models, gpt_case

from models import GPT, MLP, key_for, plain_step, plain_weights, transformer, unit_of, units
from models.layer import forward_backward, parameter_count, zeros_like


def logits_of(model, weights, x):
    for layer in model.layers:
        x, _ = layer.forward(weights[unit_of(layer)], x)
    return x


def loss_of(model, weights, micro_batch):
    return model.loss(logits_of(model, weights, micro_batch[0]), micro_batch[1], 1)[0]


def five_points(f, h=1e-3):
    return (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h)


# ---- gradients -----------------------------------------------------------------------------------


@both_models
def test_the_gradient_of_every_parameter_is_right(case):
    model, weights, batch = case()
    gradients = zeros_like(weights)
    forward_backward(model, weights, gradients, batch, 1)
    rng = np.random.default_rng(1)
    for (name, w), (_, dw) in zip(arrays_of(weights), arrays_of(gradients), strict=True):
        for _ in range(3):
            direction, start = rng.standard_normal(w.shape), w.copy()

            def moved(step, w=w, start=start, direction=direction):
                w[...] = start + step * direction
                return loss_of(model, weights, batch)

            expected = five_points(moved)
            w[...] = start
            assert np.sum(dw * direction) == pytest.approx(expected, rel=1e-6), name


@both_models
def test_the_gradient_of_every_element_of_small_parameters_is_right(case):
    model, weights, batch = case()
    gradients = zeros_like(weights)
    forward_backward(model, weights, gradients, batch, 1)
    for (name, w), (_, dw) in zip(arrays_of(weights), arrays_of(gradients), strict=True):
        expected = np.zeros_like(dw)
        for i in list(np.ndindex(w.shape))[:40]:
            start = w[i]

            def moved(step, w=w, i=i, start=start):
                w[i] = start + step
                return loss_of(model, weights, batch)

            expected[i], dw_i = five_points(moved), dw[i]
            w[i] = start
            assert abs(dw_i - expected[i]) <= 1e-6 * np.abs(dw).max(), (name, i)


def test_the_tied_weight_receives_both_gradients():
    model, weights, (inputs, targets) = gpt_case()
    inputs[inputs == 10] = 4  # token 10 is a target only, token 7 of the second row an input only
    targets[targets == 7] = -1
    both, head = zeros_like(weights), zeros_like(weights)
    forward_backward(model, weights, both, (inputs, targets), 1)
    model.layers[0].backward = lambda w, dw, saved, dy: None
    forward_backward(model, weights, head, (inputs, targets), 1)
    from_embedding = both["outer"]["wte.weight"] - head["outer"]["wte.weight"]
    assert head["outer"]["wte.weight"].any(axis=1).all()  # the softmax reaches every token
    np.testing.assert_array_equal(
        from_embedding.any(axis=1), [token in inputs for token in range(11)]
    )


# ---- the models ----------------------------------------------------------------------------------


def test_logits_do_not_depend_on_later_tokens():
    model, weights, (inputs, _) = gpt_case(np.float32)
    logits = logits_of(model, weights, inputs)
    for t in range(5):
        later = inputs.copy()
        later[:, t:] = (later[:, t:] + 1) % 11
        changed = logits_of(model, weights, later) != logits
        assert not changed[:, :t].any()
        assert changed[:, t:].any(axis=2).all()


def test_a_shorter_sequence_is_the_start_of_a_longer_one():
    model, weights, (inputs, targets) = gpt_case()
    # float64: matrix products of other sizes may add up in another order
    np.testing.assert_allclose(
        logits_of(model, weights, inputs[:, :3]),
        logits_of(model, weights, inputs)[:, :3],
        rtol=0,
        atol=1e-13,
    )
    gradients = zeros_like(weights)
    forward_backward(model, weights, gradients, (inputs[:, :3], targets[:, :3]), 1)
    assert gradients["outer"]["wpe.weight"].any(axis=1).tolist() == [True, True, True, False, False]


def test_the_gpt_has_the_names_and_shapes_of_gpt_2():
    C = 6
    block = [
        ("ln_1.weight", (C,)),
        ("ln_1.bias", (C,)),
        ("attn.c_attn.weight", (C, 3 * C)),
        ("attn.c_attn.bias", (3 * C,)),
    ]
    block += [
        ("attn.c_proj.weight", (C, C)),
        ("attn.c_proj.bias", (C,)),
        ("ln_2.weight", (C,)),
        ("ln_2.bias", (C,)),
    ]
    block += [("mlp.c_fc.weight", (C, 4 * C)), ("mlp.c_fc.bias", (4 * C,))]
    block += [("mlp.c_proj.weight", (4 * C, C)), ("mlp.c_proj.bias", (C,))]
    expected = {"wte.weight": (11, C), "wpe.weight": (5, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
    expected |= {f"h.{i}.{name}": shape for i in range(2) for name, shape in block}
    specs = units(GPT(**SMALL_GPT))
    assert list(specs) == ["outer", "h.0", "h.1"]
    assert {
        s.prefix + name: shape for s in specs.values() for name, shape in s.shapes.items()
    } == expected


def test_gpt_2_small_has_124439808_parameters():
    gpt_2 = GPT(layers=12, width=768, heads=12, context=1024, vocab=50257)
    assert parameter_count(gpt_2) == 124_439_808


def test_every_layer_of_the_mlp_is_a_unit_of_its_own():
    assert {unit: (s.prefix, s.shapes) for unit, s in units(MLP(**SMALL_MLP)).items()} == {
        "embed": ("embed.", {"weight": (11, 6)}),
        "hidden.0": ("hidden.0.", {"weight": (30, 6), "bias": (6,)}),
        "hidden.1": ("hidden.1.", {"weight": (6, 6), "bias": (6,)}),
        "head": ("head.", {"weight": (6, 11), "bias": (11,)}),
    }


def test_models_keep_their_sizes():
    gpt, mlp = GPT(**SMALL_GPT), MLP(**SMALL_MLP)
    assert (gpt.depth, gpt.width, gpt.heads, gpt.context, gpt.vocab) == (2, 6, 3, 5, 11)
    assert (mlp.depth, mlp.width, mlp.context, mlp.vocab) == (2, 6, 5, 11)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 7, "width": 64}, "heads: 7 does not divide width 64"),
        ({"heads": 0}, "heads: expected a whole number of at least 1, got 0"),
        ({"width": -6}, "width: expected a whole number of at least 1, got -6"),
        ({"layers": 0}, "layers: expected a whole number of at least 1, got 0"),
        ({"context": 0}, "context: expected a whole number of at least 1, got 0"),
        ({"vocab": 0}, "vocab: expected a whole number of at least 1, got 0"),
    ],
)
def test_a_bad_size_is_named_with_its_value(change, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        GPT(**{**SMALL_GPT, **change})
    if "heads" not in change:
        with pytest.raises(ValueError, match=f"^{message}$"):
            MLP(**{**SMALL_MLP, **change})


@both_models
def test_inputs_longer_than_the_context_are_an_error(case):
    model, weights, _ = case()
    first = model.layers[0]
    with pytest.raises(ValueError, match=r"^inputs: expected (at most )?5 tokens per \w+, got 6$"):
        first.forward(weights[unit_of(first)], np.zeros((2, 6), np.int64))


@both_models
@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.uint16])
def test_a_token_outside_of_the_vocabulary_is_an_error_of_the_plain_loop(case, dtype):
    model, weights, (inputs, targets) = case()
    for name, token in (("inputs", -1), ("inputs", 11), ("targets", 11)):
        batch = {"inputs": inputs.astype(dtype), "targets": np.maximum(targets, 0).astype(dtype)}
        batch[name].flat[1] = np.array(token).astype(dtype)  # -1 is 65535 in 16 bits without a sign
        got = batch[name].flat[1]
        at = r"\[1\]" if batch[name].ndim == 1 else r"\[0, 1\]"
        with pytest.raises(
            ValueError, match=rf"^micro-batch 1: {name}{at}: .*10 .*11\), got {got}$"
        ):
            plain_step(model, weights, [(inputs, targets), tuple(batch.values())], None)
    with pytest.raises(ValueError, match="inputs: expected whole numbers, got float64"):
        plain_step(model, weights, [(inputs / 1, targets)], None)


def test_layers_that_share_a_unit_agree_on_shapes():
    model = GPT(**SMALL_GPT)
    model.layers[-1] = transformer.GPTHead(6, 12)
    with pytest.raises(
        ValueError,
        match=r"^unit outer: wte.weight has shape \(11, 6\) in one layer, \(12, 6\) in another",
    ):
        units(model)


def test_two_layers_of_one_name_are_an_error():
    model = GPT(**SMALL_GPT)
    model.layers[2] = GPT(**SMALL_GPT).layers[1]
    with pytest.raises(ValueError, match=r"^unit h\.0: two layers"):
        units(model)


def test_one_layer_at_two_places_is_an_error():
    """What it keeps for its backward is kept once."""
    model = GPT(**SMALL_GPT)
    model.layers[2] = model.layers[1]
    with pytest.raises(ValueError, match=r"^model: layer h\.0 appears twice"):
        units(model)


# ---- initial weights -----------------------------------------------------------------------------


def test_initial_weights_depend_on_seed_and_name_only():
    small = plain_weights(GPT(**SMALL_GPT), 3, np.float32)
    deep = plain_weights(GPT(**{**SMALL_GPT, "layers": 4}), 3, np.float32)
    other = plain_weights(GPT(**SMALL_GPT), 4, np.float32)
    for name in ("attn.c_attn.weight", "mlp.c_fc.weight"):
        np.testing.assert_array_equal(small["h.1"][name], deep["h.1"][name])
        assert (small["h.1"][name] != small["h.0"][name]).any()
        assert (small["h.1"][name] != other["h.1"][name]).any()


def test_the_key_is_the_same_in_every_process():
    # what this function gave when it was written; another number means that every seed changed
    assert key_for(0, "h.0.")("attn.c_attn.weight").integers(1 << 32) == 3716446471


def test_initial_weights_are_the_same_numbers_in_both_precisions():
    for (name, single), (_, double) in zip(
        arrays_of(plain_weights(GPT(**SMALL_GPT), 0, np.float32)),
        arrays_of(plain_weights(GPT(**SMALL_GPT), 0, np.float64)),
        strict=True,
    ):
        assert (single.dtype, double.dtype) == (np.float32, np.float64)
        np.testing.assert_array_equal(single, double, err_msg=name)


def test_initial_weights_of_the_gpt_have_gpt_2s_scales():
    weights = plain_weights(GPT(layers=8, width=64, heads=4, context=64, vocab=128), 0, np.float32)
    scales = {
        "wte.weight": 0.02,
        "wpe.weight": 0.02,
        "attn.c_attn.weight": 0.02,
        "mlp.c_fc.weight": 0.02,
    }
    scales |= {"attn.c_proj.weight": 0.005, "mlp.c_proj.weight": 0.005}  # 0.02 / sqrt(2 * 8)
    for unit in ("outer", "h.0", "h.7"):
        for name, array in weights[unit].items():
            if name in scales:
                # 4096 draws or more: the deviation's own deviation is 1/sqrt(2 * 4096) = 1.1 %
                assert array.std() == pytest.approx(scales[name], rel=0.05), name
            else:
                np.testing.assert_array_equal(
                    array, 1 if name.startswith("ln") and name.endswith("weight") else 0
                )


@both_models
def test_training_starts_from_the_loss_of_a_guess(case):
    model, _, batch = case()
    counted = (batch[1] >= 0).sum()
    loss = loss_of(model, plain_weights(model, 0, np.float64), batch) / counted
    assert loss == pytest.approx(math.log(11), rel=0.05)  # logits have a deviation near 0.05
