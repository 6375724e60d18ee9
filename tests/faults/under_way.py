"""Steps that end with gathers under way, again and again: under_way.py ROUNDS [LATE].

In every round a forward raises on all ranks, the script drops its engine and makes another; what it
allocates meanwhile must stay as it was. LATE is a rank that raises one layer before the others, so
that these have started a gather which it never will. Run it under MALLOC_PERTURB_, which fills
freed memory, and with many rounds:

    MALLOC_PERTURB_=165 mpirun -n 3 python tests/faults/under_way.py 100
    MALLOC_PERTURB_=165 mpirun -n 3 python tests/faults/under_way.py 100 1

Each rank's last line says what it saw, `as promised` or the first round in which an array changed.
"""

import gc
import sys

import numpy as np

from models import GPT
from zmpi import SGD, World, ZeRO


class Boom(Exception):
    """What is planted."""


def raises_at(model, number):
    """The model, one layer of which raises in its forward."""

    def forward(w, x):
        raise Boom

    model.layers[number].forward = forward
    return model


def model():
    """Vectors of 200 kB and more: MPI sends them piece by piece, and a gather is long under way."""
    return GPT(layers=4, width=64, heads=4, context=8, vocab=61)


def batch(rank, step):
    draw = np.random.default_rng([rank, step])
    return [(draw.integers(0, 61, (2, 8)), draw.integers(0, 61, (2, 8)))]


def a_round(world, number, late):
    """End one step, then check that arrays made meanwhile keep their numbers; two steps' losses."""
    zero = ZeRO(raises_at(model(), 2 if world.rank == late else 3), world, 3, SGD(lr=0.1))
    try:
        zero.train_step(batch(world.rank, 0))
    except Boom:
        del zero
    gc.collect()
    arrays = [np.full(60_000 + 512 * i, number, np.float32) for i in range(24)]
    zero = ZeRO(model(), world, 3, SGD(lr=0.1))
    losses = [zero.train_step(batch(world.rank, step)) for step in (1, 2)]
    return losses, all((array == number).all() for array in arrays)


def main():
    world = World(device="cpu", timeout=30)
    late = int(sys.argv[2]) if len(sys.argv) > 2 else None
    expected, _ = a_round(world, 0, late)
    for number in range(1, int(sys.argv[1])):
        losses, kept = a_round(world, number, late)
        if losses != expected or not kept:
            what = "an array of the script's own changed" if not kept else f"{losses}, {expected}"
            print(f"rank {world.rank}: round {number}: {what}", flush=True)
            sys.exit(1)
    print(f"rank {world.rank}: as promised", flush=True)


if __name__ == "__main__":
    main()
