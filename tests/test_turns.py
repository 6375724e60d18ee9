"""How the bench takes turns: in rounds, on engines that only count (see test_bench_command)."""

from types import SimpleNamespace

import pytest

from zmpi.cost.trace import gathers_under_way
from zmpi.cost.turns import in_turns, quartiles_of, ratio, too_close
from zmpi.process.errors import Agreed


class Counting:
    """A workload whose engines note who stepped when. `skips`, `fails`: (stage, step)."""

    warm_up, steps = 1, 3
    policy = SimpleNamespace(precision="float16")

    def __init__(self, skips=(), fails=()):
        self.order, self.skips, self.fails = [], skips, fails

    def engine(self, kind, world, stage):
        if (stage, 0) in self.fails:
            raise Agreed(f"stage {stage} cannot be made")
        comm = {"all_gather": {"blocked_s": 0.25}, "other": {"blocked_s": 0.5}}
        return SimpleNamespace(stage=stage, step=0, ledger={"comm": comm})

    def step(self, zero):
        zero.step += 1
        self.order.append(zero.stage)
        if (zero.stage, zero.step) in self.fails:
            raise Agreed(f"stage {zero.stage} failed")
        zero.last = SimpleNamespace(tokens=24, skipped=(zero.stage, zero.step) in self.skips)
        return float(zero.step)


def test_every_stage_takes_one_step_in_every_round_and_each_begins_with_another():
    workload = Counting()
    timings = in_turns(workload, None, [0, 1, 3])
    assert workload.order == [0, 1, 3, 1, 3, 0, 3, 0, 1, 0, 1, 3]
    for timing in timings.values():
        assert len(timing.step_s) == 3 and timing.blocked_s == [0.75] * 3
        assert (timing.loss, timing.tokens, timing.error) == (4.0, 24, None)


def test_a_stage_that_fails_leaves_the_turns_to_the_others():
    workload = Counting(fails=[(1, 2), (2, 0)])
    timings = in_turns(workload, None, [0, 1, 2])
    assert workload.order == [0, 1, 1, 0, 0, 0]
    assert [timings[stage].error for stage in (0, 1, 2)] == [
        None,
        "stage 1 failed",
        "stage 2 cannot be made",
    ]


def test_skipped_steps_are_not_timed_and_their_round_is_not_compared():
    workload = Counting(skips=[(1, 3), (2, 2), (2, 3), (2, 4)])
    timings = in_turns(workload, None, [0, 1, 2])
    assert [step is None for step in timings[1].step_s] == [False, True, False]
    assert len(timings[1].taken()) == 2 and timings[1].error is None
    assert timings[2].error.startswith("all 3 timed steps were skipped: gradients overflow float16")


def test_ratios_are_medians_over_the_rounds_that_both_took():
    """Not the ratio of the medians, which is 1 here."""
    found = ratio([1.0, 4.0, None, 9.0], [2.0, 2.0, 5.0, 9.0])
    assert found == {"median": 1.0, "quartiles": [0.75, 1.5]}
    assert ratio([None], [1.0]) is None
    assert quartiles_of([3.0]) == {"median": 3.0, "quartiles": [3.0, 3.0]}


@pytest.mark.parametrize(
    ("other", "close"),
    [([1.1, 2.2, 3.3, 4.4], []), ([0.9, 2.2, 2.7, 4.4], [(0, 1)]), ([None] * 4, [(0, 1)])],
)
def test_stages_are_ranked_by_the_quartiles_of_their_ratio(other, close):
    """Steps four times as long from one round to the next rank well if both take part in them."""
    rows = [
        {"stage": 0, "all_step_s": [1.0, 2.0, 3.0, 4.0]},
        {"stage": 1, "all_step_s": other},
    ]
    assert too_close(rows) == close


def test_a_gather_is_under_way_in_a_product_if_a_layer_computes_between_its_start_and_its_wait():
    events = [
        {"verb": verb, "name": name, "bytes_sent": sent}
        for verb, name, sent in [
            ("step", "1", 0),
            ("gather", "a", 1),
            ("wait", "a", 0),
            ("gather", "b", 10),
            ("forward", "a", 0),
            ("wait", "b", 0),
            ("gather", "c", 100),
            ("free", "a", 0),
            ("wait", "c", 0),
        ]
    ]
    assert gathers_under_way(events) == {"gathers": 3, "during_products": 1, "bytes": 10}
