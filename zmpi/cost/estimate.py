"""The parts of a plan: dry runs of a model at every stage, and the largest model that fits."""

from dataclasses import dataclass, field

from zmpi.core.formulas import axis_sizes
from zmpi.cost.dryrun import CountedWorld, DryRun, Memo
from zmpi.numbers.optim import AdamW, Optimizer
from zmpi.numbers.precision import Policy

HIGHEST = 4096  # the limit of a search for the most layers or sequences


@dataclass(frozen=True)
class Setting:
    """A training run to plan. `build(layers)` makes the model (None: its own number of layers)."""

    build: callable
    ranks: int
    policy: Policy
    micro_batch: int  # sequences
    accumulate: int = 1
    reduction: str = "auto"
    memo: Memo = field(default_factory=Memo)
    group: int | None = None  # ranks per group
    optimizer: Optimizer = field(default_factory=lambda: AdamW(clip=1.0))

    @property
    def sizes(self):
        """The sizes of the world's axes, inner first."""
        return axis_sizes(self.ranks, self.group)

    def walk(self, stage, layers=None, micro_batch=None, rank=0):
        """The Walk of a dry run of one step."""
        world = CountedWorld(self.ranks, rank, self.reduction, self.group)
        model = self.build(layers)
        run = DryRun(model, world, stage, self.optimizer, self.policy, self.memo)
        run.count_step(micro_batch or self.micro_batch, self.accumulate)
        return Walk(run, self.accumulate)


class Walk:
    """The result of a dry run, for one rank and step: bytes by kind, collectives, FLOPs."""

    def __init__(self, run, micro_batches):
        ledger = run.ledger
        memory, highest = ledger["memory"], ledger.highest()
        self.stage = run.stage
        self.state = {kind: memory[kind] for kind in ("parameters", "gradients", "optimizer")}
        self.full, self.work = memory["full_peak"], memory["work"]
        self.activations = ledger.highest_activations()
        self.at_peak, self.place = highest.by_kind(), f"{highest.verb} {highest.name}".strip()
        self.peak = highest.total
        self.comm = ledger["comm"]
        self.flops = run.flops
        self.elements = sum(unit.layout.elements for unit in run.units.values())
        self.schedule, self.reduce_each = run.schedule, run.comm.ordered
        self.unit_sizes = {name: unit.layout.elements for name, unit in run.units.items()}
        self.padded = {name: unit.layout.padded for name, unit in run.units.items()}
        self.sizes = run.comm.sizes  # of the axes, inner first
        self.messages = [(kind, entry) for (kind, _), entry in ledger.moved.items()]
        self.updated = sum(len(unit.parameters.updated) for unit in run.units.values())
        self.visits = len(run.schedule) * micro_batches

    @property
    def counts(self):
        """What the terms of a step's time multiply (speed.py): FLOPs, elements, visits."""
        moved = sum(entry.elements for kind, entry in self.messages if kind != "all_reduce")
        return {
            "flops": self.flops,
            "updated": self.updated,
            "moved": moved,
            "visits": self.visits,
        }

    @property
    def bytes_sent(self):
        """Bytes that one rank sends per step, including scalars."""
        return sum(kind["bytes_sent"] for kind in self.comm.values())

    def entry(self):
        """The walk as JSON: bytes, elements and FLOPs of one rank and step."""
        comm = {
            kind: {name: amount for name, amount in amounts.items() if name != "blocked_s"}
            for kind, amounts in self.comm.items()
            if kind != "other"
        }
        return {
            "stage": self.stage.number,
            **self.state,
            "total": sum(self.state.values()),
            "full": self.full,
            "work": self.work,
            "activations": self.activations,
            "peak": self.peak,
            "at_peak": self.at_peak,
            "peak_at": self.place,
            "comm": comm,
            "flops": self.flops,
        }


def largest_fitting(bytes_of, memory):
    """The largest n from 1 to HIGHEST with bytes_of(n) <= memory, or 0; bytes_of is increasing.

    The answer is checked: bytes_of(n) fits, and bytes_of(n + 1) does not (or n is HIGHEST).
    """
    if bytes_of(1) > memory:
        return 0
    fits, known = 1, {1: bytes_of(1)}
    tried, too_many = 2, HIGHEST + 1
    while fits + 1 < too_many:
        known[tried] = bytes_of(tried)
        if known[tried] <= memory:
            fits = tried
        else:
            too_many = tried
        first, last = sorted(known)[:: len(known) - 1]  # memory is nearly linear in n
        slope = (known[last] - known[first]) / (last - first) or 1
        aim = fits + int((memory - known[fits]) / slope)
        tried = max(fits + 1, min(aim if aim > fits else fits + 1, too_many - 1))
    return fits
