"""mpirun -n 2 python benchmarks/gpu.py: tokens/s, FLOP utilisation and memory of a 124M GPT-2.

Model FLOPs per token: 6 per parameter, plus 12 x layers x width x context for attention (PaLM,
arXiv 2204.02311, appendix B). The peak to compare with is a flag: no program can ask a GPU for it.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from models import GPT
from zmpi import AdamW, Policy, World, ZeRO

GPT2 = {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocab": 50257}


def main():
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    flags.add_argument("--precision", default="bfloat16", help="float32 or bfloat16")
    flags.add_argument("--micro-batch", type=int, default=8, help="sequences per rank")
    flags.add_argument("--steps", type=int, default=5, help="timed steps, after 2 that are not")
    flags.add_argument(
        "--peak",
        type=float,
        default=989,
        help="TFLOP/s of the GPU in this precision (989: H100, H200 bfloat16)",
    )
    flags.add_argument(
        "--seconds", type=float, default=60, help="stop timing a stage after so many seconds"
    )
    flags.add_argument("--transport", default="auto", help="auto, direct or staged")
    flags.add_argument("--device", default="cuda", help="cuda (or cpu, to try the script)")
    for name, size in GPT2.items():
        flags.add_argument(
            f"--{name}", type=int, default=size, help=f"of the model; GPT-2 has {size}"
        )
    args = flags.parse_args()
    world = World(args.device, args.transport)
    for stage in range(4):
        line = measured(world, args, stage)
        if world.rank == 0:
            print(line, flush=True)


def measured(world, args, stage):
    """A row of the table."""
    model = GPT(**{name: getattr(args, name) for name in GPT2})
    zero = ZeRO(model, world, stage, AdamW(lr=3e-4, clip=1.0), policy=Policy(args.precision))
    tokens = np.random.default_rng(world.rank).integers(
        0, args.vocab, (args.micro_batch, args.context + 1)
    )
    if world.device.name == "cuda":
        world.device.pool.restart()
    seconds, losses, began = [], [], perf_counter()
    for step in range(args.steps + 2):
        start = perf_counter()
        losses.append(zero.train_step([(tokens[:, :-1], tokens[:, 1:])]))
        zero.comm.gather_scalars([])  # the ranks end a step together
        seconds.append(perf_counter() - start)
        late = zero.comm.gather_scalars([perf_counter() - began]).max() > args.seconds
        if step >= 2 and late:
            break
    counted = args.micro_batch * args.context * world.size
    psi = sum(unit.layout.elements for unit in zero.units.values())
    speed = counted / median(seconds[2:])
    flops = speed * (6 * psi + 12 * args.layers * args.width * args.context)
    state = sum(zero.ledger["memory"][kind] for kind in ("parameters", "gradients", "optimizer"))
    peak = zero.comm.gather_scalars([world.device.peak_bytes()]).max()
    return (
        f"{args.precision:9} stage {stage} {world.size:2} rank(s)"
        f" {world.transport:7}{speed:12,.0f} tokens/s"
        f" {flops / world.size / args.peak / 1e12:6.1%} of {args.peak:g} TFLOP/s "
        f" peak {peak / 1e9:6.2f} GB,"
        f" state {state / 1e9:5.2f} GB  loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    )


if __name__ == "__main__":
    main()
