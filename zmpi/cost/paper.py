"""The paper's figures (arXiv 1910.02054, Tables 1 and 2), quoted next to zmpi's formula."""

from zmpi.core.formulas import state_bytes
from zmpi.core.stages import STAGES
from zmpi.numbers.precision import RECIPES
from zmpi.process.table import in_columns

PAPER_RANKS = (1, 4, 16, 64, 256, 1024)
# Table 1: GB per rank. Parameters -> a row per PAPER_RANKS: P_os, P_os+g, P_os+g+p.
TABLE_1 = {
    "7.5B": (
        ("120", "120", "120"),
        ("52.5", "41.3", "30"),
        ("35.6", "21.6", "7.5"),
        ("31.4", "16.6", "1.88"),
        ("30.4", "15.4", "0.47"),
        ("30.1", "15.1", "0.12"),
    ),
    "128B": (
        ("2048", "2048", "2048"),
        ("896", "704", "512"),
        ("608", "368", "128"),
        ("536", "284", "32"),
        ("518", "263", "8"),
        ("513", "257", "2"),
    ),
    "1T": (
        ("16000", "16000", "16000"),
        ("7000", "5500", "4000"),
        ("4750", "2875", "1000"),
        ("4187", "2218", "250"),
        ("4046", "2054", "62.5"),
        ("4011", "2013", "15.6"),
    ),
}
PAPER_MODELS = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
# Table 2: model-parallel degree -> largest model in 32 GB, in 1e9 parameters: DP, P_os, P_os+g,
# P_os+g+p in theory; DP and P_os measured by the authors.
TABLE_2 = {
    1: ("2", "7.6", "14.4", "128", "1.3", "6.2"),
    2: ("4", "15.2", "28.8", "256", "2.5", "12.5"),
    4: ("8", "30.4", "57.6", "500", "5", "25"),
    8: ("16", "60.8", "115.2", "1000", "10", "50"),
    16: ("32", "121.6", "230.4", "2000", "20", "100"),
}
TABLE_2_RANKS, TABLE_2_BYTES = 64, 32e9  # data-parallel ranks, and memory of each


PAPERS_RECIPE = RECIPES["float16"]


def state_gb(stage, parameters, ranks):
    """GB of state per rank, in the paper's recipe."""
    return sum(state_bytes(stage, parameters, ranks, PAPERS_RECIPE).values()) / 1e9


def largest_model(stage, ranks, memory, recipe=PAPERS_RECIPE):
    """The most parameters whose state fits into `memory` bytes per rank (Table 2's theory)."""
    return memory / sum(state_bytes(stage, 1.0, ranks, recipe).values())


def both_tables():
    """Tables 1 and 2 as text, the paper's figures next to zmpi's."""
    return f"""\
Table 1 of the paper: state in GB per rank (1 GB = 1e9 bytes), 2 + 2 + 12 bytes per parameter;
each cell: paper | zmpi
{_table_1()}
Table 1 is analysis: it follows from the formulas of sections 5.1-5.3. At this scale the authors ran
over 100B parameters on 400 GPUs, with P_os+g and ZeRO-R (section 10); P_os+g+p, and "over 1T", they
only analysed.

Table 2 of the paper: largest model, in 1e9 parameters, in 32 GB per GPU; 64 data-parallel ranks of
MP GPUs; each cell: paper | zmpi
{_table_2()}
The theory columns are the formula, as are zmpi's figures. The authors measured only DP and P_os:
the last columns are their figures, and the share of the theory. Activations and buffers took the
rest of the memory."""


def _table_1():
    rows = [
        (
            "ranks",
            *(f"{size} {stage}" for size in TABLE_1 for stage in ("P_os", "P_os+g", "P_os+g+p")),
        )
    ]
    for i, ranks in enumerate(PAPER_RANKS):
        cells = []
        for size, printed in TABLE_1.items():
            for stage, cell in zip(STAGES[1:], printed[i], strict=True):
                cells.append(
                    f"{cell} | {with_decimals_of(cell, state_gb(stage, PAPER_MODELS[size], ranks))}"
                )
        rows.append((str(ranks), *cells))
    return in_columns(rows)


def _table_2():
    rows = [("MP", "GPUs", "DP", "P_os", "P_os+g", "P_os+g+p", "measured DP", "measured P_os")]
    for degree, printed in TABLE_2.items():
        theory = [
            largest_model(stage, TABLE_2_RANKS, TABLE_2_BYTES) * degree / 1e9 for stage in STAGES
        ]
        cells = [
            f"{cell} | {with_decimals_of(cell, own)}"
            for cell, own in zip(printed[:4], theory, strict=True)
        ]
        ratios = [
            f"{cell} = {float(cell) / own:.0%}"
            for cell, own in zip(printed[4:], theory[:2], strict=True)
        ]
        rows.append((str(degree), str(degree * TABLE_2_RANKS), *cells, *ratios))
    return in_columns(rows)


def with_decimals_of(printed, value):
    """The value with the printed figure's number of decimals."""
    return f"{value:.{len(printed.partition('.')[2])}f}"
