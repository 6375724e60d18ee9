"""An MLP through the library: the five lines that it takes, at every stage, and the ledger of each.

Run:        mpirun -n 4 python examples/04_mlp.py
Last line:  04 ok: the same loss at every stage, to the last bit
"""

from models import MLP
from zmpi import AdamW, World, ZeRO
from zmpi.text.data import Batches, load_text

CONTEXT = 8
world = World(device="cpu")
batches = Batches(
    load_text("builtin", CONTEXT, 256), world.rank, world.size, micro_batch=16, last_only=True
)
losses = set()
for stage in range(4):
    zero = ZeRO(
        MLP(layers=2, width=48, context=CONTEXT, vocab=256),
        world,
        stage,
        AdamW(lr=3e-3, clip=1.0),
        seed=0,
    )
    for step in range(1, 21):
        loss = zero.train_step(batches.of_step(seed=0, step=step, accumulate=1))
    losses.add(loss)
    memory, comm = zero.ledger["memory"], zero.ledger["comm"]
    if world.rank == 0:
        owned = sum(memory[kind] for kind in ("parameters", "gradients", "optimizer"))
        moved = comm["all_gather"]["elements"] + comm["reduce_scatter"]["elements"]
        print(
            f"stage {stage}: loss {loss:.6f}, bytes owned {owned:,},"
            f" gathered {memory['full_peak']:,}; elements moved {moved:,}"
        )
assert len(losses) == 1
if world.rank == 0:
    print("04 ok: the same loss at every stage, to the last bit")
