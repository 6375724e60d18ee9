"""mpirun -n 2 python benchmarks/floor.py --shape M: each stage against this machine's limit.

The floor of a step is the time of its matrix products alone, in the same order and layout, plus its
bytes at MPI's own rate (blocking 4 MiB collectives, in place). Both are measured in the same run as
every stage's steps, in turns; a ratio is the median over the rounds. Last comes one stage's profile
by op and by collective.
"""

import argparse
import resource
from statistics import median
from time import perf_counter

import zmpi  # before NumPy: it sets what BLAS reads when it is loaded

import numpy as np
import task
from mpi4py import MPI
from profile_by_op import Gemms, Profile
from shapes import SHAPES, shape_of

RAW_BYTES = 4 << 20  # of one raw collective over all ranks
RAW_CALLS = 8


class Raw:
    """The raw rate of the two collectives, in bytes sent by a rank per second."""

    def __init__(self, mpi):
        self.mpi = mpi
        length = RAW_BYTES // 4 // mpi.size
        self.full, self.part = np.ones(length * mpi.size, np.float32), np.ones(length, np.float32)

    def rates(self):
        """{"all_gather": bytes/s, "reduce_scatter": bytes/s}; None on one rank."""
        if self.mpi.size == 1:
            return None
        calls = {
            "all_gather": lambda: self.mpi.Allgather(MPI.IN_PLACE, self.full),
            "reduce_scatter": lambda: self.mpi.Reduce_scatter_block(self.full, self.part),
        }
        found = {}
        for kind, call in calls.items():
            self.full.fill(1)
            call()
            began = perf_counter()
            for _ in range(RAW_CALLS):
                call()
            found[kind] = (
                RAW_CALLS * self.part.nbytes * (self.mpi.size - 1) / (perf_counter() - began)
            )
        return found


class Measured:
    """One stage in training, and what its steps took."""

    def __init__(self, stage, shape, world):
        self.stage, self.world = stage, world
        optimizer = zmpi.AdamW(**task.adamw_of_zmpi())
        self.zero = zmpi.ZeRO(task.model_of(shape), world, stage, optimizer, seed=task.SEED)
        self.batches = task.Batches(shape, world.rank, world.size)
        self.rounds, self.faults, self.blocked = [], [], []
        self.ratios = []  # step / floor of each round

    def step(self):
        """One step."""
        self.zero.train_step([self.batches.of_step(self.zero.step)])

    def turn(self, steps):
        """The slowest rank's median seconds of a step; keeps faults and blocked seconds."""
        seconds, before = [], resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(steps):
            began = perf_counter()
            self.step()
            seconds.append(perf_counter() - began)
            self.blocked.append(
                sum(entry["blocked_s"] for entry in self.zero.ledger["comm"].values())
            )
        self.faults.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / steps)
        self.rounds.append(self.world.mpi.allreduce(median(seconds), MPI.MAX))
        return self.rounds[-1]

    def moving(self, rates):
        """Seconds that the bytes of a step take at these rates."""
        comm = self.zero.ledger["comm"]
        return (
            sum(comm[kind]["bytes_sent"] / rate for kind, rate in rates.items()) if rates else 0.0
        )


def measure(stages, shape, rounds, world):
    """All rounds. Returns the GEMM seconds and the raw rates of each, and the GEMMs."""
    for one in stages:
        one.step()
        one.step()
    gemms, raw = Gemms(stages[-1].step), Raw(world.mpi)
    gemm_s, rates = [], []
    gemms.seconds()
    for _ in range(rounds):
        world.mpi.barrier()
        gemm_s.append(world.mpi.allreduce(gemms.seconds(), MPI.MAX))
        rates.append(raw.rates())
        for one in stages:
            one.ratios.append(one.turn(shape.turn) / (gemm_s[-1] + one.moving(rates[-1])))
    return gemm_s, rates, gemms


def report(stages, shape, found):
    """The table, on rank 0."""
    gemm_s, rates, gemms = found
    alone = median(gemm_s)
    print(f"{shape}\n{stages[0].world.size} rank(s); medians of {len(gemm_s)} rounds")
    print(
        f"GEMMs alone: {alone * 1e3:.1f} ms for {len(gemms.calls)} calls,"
        f" {gemms.flops / alone / 1e9:.1f} GFLOP/s per rank"
    )
    if rates[0]:
        raw = {kind: median(rate[kind] for rate in rates) for kind in rates[0]}
        print(
            "raw MPI, sent per rank: "
            + ", ".join(f"{kind} {rate / 1e9:.2f} GB/s" for kind, rate in raw.items())
        )
    print(
        f"\n{'':8} {'step':>10} {'moving':>9} {'of floor':>9} {'GEMM':>6} {'blocked':>8}"
        f" {'of stage 0':>11} {'faults/step':>12}"
    )
    for one in stages:
        step = median(one.rounds)
        moving = median(one.moving(rate) for rate in rates)
        share = median(g / s for g, s in zip(gemm_s, one.rounds, strict=True))
        first = median(a / b for a, b in zip(one.rounds, stages[0].rounds, strict=True))
        blocked = median(one.blocked) / step
        figures = f"{step * 1e3:7.1f} ms {moving * 1e3:6.1f} ms {median(one.ratios):9.2f}"
        figures += f" {share:6.0%} {blocked:8.0%}"
        print(f"stage {one.stage}: {figures} {first:11.2f} {median(one.faults):12.0f}")


def profiles(stages, steps):
    """Where a step's time goes, for each stage, on rank 0."""
    profiled = []
    for one in stages:
        profile = Profile()
        total = sum(profile.of(one.step) for _ in range(steps))
        profiled.append((profile, total))
    if stages[0].world.rank:
        return
    labels = sorted(
        {label for profile, _ in profiled for label in profile.seconds},
        key=lambda k: -profiled[-1][0].seconds[k],
    )
    print(
        f"\nprofile, ms a step{'':11}"
        + "".join(f"   stage {one.stage}" for one in stages)
        + "   calls   share"
    )
    for label in labels:
        row = "".join(f"{profile.seconds[label] / steps * 1e3:10.2f}" for profile, _ in profiled)
        last, total = profiled[-1]
        print(f"{label:29}{row}{last.calls[label] / steps:8.0f}{last.seconds[label] / total:8.1%}")
    print(f"{'all':29}" + "".join(f"{total / steps * 1e3:10.2f}" for _, total in profiled))


def main():
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--shape",
        default="S",
        help=f"one of {', '.join(SHAPES)}, or such as S,width=512 (default: S)",
    )
    flags.add_argument(
        "--stages", nargs="+", type=int, default=[0, 1, 2, 3], help="stages (default: all)"
    )
    flags.add_argument("--rounds", type=int, help="rounds (default: the shape's)")
    args = flags.parse_args()
    shape, world = shape_of(args.shape), zmpi.World()
    stages = [Measured(stage, shape, world) for stage in args.stages]
    found = measure(stages, shape, args.rounds or shape.rounds, world)
    if world.rank == 0:
        report(stages, shape, found)
    profiles(stages, max(2, shape.turn))


if __name__ == "__main__":
    main()
