"""network_worker.py SHAPE STEPS FILE [GROUP PAIR ...], on each rank: bytes between nodes, per step.

The kernel's count of what the nodes' eth0 sent around some steps, beside the ledger's bytes.
"""

import zmpi  # before NumPy: it chooses what BLAS reads when it is loaded

import json
import sys
from pathlib import Path

from shapes import shape_of
from task import adamw_of_zmpi, model_of
from zmpi.text.data import Batches, load_text


def sent_by_this_node():
    """Bytes that eth0 has sent, headers and all."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next((int(line.split()[9]) for line in lines if line.strip().startswith("eth0:")), 0)


def main():
    shape, steps, file = shape_of(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    world, rows = zmpi.World(device="cpu"), []
    nodes = world.nodes()
    first = nodes.index(nodes[world.rank]) == world.rank
    model = model_of(shape)
    text = load_text("builtin", model.context, model.vocab, world.rank, world.size)
    batches = Batches.on(world, text, shape.micro_batch, False)
    grouped = zmpi.World(device="cpu", group=int(sys.argv[4])) if sys.argv[5:] else world
    pairs = [(grouped, tuple(map(int, pair.split(",")))) for pair in sys.argv[5:]]
    for world, stage in [*((world, stage) for stage in range(4)), *pairs]:
        zero = zmpi.ZeRO(model, world, stage=stage, optimizer=zmpi.AdamW(**adamw_of_zmpi()))
        ledger, between, before = 0, 0, 0
        for step in range(2 + steps):
            if step == 2:  # the first open connections
                before = sum(world.share(sent_by_this_node() if first else 0))
            zero.train_step(batches.of_step(0, step, 1))
            if step >= 2:
                ledger += sum(kind["bytes_sent"] for kind in zero.ledger["comm"].values())
                between += sum(kind["bytes_between"] for kind in zero.ledger["comm"].values())
        wire = sum(world.share(sent_by_this_node() if first else 0)) - before
        total = sum(world.share(ledger))
        least = total * (len(set(nodes)) - 1) / (world.size - 1)  # every byte crosses once
        if len(world.axes) > 1:
            least = sum(world.share(between))
        rows.append(
            {
                "stage": zero.stage.number,
                "wire_bytes": wire / steps,
                "ledger_bytes": total / steps,
                "least_bytes": least / steps,
            }
        )
        del zero
    if world.rank == 0:
        Path(file).write_text(json.dumps(rows))


main()
