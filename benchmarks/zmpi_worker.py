"""One rank of zmpi, with default flags: python zmpi_worker.py SHAPE STAGE, started by peers.py."""

import sys

import zmpi  # before NumPy: it sets what BLAS reads when it is loaded

import task
from shapes import shape_of
from turns import Turns


def main(shape_name, stage):
    """Train when told to."""
    turns, shape, world = Turns(), shape_of(shape_name), zmpi.World()
    optimizer = zmpi.AdamW(**task.adamw_of_zmpi())
    zero = zmpi.ZeRO(task.model_of(shape), world, int(stage), optimizer, seed=task.SEED)
    batches = task.Batches(shape, world.rank, world.size)
    turns.serve(
        batches,
        lambda inputs, targets: zero.train_step([(inputs, targets)]),
        extra=lambda: _blocked(zero),
    )


def _blocked(zero):
    """Seconds of the last step in which rank 0 waited inside MPI."""
    return {"blocked_s": sum(entry["blocked_s"] for entry in zero.ledger["comm"].values())}


if __name__ == "__main__":
    main(*sys.argv[1:])
