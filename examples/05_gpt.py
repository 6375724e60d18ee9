"""Train a GPT with the library: print the schedule, evaluate, and gather the whole model.

Run:        mpirun -n 4 python examples/05_gpt.py
Last line:  05 ok: held-out loss below 3.3 nats per byte, what single bytes can reach
"""

from models import GPT
from zmpi import AdamW, Policy, World, ZeRO
from zmpi.text.data import Batches, load_text

CONTEXT = 32
world = World(device="cpu")
batches = Batches(
    load_text("builtin", CONTEXT, 256), world.rank, world.size, micro_batch=8, last_only=False
)
model = GPT(layers=2, width=64, heads=4, context=CONTEXT, vocab=256)
optimizer = AdamW(lr=6e-3, warmup=10, schedule="cosine", decay_steps=80, clip=1.0)
zero = ZeRO(
    model, world, stage=3, optimizer=optimizer, seed=0, policy=Policy(prefetch=1, recompute=True)
)
if world.rank == 0:
    print(zero.schedule)
for step in range(1, 81):
    loss = zero.train_step(batches.of_step(seed=0, step=step, accumulate=1))
    if world.rank == 0 and step % 20 == 0:
        print(f"step {step}: loss {loss:.3f}, gradient norm {zero.last.grad_norm:.3f}")
held_out = zero.evaluate(batches.held_out())
with zero.gathered() as parameters:  # the one place where the whole model may be
    arrays, count = len(parameters), sum(array.size for array in parameters.values())
if world.rank == 0:
    print(
        f"held-out loss {held_out:.3f} nats per byte; {count:,} parameters"
        f" in {arrays} arrays inside the block, none after it"
    )
assert held_out < 3.3 and not parameters
if world.rank == 0:
    print("05 ok: held-out loss below 3.3 nats per byte, what single bytes can reach")
