"""The paper's own figures (arXiv 1910.02054, Tables 1 and 2), beside what zmpi's formula gives. Quoted to be compared only."""

from zmpi.core.stages import STAGES, state_bytes
from zmpi.numbers.precision import RECIPES
from zmpi.process.table import in_columns

PAPER_RANKS = (1, 4, 16, 64, 256, 1024)
# Table 1: GB per rank. Parameters -> a row for each of PAPER_RANKS: P_os, P_os+g, P_os+g+p.
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
# Table 2: model-parallel degree -> largest model in 32 GB, in 1e9 parameters: DP, P_os, P_os+g, P_os+g+p in theory; DP and
# P_os as the authors measured them.
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
    """The largest number of parameters whose state alone fits into `memory` bytes per rank (the theory of Table 2)."""
    return memory / sum(state_bytes(stage, 1.0, ranks, recipe).values())


def both_tables():
    """Tables 1 and 2 as text, the paper's figure and zmpi's side by side."""
    return f"""\
Table 1 of the paper: state, GB per rank (1 GB = 1e9 bytes), 2 + 2 + 12 bytes per parameter; each cell paper | zmpi
{_table_1()}
All of Table 1 is analysis: it follows from the formulas of sections 5.1-5.3. What the authors ran at this scale: over 100B
parameters on 400 GPUs with P_os+g and ZeRO-R (section 10). P_os+g+p, and "over 1T", they only analysed.

Table 2 of the paper: largest model, 1e9 parameters, in 32 GB per GPU; 64 data-parallel ranks of MP GPUs; each cell paper | zmpi
{_table_2()}
The columns of theory are the formula; zmpi's figure is that too. The authors measured DP and P_os alone: the last columns are
their figure and its share of the theory. The rest of the memory held activations and buffers."""


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
    """The value with as many decimals as the printed figure has."""
    return f"{value:.{len(printed.partition('.')[2])}f}"
