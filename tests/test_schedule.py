"""The schedule: what each visit gathers, frees and reduces. Tested as a table, without MPI."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import GPT, MLP, Layer, unit_of
from zmpi.core.schedule import evaluation_schedule, training_schedule


def walk(model, make=training_schedule):
    return make(model.layers, [unit_of(layer) for layer in model.layers])


def gpt(layers=2):
    return GPT(layers, 4, 2, 3, 5)


def mlp(layers=2):
    return MLP(layers, 4, 3, 5)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_every_unit_of_the_gpt_is_gathered_twice_and_reduced_once(layers):
    units = ["outer", *(f"h.{i}" for i in range(layers))]
    assert walk(gpt(layers)).gathers == dict.fromkeys(units, 2)
    assert walk(gpt(layers)).reduces == dict.fromkeys(units, 1)


def test_the_first_and_last_layer_of_the_mlp_are_gathered_once():
    schedule = walk(mlp(3))
    assert schedule.gathers == {"embed": 1, "hidden.0": 2, "hidden.1": 2, "hidden.2": 2, "head": 1}
    assert schedule.reduces == dict.fromkeys(schedule.gathers, 1)


def test_the_printed_table_is_the_walk():
    assert str(walk(gpt(1))).splitlines() == [
        "visit  layer  unit   what happens",
        "0      0      outer  gather, forward, free",
        "1      1      h.0    gather, forward, free",
        "2      2      outer  gather, forward, loss, backward, free",
        "3      1      h.0    gather, backward, free, reduce",
        "4      0      outer  backward, reduce",
    ]


def test_evaluation_walks_forwards_only():
    schedule = walk(gpt(2), evaluation_schedule)
    assert [(visit.layer, visit.verbs()) for visit in schedule] == [
        (i, ["gather", "forward", "free"]) for i in range(4)
    ]
    assert not schedule.reduces


def test_the_turn_is_one_visit():
    for model in (gpt(), mlp()):
        schedule = walk(model)
        assert [visit.layer for visit in schedule if visit.turn] == [len(model.layers) - 1]
        assert len(schedule) == 2 * len(model.layers) - 1


class Any(Layer):
    def __init__(self, unit, needs):
        self.name, self.unit, self.backward_needs_weights = unit, unit, needs


layers = st.lists(st.builds(Any, st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=8)


@given(layers)
def test_a_full_vector_is_there_at_every_visit_that_needs_it_and_gone_at_the_end(layers):
    """For any list of layers, tied in any way, at most one unit's full vector exists at a time."""
    schedule, there = training_schedule(layers, [layer.unit for layer in layers]), Counter()
    for visit in schedule:
        there[visit.unit] += visit.gather
        if visit.weights:
            assert there == {visit.unit: 1}
        there[visit.unit] -= visit.free
        there = +there
        assert visit.weights or not there
    assert not there


@given(layers)
def test_every_layer_goes_forwards_once_and_backwards_once_in_the_other_direction(layers):
    schedule = training_schedule(layers, [layer.unit for layer in layers])
    assert [visit.layer for visit in schedule if visit.forward] == list(range(len(layers)))
    assert [visit.layer for visit in schedule if visit.backward] == list(
        reversed(range(len(layers)))
    )
    for visit in schedule:
        assert visit.weights == (visit.forward or layers[visit.layer].backward_needs_weights)


@given(layers)
def test_a_unit_is_reduced_once_after_the_last_visit_that_adds_to_its_gradient(layers):
    schedule = training_schedule(layers, [layer.unit for layer in layers])
    assert schedule.reduces == dict.fromkeys({layer.unit for layer in layers}, 1)
    for unit in schedule.reduces:
        visits = [visit for visit in schedule if visit.unit == unit and visit.backward]
        assert [visit.reduce for visit in visits] == [False] * (len(visits) - 1) + [True]


@given(layers)
def test_a_unit_that_the_next_visit_needs_is_kept(layers):
    schedule = training_schedule(layers, [layer.unit for layer in layers])
    for visit, following in pairwise(schedule):
        if visit.unit == following.unit and visit.weights and following.weights:
            assert not visit.free and not following.gather
