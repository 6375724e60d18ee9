"""What the ledger costs: steps with zmpi's ledger and with one that does nothing, in alternation.

    mpirun -n 2 python benchmarks/ledger_cost.py

Each pair is two steps on the same data, one per engine, in alternating order. The ratio of their
times is the median over the pairs with its 95 % interval (order statistics, no distribution), for
the clock and for the processor's time of this rank, which other processes disturb less.
"""

import argparse
from contextlib import nullcontext
from math import comb
from statistics import median
from time import perf_counter, process_time

import numpy as np

from models import GPT
from zmpi import AdamW, World, ZeRO


class NoLedger:
    """Takes what a ledger is told, and keeps nothing of it."""

    def begin_step(self):
        pass

    def book(self, kind, unit, **amounts):
        pass

    def as_other(self):
        return nullcontext()

    def track(self, kind, array):
        return array


class Unbooked(ZeRO):
    """The engine without its books."""

    make_ledger = NoLedger


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--pairs", type=int, default=61, help="pairs of steps (at least 15; default: 61)"
    )
    parser.add_argument(
        "--stage", type=int, default=3, help="ZeRO stage (default: 3, which moves most)"
    )
    args = parser.parse_args()
    if args.pairs < 15:
        parser.error(f"--pairs: expected at least 15, got {args.pairs}")
    world = World()
    model = GPT(layers=2, width=128, heads=4, context=64, vocab=256)
    engines = [kind(model, world, args.stage, AdamW(clip=1.0)) for kind in (ZeRO, Unbooked)]
    wall, processor = [], []
    for pair in range(-3, args.pairs):
        tokens = np.random.default_rng([pair + 3, world.rank]).integers(0, 256, (8, 65))
        batch = [(tokens[:, :-1], tokens[:, 1:].copy())]
        took = {}
        for i in (0, 1) if pair % 2 else (1, 0):
            began = perf_counter(), process_time()
            engines[i].train_step(batch)
            took[i] = perf_counter() - began[0], process_time() - began[1]
        if pair >= 0:  # the first three warm up
            wall.append(took[0][0] / took[1][0])
            processor.append(took[0][1] / took[1][1])
    if world.rank == 0:
        print(
            f"{world.size} rank(s), stage {args.stage}, {args.pairs} pairs:"
            " time with the ledger / time without"
        )
        for name, ratios in (("clock", wall), ("processor", processor)):
            low, high = interval(ratios)
            print(f"  {name:10} median {median(ratios):.4f}, 95 % interval {low:.4f} to {high:.4f}")


def interval(values):
    """The order statistics around the median, with 95 % certainty (the sign test's interval)."""
    values, n = sorted(values), len(values)
    outside, k = 0.0, 0
    while outside + comb(n, k) / 2**n <= 0.025:
        outside += comb(n, k) / 2**n
        k += 1
    return values[max(0, k - 1)], values[n - max(1, k)]


if __name__ == "__main__":
    main()
