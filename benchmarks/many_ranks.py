"""python benchmarks/many_ranks.py: the same training on 1 to 64 ranks, to the last bit.

The same 192 micro-batches per step are shared out over 1, 2, 4, ... ranks, with ordered sums. Every
world trains at every stage; each line says whether its losses, norms, weights and moments
are the bits of the first world. The ranks may outnumber the cores: two minutes on two of them.
"""

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from mpirun import run_world  # noqa: E402  before zmpi, which shares this process's cores out
from zmpi import AdamW, World, ZeRO  # noqa: E402  before NumPy: it chooses what BLAS reads

import numpy as np  # noqa: E402

from models import GPT  # noqa: E402
from zmpi.core.layout import PIECES  # noqa: E402

STAGES = (0, 1, 2, 3)
MODEL = {"layers": 2, "width": 18, "heads": 3, "context": 7, "vocab": 29}
MICRO_BATCHES, STEPS = 192, 3


def micro_batch(step, j):
    """Global micro-batch j of a step: one sequence of its own, some of its targets not counted."""
    draw = np.random.default_rng([step, j])
    shape = 1, MODEL["context"]
    return draw.integers(0, MODEL["vocab"], shape), draw.integers(-3, MODEL["vocab"], shape)


def trained(world, stage):
    """Losses, norms and the digest of the state after STEPS steps, the same on every rank."""
    zero = ZeRO(GPT(**MODEL), world, stage, AdamW(lr=3e-3, clip=0.05, warmup=2))
    numbers = []
    for step in range(STEPS):
        mine = range(world.rank, MICRO_BATCHES, world.size)
        zero.train_step([micro_batch(step, j) for j in mine])
        numbers.append([zero.last.loss, zero.last.grad_norm])
    digest = hashlib.sha256()
    for unit in zero.units.values():
        for vector in unit.shards().values():
            whole = np.concatenate(world.share(vector))
            for view in unit.layout.views(whole).values():
                digest.update(view.tobytes())
    return [numbers, digest.hexdigest()]


def work(world):
    """What one rank does: rank 0 prints the results of all stages as a line of JSON."""
    results = [trained(world, stage) for stage in STAGES]
    if world.rank == 0:
        print(json.dumps(results))


def main():
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "sizes",
        nargs="*",
        type=int,
        default=[1, 2, 4, 8, 16, 32, 64],
        help=f"numbers of ranks, each a divisor of {MICRO_BATCHES} (default: 1 2 4 8 16 32 64)",
    )
    sizes = flags.parse_args().sizes
    print(f"{MICRO_BATCHES} micro-batches a step, {STEPS} steps, ordered; {PIECES} pieces; {MODEL}")
    first, same = None, True
    for size in sizes:
        began = time.perf_counter()
        ended = run_world(size, [__file__, "--rank"], timeout=900)
        if ended.status:
            sys.exit(f"{size} ranks: status {ended.status}\n{ended.output}")
        for stage, found in zip(STAGES, json.loads(ended.output.splitlines()[-1]), strict=True):
            first = first or found
            (loss, norm), digest = found[0][-1], found[1]
            verdict = "the same bits" if found == first else "OTHER BITS"
            same &= found == first
            print(
                f"{size:3} ranks, stage {stage}: loss {loss.hex()}, norm {norm.hex()},"
                f" state {digest[:12]}: {verdict}"
            )
        print(f"{size:3} ranks took {time.perf_counter() - began:.0f} s", flush=True)
    sys.exit(not same)


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        work(World(reduction="ordered"))
    else:
        main()
