"""The paper's figures (arXiv 1910.02054): bytes of state per rank, and elements moved."""

from math import ceil, floor

import pytest

from models import GPT, MLP, unit_of
from zmpi.core.formulas import elements_moved, state_bytes
from zmpi.core.schedule import training_schedule
from zmpi.core.stages import STAGES
from zmpi.numbers.precision import RECIPES

PAPER = RECIPES["float16"]  # 2 + 2 + 12 bytes per parameter

# Table 1, in GB of 1e9 bytes: (parameters, {ranks: (P_os, P_os+g, P_os+g+p)}), as printed.
TABLE_1 = {
    7.5e9: {
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"),
        1024: ("30.1", "15.1", "0.12"),
    },
    128e9: {
        1: ("2048", "2048", "2048"),
        4: ("896", "704", "512"),
        16: ("608", "368", "128"),
        64: ("536", "284", "32"),
        256: ("518", "263", "8"),
        1024: ("513", "257", "2"),
    },
    1e12: {
        1: ("16000", "16000", "16000"),
        4: ("7000", "5500", "4000"),
        16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"),
        256: ("4046", "2054", "62.5"),
        1024: ("4011", "2013", "15.6"),
    },
}
CELLS = [
    (parameters, ranks, stage, printed)
    for parameters, rows in TABLE_1.items()
    for ranks, row in rows.items()
    for stage, printed in zip((1, 2, 3), row, strict=True)
]


def gigabytes(stage, parameters, ranks, recipe=PAPER):
    return sum(state_bytes(STAGES[stage], parameters, ranks, recipe).values()) / 1e9


def test_figure_1():
    assert [round(gigabytes(stage, 7.5e9, 64), 1) for stage in range(4)] == [120, 31.4, 16.6, 1.9]


def test_table_1_has_54_cells():
    assert len(CELLS) == 54


@pytest.mark.parametrize(("parameters", "ranks", "stage", "printed"), CELLS)
def test_table_1(parameters, ranks, stage, printed):
    """To one unit of the last printed digit: part of the table is rounded, the rest cut off."""
    _, _, decimals = printed.partition(".")
    unit = 10.0 ** -len(decimals)
    assert abs(gigabytes(stage, parameters, ranks) - float(printed)) < unit


@pytest.mark.parametrize(("stage", "largest"), [(0, "2"), (1, "7.6"), (2, "14.4"), (3, "128")])
def test_table_2s_largest_models_fill_32_gb(stage, largest):
    """64 ranks, theory column, in 1e9 parameters."""
    per_parameter = gigabytes(stage, 1e9, 64)
    assert abs(32 / per_parameter - float(largest)) < 0.1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 64])
def test_bytes_are_the_papers_formulas(ranks):
    """Sections 5.1-5.3; exact integers over a size that ranks divide."""
    elements = 7 * 120 * 64
    totals = [sum(state_bytes(stage, elements, ranks, PAPER).values()) for stage in STAGES]
    assert totals == [
        16 * elements,
        4 * elements + 12 * elements // ranks,
        2 * elements + 14 * elements // ranks,
        16 * elements // ranks,
    ]
    assert all(isinstance(total, int) for total in totals)
    totals = [
        sum(state_bytes(stage, elements, ranks, RECIPES["float32"]).values()) for stage in STAGES
    ]
    assert totals == [
        16 * elements,
        8 * elements + 8 * elements // ranks,
        4 * elements + 12 * elements // ranks,
        16 * elements // ranks,
    ]


def test_one_rank_has_nothing_to_share():
    assert len({gigabytes(stage, 1e9, 1) for stage in range(4)}) == 1


def test_bytes_that_ranks_do_not_divide_are_not_cut_off():
    assert state_bytes(STAGES[3], 10, 3, PAPER)["parameters"] == pytest.approx(20 / 3)
    assert floor(20 / 3) < state_bytes(STAGES[3], 10, 3, PAPER)["parameters"] < ceil(20 / 3)


def test_the_optimizers_moments_are_counted():
    for moments, expected in ((0, 4), (1, 8), (2, 12)):
        assert state_bytes(STAGES[0], 100, 4, PAPER, moments)["optimizer"] == 100 * expected
        assert state_bytes(STAGES[0], 100, 4, RECIPES["float32"], moments)["optimizer"] == 100 * (
            expected - 4
        )


def test_a_stage_is_three_booleans_that_only_grow():
    rows = [(stage.optimizer, stage.gradients, stage.parameters) for stage in STAGES]
    assert rows == [
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, True, True),
    ]
    assert [stage.number for stage in STAGES] == [0, 1, 2, 3]


# ---- elements moved (section 7) ------------------------------------------------------------------


def moved(model, stage, micro_batches, reduce_each, sizes):
    schedule = training_schedule(model.layers, [unit_of(layer) for layer in model.layers])
    return elements_moved(STAGES[stage], schedule, sizes, micro_batches, reduce_each)


@pytest.mark.parametrize("M", [1, 3, 8])
def test_the_gpt_moves_the_papers_volumes(M):
    sizes = {"outer": 1000, "h.0": 200, "h.1": 200}
    totals = [sum(moved(GPT(2, 4, 2, 3, 5), stage, M, False, sizes).values()) for stage in range(4)]
    assert totals == [2 * 1400, 2 * 1400, (M + 1) * 1400, 3 * M * 1400]


@pytest.mark.parametrize("M", [1, 3, 8])
def test_ordered_pays_m_plus_1_at_stages_0_and_1(M):
    sizes = {"outer": 1000, "h.0": 200, "h.1": 200}
    totals = [sum(moved(GPT(2, 4, 2, 3, 5), stage, M, True, sizes).values()) for stage in range(4)]
    assert totals == [(M + 1) * 1400, (M + 1) * 1400, (M + 1) * 1400, 3 * M * 1400]


def test_stage_3_costs_one_and_a_half_times_stage_2():
    sizes = {"outer": 1000, "h.0": 200, "h.1": 200}
    two, three = (
        sum(moved(GPT(2, 4, 2, 3, 5), stage, 1, False, sizes).values()) for stage in (2, 3)
    )
    assert three / two == 1.5


def test_the_mlps_first_and_last_layer_are_gathered_once():
    sizes = {"embed": 500, "hidden.0": 70, "hidden.1": 30, "head": 300}
    found = moved(MLP(2, 4, 3, 5), 3, 2, False, sizes)
    assert found == {"all_gather": 2 * (500 + 2 * 70 + 2 * 30 + 300), "reduce_scatter": 2 * 900}
