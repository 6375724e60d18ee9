"""A bench's pictures, a function for each that returns a matplotlib figure."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from zmpi.cost.bench_table import point_of
from zmpi.process.table import unit_for

# Colours that the colour-blind can tell apart (Okabe and Ito 2008).
COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#56B4E9",
    "full": "#D55E00",
    "work": "#CC79A7",
    "activations": "#009E73",
    "temporaries": "#B0B0B0",
}
LABELS = {
    "full": "gathered vectors",
    "work": "work buffers",
    "activations": "saved activations",
    "optimizer": "optimizer states",
}
VERBS = {
    "gather": "#E69F00",
    "wait": "#D55E00",
    "forward": "#009E73",
    "turn": "#F0E442",
    "backward": "#0072B2",
    "free": "#000000",
    "reduce": "#CC79A7",
    "update": "#56B4E9",
    "agree": "#B0B0B0",
}
MEMORY_CAPTION = """All array memory of rank 0 over one step: gathering and freeing units makes the
sawtooth."""
LANES_CAPTION = """One step on every rank. A gather is drawn where it starts; the wait is where its
result is needed. White: Python between verbs, or another process on the core."""
STAGE_COLOURS = {0: "#000000", 1: "#0072B2", 2: "#E69F00", 3: "#009E73"}
PAIR_COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


def draw_pictures(report):
    """[(file name, caption, figure), ...] of one report, without stages that failed."""
    rows = [row for row in report["stages"] if "error" not in row]
    if not rows:
        return []
    ranks = f"{report['size']} rank{'s' if report['size'] > 1 else ''}"
    return [
        (
            "state",
            f"State per rank at each stage, on {ranks}: formula and measurement.",
            _state(rows),
        ),
        (
            "memory",
            MEMORY_CAPTION,
            _memory(rows),
        ),
        (
            "throughput",
            f"Tokens per second of all {ranks}, in the median step; bars span the quartiles.",
            _throughput(rows),
        ),
        (
            "blocked",
            "Share of a step in which a rank is blocked in communication, a dot per rank.",
            _blocked(rows),
        ),
        ("lanes", LANES_CAPTION, _lanes(rows)),
    ]


def colour_of(stage):
    """A stage's colour; one for each sum of a pair."""
    if stage in STAGE_COLOURS:
        return STAGE_COLOURS[stage]
    return PAIR_COLOURS[sum(map(int, stage.split(",")))]


def _axes(rows=1, columns=1, width=8.0, height=4.2, **options):
    figure, axes = plt.subplots(
        rows, columns, figsize=(width, height), layout="constrained", **options
    )
    for one in figure.axes:
        one.spines[["top", "right"]].set_visible(False)
        one.set_axisbelow(True)
    return figure, axes


def _legend(figure, colours):
    """One legend for the whole figure, above the axes."""
    patches = [
        Patch(color=colour, label=LABELS.get(name, name)) for name, colour in colours.items()
    ]
    figure.legend(handles=patches, loc="outside upper center", ncols=4, frameon=False, fontsize=9)


