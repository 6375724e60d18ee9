"""ZeRO does not change learning: plot the losses of all four stages, and compare them.

Run:        mpirun -n 4 python examples/08_same_learning.py
Last line:  08 ok: 40 losses at 4 stages, and not one bit of difference

As a picture too (needs matplotlib):
            mpirun -n 4 python examples/08_same_learning.py picture.png
"""

import sys
from importlib.util import find_spec

from models import GPT
from zmpi import AdamW, World, ZeRO
from zmpi.text.data import Batches, load_text

STEPS, CONTEXT = 40, 32
world = World(device="cpu")
picture = sys.argv[1] if len(sys.argv) > 1 else None
with world.agreed():  # an empty picture, so that what is wrong with it shows before four trainings
    if picture and not find_spec("matplotlib"):
        raise ValueError("a picture needs matplotlib: pip install matplotlib")
    if picture and world.rank == 0:
        from matplotlib.figure import Figure

        figure = Figure()
        figure.savefig(picture)
batches = Batches(
    load_text("builtin", CONTEXT, 256), world.rank, world.size, micro_batch=4, last_only=False
)
losses = []
for stage in range(4):
    zero = ZeRO(GPT(2, 48, 4, CONTEXT, 256), world, stage, AdamW(lr=5e-3, clip=1.0), seed=0)
    losses.append(
        [
            zero.train_step(batches.of_step(seed=0, step=step, accumulate=1))
            for step in range(1, STEPS + 1)
        ]
    )

if world.rank == 0:
    low, high = min(losses[0]), max(losses[0])
    for step in range(0, STEPS, 4):  # one row for the four stages: their marks fall on one place
        places = {round(50 * (losses[stage][step] - low) / (high - low)) for stage in range(4)}
        print(
            f"{step + 1:3} "
            + "".join("*" if place in places else " " for place in range(51))
            + f" {losses[0][step]:.4f}"
        )
    if picture:
        axes = figure.subplots()
        for stage, line in enumerate(losses):
            axes.plot(range(1, STEPS + 1), line, label=f"stage {stage}", linewidth=8 - 2 * stage)
        axes.set(xlabel="step", ylabel="training loss (nats per byte)")
        axes.legend()
        figure.savefig(picture, dpi=120)
assert all(line == losses[0] for line in losses)
if world.rank == 0:
    print(f"08 ok: {STEPS} losses at 4 stages, and not one bit of difference")
