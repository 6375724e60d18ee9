"""One step drawn as a timeline: when each rank gathers, waits, computes, reduces and updates.

Run:        mpirun -n 4 python examples/07_timeline.py
Last line:  07 ok: on every rank, each layer was gathered before use, and none after the update

For a run of your own: zmpi.train --trace FILE.json, which opens in Perfetto (ui.perfetto.dev).
"""

from models import GPT
from zmpi import AdamW, World, ZeRO
from zmpi.cost.trace import Trace, aligned
from zmpi.cost.watch import watched
from zmpi.text.data import Batches, load_text

COLUMNS = 100
MARKS = {
    "gather": "g",
    "wait": "w",
    "forward": "F",
    "turn": "T",
    "backward": "B",
    "free": ".",
    "reduce": "R",
    "update": "U",
    "agree": "a",
}

world = World(device="cpu")
batches = Batches(
    load_text("builtin", 32, 256), world.rank, world.size, micro_batch=8, last_only=False
)
engine = watched(ZeRO, Trace)
zero = engine(GPT(3, 64, 4, 32, 256), world, stage=3, optimizer=AdamW(lr=3e-3), seed=0)
for step in range(1, 4):
    zero.train_step(batches.of_step(0, step, 1))
lanes = aligned(world, zero.ledger.events())

if world.rank == 0:
    lanes = [
        [event for event in lane if event["step"] == 3 and event["verb"] in MARKS] for lane in lanes
    ]
    first = min(event["start"] for lane in lanes for event in lane)
    last = max(event["end"] for lane in lanes for event in lane)
    print(
        f"step 3, {(last - first) * 1e3:.1f} ms from left to right; "
        + ", ".join(f"{m} {verb}" for verb, m in MARKS.items())
    )
    for rank, lane in enumerate(lanes):
        row = [" "] * COLUMNS
        for event in lane:
            start, stop = (
                round((event[edge] - first) / (last - first) * COLUMNS) for edge in ("start", "end")
            )
            row[start : max(start + 1, stop)] = MARKS[event["verb"]] * max(1, stop - start)
        print(f"rank {rank} |{''.join(row[:COLUMNS])}|")
    print("\nrank 0, in order:")
    print(", ".join(f"{event['verb']} {event['name']}" for event in lanes[0]))
    for lane in lanes:
        order = [(event["verb"], event["name"]) for event in lane]
        for block in ("h.0", "h.1", "h.2"):  # twice each: for its forward, and for its backward
            waits = [i for i, event in enumerate(order) if event == ("wait", block)]
            uses = [
                i
                for i, (verb, name) in enumerate(order)
                if verb in ("forward", "backward") and name == block
            ]
            assert len(waits) == len(uses) == 2 and waits[0] < uses[0] < waits[1] < uses[1], order
        assert not any(
            verb in ("gather", "wait") for verb, _ in order[order.index(("update", "outer")) :]
        ), order
    print("07 ok: on every rank, each layer was gathered before use, and none after the update")
