"""Draw the README's picture: one unit on four ranks over one micro-batch.

Run: python docs/cycle.py (needs the extra `report`); writes docs/cycle-{light,dark}.svg
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

OWNERS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7")  # Okabe and Ito: safe for colour-blind eyes
INK = {"light": "#1f2328", "dark": "#e6edf3"}
CELL = 0.42  # width of a quarter of a vector
FONT = {"fontsize": 13, "linespacing": 1.05}  # readable when the page is 400 pixels wide
# (verb that leads here, width of its arrow, what is drawn, caption below)
# w weights, g gradients; 1 the shard, 4 the whole vector
STATES = (
    ("", 0, "w1", "stored\nin shards"),
    ("gather", 1.45, "w4", "forward"),
    ("free", 1.0, "w1", "stored\nin shards"),
    ("gather", 1.45, "w4g4", "backward"),
    ("free,\nreduce-\nscatter", 1.8, "w1g1", "gradient\nsummed"),
    ("update", 1.45, "w1", "shards\nupdated"),
)


def draw(ink):
    """The figure in one ink; the background is left out."""
    figure, axes = plt.subplots(figsize=(9, 3.3))
    x = 0.0
    for verb, gap, what, name in STATES:
        if verb:
            arrow = {"arrowstyle": "->", "color": ink}
            axes.annotate("", (x + gap - 0.12, 1.6), (x + 0.12, 1.6), arrowprops=arrow)
            axes.text(x + gap / 2, 1.72, verb, ha="center", va="bottom", color=ink, **FONT)
        x += gap
        width = _vectors(axes, x, what, ink)
        axes.text(x + width / 2, -0.25, name, ha="center", va="top", color=ink, **FONT)
        x += width
    for rank in range(len(OWNERS)):
        axes.text(-0.2, 3.25 - rank, f"rank {rank}", ha="right", va="center", color=ink, **FONT)
    axes.set(xlim=(-1.5, x + 0.05), ylim=(-1.3, 3.75))
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return figure


def _vectors(axes, x, what, ink):
    """Draw each rank's vectors of one state; return their width."""
    kinds = [what[i : i + 2] for i in range(0, len(what), 2)]
    height = 0.7 / len(kinds)
    for rank, own in enumerate(OWNERS):
        for row, (kind, parts) in enumerate(kinds):
            y = 3.6 - rank - (row + 1) * height
            for part, colour in enumerate(OWNERS):
                held = parts == "4" or part == rank
                mine = own if kind == "g" and parts == "4" else colour
                style = {"facecolor": mine if held else "none", "alpha": 1.0 if held else 0.35}
                style["hatch"] = "////" if kind == "g" and held else None
                cell = Rectangle((x + part * CELL, y), CELL, height, edgecolor=ink, lw=0.8, **style)
                axes.add_patch(cell)
    return CELL * len(OWNERS)


def main():
    matplotlib.rcParams["svg.hashsalt"] = "zmpi"  # the same file each time
    for name, ink in INK.items():
        figure = draw(ink)
        path = Path(__file__).with_name(f"cycle-{name}.svg")
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
