"""Draws the README's picture, docs/cycle-light.svg and docs/cycle-dark.svg: one unit on four ranks, over one micro-batch.

Run: python docs/cycle.py (needs the extra `report`)
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

RANKS = "ABCD"
OWNERS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7")  # Okabe and Ito's colours: told apart by all
INK = {"light": "#1f2328", "dark": "#e6edf3"}
CELL = 0.42  # width of a quarter of a vector
# (verb that leads here, width of its arrow, what is drawn, what it is called below)
# w weights, g gradients; 1 the shard, 4 the whole; * updated
STATES = (
    ("", 0, "w1", "stored in shards"),
    ("gather", 1.2, "w4", "forward"),
    ("free", 1.0, "w1", "stored in shards"),
    ("gather", 1.2, "w4g4", "backward"),
    ("free,\nreduce-scatter", 1.8, "w1g1", "gradient summed"),
    ("update", 1.2, "w1*", "stored in shards"),
)


def draw(ink):
    """The figure in one ink; the background is left out."""
    figure, axes = plt.subplots(figsize=(12, 3.1))
    x = 0.0
    for verb, gap, what, name in STATES:
        if verb:
            arrow = {"arrowstyle": "->", "color": ink}
            axes.annotate("", (x + gap - 0.12, 1.5), (x + 0.12, 1.5), arrowprops=arrow)
            axes.text(x + gap / 2, 1.72, verb, ha="center", va="bottom", color=ink, fontsize=11)
        x += gap
        width = _vectors(axes, x, what, ink)
        axes.text(x + width / 2, -0.38, name, ha="center", va="top", color=ink, fontsize=11)
        x += width
    for i, rank in enumerate(RANKS):
        y = 3.2 - i
        axes.text(-0.2, y + 0.05, f"rank {rank}", ha="right", va="center", color=ink, fontsize=11)
    axes.set(xlim=(-1.1, x + 0.1), ylim=(-0.9, 3.75))
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return figure


def _vectors(axes, x, what, ink):
    """Each rank's vectors of one state; returns how wide they are."""
    kinds = [what[i : i + 2] for i in range(0, len(what.rstrip("*")), 2)]
    for i in range(len(RANKS)):
        for row, (kind, parts) in enumerate(kinds):
            height = 0.62 / len(kinds)
            y = 3.56 - i - (row + 1) * height
            for part, colour in enumerate(OWNERS):
                held = parts == "4" or part == i
                mine = OWNERS[i] if kind == "g" and parts == "4" else colour
                style = {"facecolor": mine if held else "none", "alpha": 1.0 if held else 0.35}
                style["hatch"] = "////" if kind == "g" and held else None
                axes.add_patch(
                    Rectangle((x + part * CELL, y), CELL, height, edgecolor=ink, lw=0.8, **style)
                )
                if what.endswith("*") and held:
                    middle = x + (part + 0.5) * CELL, y + height / 2 - 0.03
                    axes.text(*middle, "new", ha="center", va="center", fontsize=7, color="#1f2328")
    return CELL * len(RANKS)


def main():
    matplotlib.rcParams["svg.hashsalt"] = "zmpi"  # the same file each time
    for name, ink in INK.items():
        figure = draw(ink)
        path = Path(__file__).with_name(f"cycle-{name}.svg")
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
