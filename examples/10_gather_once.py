"""Your own schedule: weights stay from their forward to their backward, so they are gathered once.

Run:        mpirun -n 4 python examples/10_gather_once.py
Last line:  10 ok: 2 instead of 3 elements moved per parameter, the same bits, all weights alive

Also: mpirun -n 4 python -m zmpi.verify --comm examples/10_gather_once.py:GatherOnce
      says that it gives up P3.
"""

from dataclasses import replace

from zmpi import ZeRO
from zmpi.core.schedule import Schedule, training_schedule


def gather_once(layers, units):
    """The training schedule, but a unit is gathered at its first visit and freed after its last."""
    walk = training_schedule(layers, units)
    needs = {
        unit: [i for i, visit in enumerate(walk) if visit.unit == unit and visit.weights]
        for unit in units
    }
    return Schedule(
        replace(v, gather=i in needs[v.unit][:1], free=i in needs[v.unit][-1:])
        for i, v in enumerate(walk)
    )


class GatherOnce(ZeRO):
    """ZeRO with that schedule: what FSDP calls not resharding after forward."""

    make_schedule = staticmethod(gather_once)


def main():
    """One step with either schedule: what moves, what is alive, and the losses."""
    from models import GPT
    from zmpi import AdamW, World
    from zmpi.text.data import Batches, load_text

    world = World(device="cpu")
    batches = Batches(
        load_text("builtin", 32, 256), world.rank, world.size, micro_batch=4, last_only=False
    )
    moved, losses = [], []
    for engine in (ZeRO, GatherOnce):
        zero = engine(GPT(3, 48, 4, 32, 256), world, 3, AdamW(lr=3e-3), seed=0)
        losses.append([zero.train_step(batches.of_step(0, step, 1)) for step in range(1, 6)])
        comm, full = zero.ledger["comm"], zero.ledger["memory"]["full_peak"]
        parameters = sum(unit.layout.elements for unit in zero.units.values())
        moved.append(
            (comm["all_gather"]["elements"] + comm["reduce_scatter"]["elements"]) / parameters
        )
        if world.rank == 0:
            print(
                f"{engine.__name__}: {moved[-1]:g} elements per parameter,"
                f" full vectors of {full:,} bytes\n{zero.schedule}\n"
            )
    assert losses[0] == losses[1] and moved == [3, 2]
    if world.rank == 0:
        print(
            "10 ok: 2 instead of 3 elements moved per parameter, the same bits, all weights alive"
        )


if __name__ == "__main__":
    main()