def _state(rows):
    figure, axes = _axes()
    kinds = {kind: COLOURS[kind] for kind in ("parameters", "gradients", "optimizer")}
    divisor, name = unit_for(
        max(sum(kind["formula"] for kind in row["state"].values()) for row in rows)
    )
    for i, row in enumerate(rows):
        for place, source, hatch in ((-0.2, "formula", "//"), (0.2, "measured", "")):
            bottom = 0.0
            for kind, colour in kinds.items():
                value = row["state"][kind][source]
                height = (max(value) if isinstance(value, list) else value) / divisor
                axes.bar(
                    i + place,
                    height,
                    0.36,
                    bottom,
                    color=colour,
                    edgecolor="white",
                    hatch=hatch,
                    linewidth=0.5,
                )
                bottom += height
            axes.text(i + place, bottom, f"{bottom:.3g}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(rows)), [f"stage {row['stage']}\nformula | measured" for row in rows])
    axes.set_ylabel(f"state per rank ({name})")
    axes.margins(y=0.1)
    _legend(figure, kinds)
    return figure


def _memory(rows):
    columns = min(2, len(rows))
    figure, axes = _axes(
        -(-len(rows) // columns),
        columns,
        10,
        3.0 * -(-len(rows) // columns) + 0.6,
        sharey=True,
        squeeze=False,
    )
    divisor, name = unit_for(max(moment["total"] for row in rows for moment in row["moments"]))
    for one, row in zip(axes.flat, rows, strict=False):
        moments = row["moments"]
        heights = [[moment[kind] / divisor for moment in moments] for kind in COLOURS]
        one.stackplot(
            range(len(moments)), heights, colors=COLOURS.values(), step="post", linewidth=0
        )
        peak = max(range(len(moments)), key=lambda i, moments=moments: moments[i]["total"])
        top, place = moments[peak]["total"] / divisor, peak / len(moments)
        one.annotate(
            f"{top:.3g} {name}, {moments[peak]['verb']} {moments[peak]['name']}",
            (peak, top),
            (0, 8),
            textcoords="offset points",
            ha=("left", "center", "right")[(place > 0.3) + (place >= 0.7)],
            fontsize=8,
            arrowprops={"arrowstyle": "-", "linewidth": 0.6},
        )
        one.set_title(f"stage {row['stage']}", loc="left", fontsize=10)
        one.set_xlim(0, len(moments) - 1)
        one.set_ylabel(f"array memory ({name})")
        one.set_xlabel("memory samples over one step")
        one.margins(y=0.18)
    for one in axes.flat[len(rows) :]:
        one.set_visible(False)
    _legend(figure, COLOURS)
    return figure


def _throughput(rows):
    figure, axes = _axes(height=3.4)
    for i, row in enumerate(rows):
        low, high = (row["tokens_per_s"] * row["step_s"] / s for s in row["step_s_quartiles"][::-1])
        error = [[row["tokens_per_s"] - low], [high - row["tokens_per_s"]]]
        colour = colour_of(row["stage"])
        axes.bar(i, row["tokens_per_s"], 0.6, color=colour, yerr=error, ecolor="#777777", capsize=4)
        axes.text(
            i,
            high,
            f"{row['tokens_per_s']:,.0f}",
            ha="center",
            va="bottom",
            fontsize=9,
        )
    axes.set_xticks(range(len(rows)), [f"stage {row['stage']}" for row in rows])
    axes.set_ylabel("tokens per second")
    axes.margins(y=0.12)
    return figure


def _blocked(rows):
    figure, axes = _axes(height=3.4)
    for i, row in enumerate(rows):
        shares = [100 * share for share in row["blocked_share"]]
        axes.bar(i, sum(shares) / len(shares), 0.6, color=colour_of(row["stage"]), alpha=0.35)
        axes.plot([i] * len(shares), shares, "o", color=colour_of(row["stage"]), markersize=5)
    axes.set_xticks(range(len(rows)), [f"stage {row['stage']}" for row in rows])
    axes.set_ylabel("blocked (% of a step)")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    return figure


def _lanes(rows):
    ranks = len(rows[0]["lanes"])
    figure, axes = _axes(
        len(rows), 1, 11, len(rows) * (0.7 + 0.32 * ranks) + 0.8, squeeze=False, sharex=True
    )
    longest = 0.0
    for one, row in zip(axes.flat, rows, strict=True):
        first = min(event["start"] for lane in row["lanes"] for event in lane)
        last = max(event["end"] for lane in row["lanes"] for event in lane)
        longest = max(longest, (last - first) * 1e3)
        for rank, lane in enumerate(row["lanes"]):
            for verb, colour in VERBS.items():
                done = [event for event in lane if event["verb"] == verb]
                spans = [
                    ((event["start"] - first) * 1e3, (event["end"] - event["start"]) * 1e3)
                    for event in done
                ]
                one.broken_barh(spans, (rank - 0.4, 0.8), facecolors=colour, linewidth=0)
        one.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        one.set_ylim(ranks - 0.5, -0.5)
        one.set_title(f"stage {row['stage']}", loc="left", fontsize=10)
    one.set_xlim(0, longest)  # the axis is shared
    one.set_xlabel("ms since the step began")
    _legend(figure, VERBS)
    return figure


def _sweep_quantities(reports):
    """((label, value of a stage's row), ...), for the sweep's three pictures."""
    peaks = [
        max(row["arrays"]["peak"]["measured"])
        for report in reports
        for row in report["stages"]
        if "error" not in row
    ]
    divisor, name = unit_for(max(peaks, default=1))
    return (
        ("tokens per second", lambda row: row["tokens_per_s"]),
        (
            "blocked (% of a step)",
            lambda row: 100 * sum(row["blocked_share"]) / len(row["blocked_share"]),
        ),
        (
            f"peak of arrays per rank ({name})",
            lambda row: max(row["arrays"]["peak"]["measured"]) / divisor,
        ),
    )


def sweep_picture(axis, reports):
    """Throughput, blocked share and array peak along the axis, a line per stage."""
    figure, axes = _axes(1, 3, 11, 3.6)
    at = [int(point_of(axis, report).split()[1]) for report in reports]
    stages = [row["stage"] for row in reports[0]["stages"]]
    for one, (label, of) in zip(axes, _sweep_quantities(reports), strict=True):
        for i, stage in enumerate(stages):
            points = [
                (x, of(r["stages"][i]))
                for x, r in zip(at, reports, strict=True)
                if "error" not in r["stages"][i]
            ]
            one.plot(*zip(*points, strict=True), marker="o", color=colour_of(stage))
        one.set_xlabel(
            {"ranks": "ranks", "batch": "sequences per micro-batch", "width": "width (channels)"}[
                axis
            ]
        )
        one.set_xticks(at)
        one.set_ylabel(label)
        one.margins(y=0.1)
        one.set_ylim(bottom=0)
    _legend(figure, {f"stage {stage}": colour_of(stage) for stage in stages})
    return figure
