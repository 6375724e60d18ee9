"""python benchmarks/rounding.py: float32 training against float64, of zmpi and of PyTorch.

One process, one batch per step, the model, weights and AdamW of peers.py. Each line gives every
step's loss relative to zmpi's in float64. Trainings that differ only in rounding drift apart; this
shows how fast, and whose rounding it is.
"""

import argparse

import zmpi  # before NumPy: it sets what BLAS reads when it is loaded

import task
import torch
from shapes import shape_of
from torch_gpt import TorchGPT
from torch_worker import load, torch_step


def of_zmpi(shape, precision, batches):
    """The losses of zmpi in "float32" or "float64"."""
    optimizer = zmpi.AdamW(**task.adamw_of_zmpi())
    policy = zmpi.Policy(precision=precision)
    zero = zmpi.ZeRO(
        task.model_of(shape), zmpi.World(), 0, optimizer, seed=task.SEED, policy=policy
    )
    return [zero.train_step([batch]) for batch in batches]


def of_torch(shape, dtype, batches):
    """The same of PyTorch."""
    model = TorchGPT(shape)
    load(model, task.initial_weights(task.model_of(shape)))
    step = torch_step(model.to(dtype), "plain")
    return [float(step(*map(torch.from_numpy, batch))) for batch in batches]


def main():
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--shape",
        default="L,layers=4,width=384,heads=6,micro_batch=2",
        help="as peers.py (default: %(default)s)",
    )
    flags.add_argument("--steps", type=int, default=20, help="steps (default: 20)")
    flags.add_argument(
        "--lr", type=float, default=task.ADAMW["lr"], help="learning rate (default: %(default)s)"
    )
    args = flags.parse_args()
    task.ADAMW["lr"] = args.lr
    shape = shape_of(args.shape)
    windows = task.Batches(shape, 0, 1)
    batches = [windows.of_step(step) for step in range(args.steps)]
    exact = of_zmpi(shape, "float64", batches)
    others = {
        "zmpi float32": of_zmpi(shape, "float32", batches),
        "PyTorch float32": of_torch(shape, torch.float32, batches),
        "PyTorch float64": of_torch(shape, torch.float64, batches),
    }
    print(
        f"{shape}, lr {args.lr:g}; loss {exact[0]:.4f} -> {exact[-1]:.4f};"
        " relative difference from zmpi in float64, per step"
    )
    for name, losses in others.items():
        apart = [abs(a - b) / b for a, b in zip(losses, exact, strict=True)]
        print(f"{name:16} most {max(apart):.0e}:", " ".join(f"{one:.0e}" for one in apart))


if __name__ == "__main__":
    main()
