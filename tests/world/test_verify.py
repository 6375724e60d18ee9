"""zmpi.verify: green as it is, and each planted mistake turns a row red that says where."""

import re

import numpy as np
import pytest
from faults.planted import PLANTED
from own.nibbles import Nibbles, Swapped

import zmpi.verify
from zmpi import ZeRO
from zmpi.proof.outcome import Outcome, Part, Taken
from zmpi.proof.trial import Trial
from zmpi.verify import promises

SIZES = (1, 3, 4)
# Of every check the mistakes that stayed green once, or that once ended in something else than a
# row. All of them, with the whole command: tests/faults/planted.py.
QUICK = (
    "the last chunk is left out",
    "every rank gets rank 0's data",
    "the tied unit is reduced twice",
    "the shard's offset from the unpadded size",
    "bytes of float32 in every precision",
    "a full vector is kept after the step",
    "weight decay on biases",
    "Adam's bias correction with t + 1",
    "a warm-up off by one",
    "clipping that scales up",
    "the norm is left scaled in float16",
    "the moments are swapped by a load",
)


def red(trial, check):
    """The rows of one check that are not kept."""
    return [row for row in promises(trial, (getattr(zmpi.verify, check),)) if not row.passed]


def test_all_promises_are_kept(world):
    rows = list(promises(Trial(world)))
    assert [row for row in rows if not row.passed or not row.checked] == []
    assert {row.promise for row in rows} == {
        "P1",
        "P1 a",
        "P1 a'",
        "P1 b",
        "P1 c",
        "P2",
        "P3",
        "P5",
    }


@pytest.mark.sizes(3)
def test_all_promises_are_kept_in_16_bits(world):
    rows = list(promises(Trial(world, precision="bfloat16")))  # float16: in the checks themselves
    assert [row for row in rows if not row.passed or not row.checked] == []


@pytest.mark.sizes(3)
@pytest.mark.parametrize("name", QUICK)
def test_a_planted_mistake_is_a_red_row_that_says_where(world, name):
    planted = PLANTED[name]
    with planted.planted():
        rows = red(Trial(world), planted.found_by)
    assert rows and rows[0].figure != "ended by an error"
    for row in rows:
        assert re.search(r"\d", row.where)
        assert not re.search(r"NoneType|\binf\b", row.where + row.figure)


@pytest.mark.sizes(4)
def test_all_ranks_get_the_same_rows(world, comm):
    planted = PLANTED["the last rank starts from other weights"]
    with planted.planted():
        rows = red(Trial(world), planted.found_by)
    assert rows
    assert comm.allgather(rows) == [rows] * comm.size


def outcome(*weights):
    """A run of one step that came to these weights."""
    part = Part.whole(np.array(weights))
    return Outcome("a run", [Taken(1.0, {}, 1.0, {"w": part})], {"w": np.array(weights)})


def test_a_weight_that_is_not_a_number_is_a_difference():
    bad, good = outcome(1.0, np.nan), outcome(1.0, 2.0)
    assert np.isnan(bad.difference(good)) and np.isnan(good.difference(bad))
    assert bad.compared(good, "there").where == "a run, step 1: weight w[1]: nan here, 2 there"
    assert good.difference(good) == 0.0 and not good.compared(good, "there").where


@pytest.mark.sizes(3)
def test_rounding_as_declared_passes_and_swapped_nibbles_look_nothing_like_it(world):
    messages = zmpi.verify.messages_arrive
    others = zmpi.verify.stages_agree, zmpi.verify.volumes_are_exact
    trials = [Trial(world, engine_with(kind), tolerance=0.1) for kind in (Nibbles, Swapped)]
    right, swapped = (list(promises(trial, (messages,))) for trial in trials)
    right += promises(trials[0], others)
    assert [row for row in right if not row.passed] == []
    gathered = [float(re.search(r"off by (\S+)", rows[0].figure)[1]) for rows in (right, swapped)]
    assert gathered[0] <= 0.072 and gathered[1] > 1  # 1/14 of a block's largest: half a step of 7
    assert not swapped[0].passed and "rank 0's shard" in swapped[0].where
    assert not swapped[2].passed and "loss after 50 steps" in swapped[2].where


@pytest.mark.sizes(3)
def test_rounding_that_is_not_declared_is_red(world):
    trial = Trial(world, engine=engine_with(Nibbles))
    rows = red(trial, "messages_arrive")
    assert [row.compared.split(" with ")[0] for row in rows][:1] == ["gathered weights"]


def engine_with(communicator):
    """ZeRO with a communicator of one's own."""

    class WithCommunicator(ZeRO):
        make_communicator = communicator

    return WithCommunicator
