"""The training step with no ZeRO in it: one process, whole weights, whole gradients.

Run:        python examples/01_plain_loop.py
Last line:  01 ok: the loss fell by more than 2 nats in 60 steps
"""

import numpy as np

from models import MLP, plain_step, plain_weights
from zmpi.numbers.optim import AdamW, Slice
from zmpi.text.data import Batches, load_text

CONTEXT = 8
model = MLP(layers=1, width=32, context=CONTEXT, vocab=256)
weights = plain_weights(model, seed=0, dtype=np.float32)
optimizer = AdamW(lr=1e-2)
moments = {
    (unit, name): {m: np.zeros_like(w).ravel() for m in ("m", "v")}
    for unit in weights
    for name, w in weights[unit].items()
}
batches = Batches(
    load_text("builtin", CONTEXT, 256), rank=0, size=1, micro_batch=64, last_only=True
)


def update(weights, gradients):
    """Each parameter by itself: what ZeRO does with slices of them, this does with all of them."""
    for (unit, name), kept in moments.items():
        w = weights[unit][name]
        owned = Slice(
            w.reshape(-1), gradients[unit][name].reshape(-1), kept, [(0, w.size, w.ndim >= 2)]
        )
        optimizer.update(owned, t=step, factor=1.0)


losses = []
for step in range(1, 61):
    losses.append(
        plain_step(model, weights, batches.of_step(seed=0, step=step, accumulate=1), update)
    )
    if step % 10 == 0:
        print(f"step {step}: loss {losses[-1]:.3f}")
state = sum(w.nbytes for named in weights.values() for w in named.values())
print(f"weights {state:,} bytes, gradients {state:,}, moments {2 * state:,}: all in this process")
assert losses[0] - losses[-1] > 2
print("01 ok: the loss fell by more than 2 nats in 60 steps")
