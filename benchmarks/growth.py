"""python benchmarks/growth.py: how a step's cost grows with ranks, width and context.

Worlds that differ in one thing take turns in one run; a ratio is the median over the rounds. The
exponent is log2(ratio) / log2(factor). Next to it is the growth of the step's
multiplications, from the shape alone.
"""

import argparse
import os
import sys
from itertools import pairwise
from math import log2
from pathlib import Path
from statistics import median

from shapes import shape_of
from turns import Contender, end_in_order

HERE = Path(__file__).resolve().parent


def work(shape, ranks):
    """Multiplications and additions of a step, per core: three times those of the forward."""
    C, T = shape.width, shape.context
    # a token: four linear maps, and q k^T and p v over half of the context
    block = 12 * C * C + T * C
    per_rank = 6 * shape.tokens * (shape.layers * block + C * shape.vocab)
    return per_rank * max(1, ranks / os.cpu_count())


def rows(name, stage, cores):
    """(what grows, [(shape, ranks), ...]): each pair of neighbours is one line of the table."""
    shape, ranks = shape_of(name), min(2, cores)
    yield "ranks, work per rank fixed", [(name, n) for n in (1, 2, 4, 8) if n <= 2 * cores]
    for field in ("width", "context"):
        sizes = [getattr(shape, field) * factor for factor in (1, 2, 4)]
        yield f"{field}", [(f"{name},{field}={size}", ranks) for size in sizes]


def line(what, before, after, worlds):
    """One line: from `before` to `after`, each (shape, ranks)."""
    shapes = [shape_of(name) for name, _ in (before, after)]
    pairs = zip(worlds[before].rounds, worlds[after].rounds, strict=True)
    ratio = median(b / a for a, b in pairs)
    asked = work(shapes[1], after[1]) / work(shapes[0], before[1])
    if "ranks" in what:
        values, factor = (before[1], after[1]), after[1] / before[1]
    else:
        values = tuple(getattr(shape, what) for shape in shapes)
        factor = values[1] / values[0]
    before_s, after_s = (median(worlds[name].rounds) for name in (before, after))
    times = f"{before_s * 1e3:8.1f} -> {after_s * 1e3:8.1f} ms"
    exponents = f"{log2(ratio) / log2(factor):8.2f} {log2(asked) / log2(factor):11.2f}"
    return f"{what:28} {values[0]:5} -> {values[1]:5} {times} {ratio:7.2f} {exponents}"


def main():
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--shape", default="S", help="the shape to start from (default: S)")
    flags.add_argument("--stage", type=int, choices=range(4), default=3, help="stage (default: 3)")
    flags.add_argument(
        "--rounds", type=int, default=10, help="turns of each world that are counted (default: 10)"
    )
    args = flags.parse_args()
    end_in_order()
    cores = os.cpu_count()
    print(f"{args.shape}, stage {args.stage}, {cores} cores, one thread per rank")
    print(
        f"{'what grows':28} {'from':>5} -> {'to':>5} {'step':>24}"
        f" {'ratio':>7} {'exponent':>8} {'of the work':>11}"
    )
    for what, steps in rows(args.shape, args.stage, cores):
        worlds = {}
        try:
            for key in steps:
                arguments = [HERE / "zmpi_worker.py", key[0], str(args.stage)]
                worlds[key] = Contender(f"{key[0]} on {key[1]}", arguments, key[1], launched=True)
                worlds[key].rounds = []
            for round_ in range(args.rounds + 1):
                for key, world in worlds.items():
                    seconds = median(world.turn(shape_of(key[0]).turn))
                    if round_:
                        world.rounds.append(seconds)
                print(f"{what}: round {round_} of {args.rounds}", file=sys.stderr)
        finally:
            for world in worlds.values():
                world.close()
        for before, after in pairwise(steps):
            print(line(what, before, after, worlds), flush=True)


if __name__ == "__main__":
    main()
