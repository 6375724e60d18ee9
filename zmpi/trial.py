"""Small runs to compare with each other: models whose sizes do not divide, different data on every rank."""

from dataclasses import dataclass, replace

import numpy as np

from models import GPT, MLP, plain_step, plain_weights
from zmpi.engine import ZeRO
from zmpi.layout import PIECES, Layout
from zmpi.optim import AdamW, Slice, sums_of_squares
from zmpi.precision import Policy
from zmpi.sums import add_up
from zmpi.world import World

STEPS = 3
SEED = 7
MODELS = {
    "GPT": GPT(layers=3, width=15, heads=3, context=7, vocab=29),
    "MLP": MLP(layers=2, width=5, context=3, vocab=11),
    "large GPT": GPT(
        layers=3, width=64, heads=4, context=16, vocab=401
    ),  # units that stand out in a memory trace
}


@dataclass(frozen=True)
class Trial:
    """What is run: an engine of class `engine` (ZeRO, or a changed one) on `world`, and how."""

    world: World
    engine: type = ZeRO
    precision: str = "float32"
    model: str = "GPT"
    stage: int = 3
    accumulate: int = 1
    prefetch: int = 0
    recompute: bool = False
    optimizer: object = AdamW(lr=3e-3, clip=0.5, warmup=2)

    def but(self, **changes):
        """This trial with other settings."""
        return replace(self, **changes)

    def reduced(self, reduction):
        """This trial with another reduction."""
        return replace(self, world=self.world.twin(reduction=reduction))

    def alone(self):
        """This trial on one rank, which takes the whole batch. Every rank runs it, each in a world of its own."""
        return replace(
            self, world=self.world.twin(alone=True), accumulate=self.accumulate * self.world.size
        )

    @property
    def reductions(self):
        """The reductions that the precision has."""
        return ("ordered",) if self.precision in ("float16", "bfloat16") else ("mpi", "ordered")

    def make(self):
        """A fresh engine."""
        policy = Policy(self.precision, self.prefetch, self.recompute)
        return self.engine(
            MODELS[self.model], self.world, self.stage, self.optimizer, seed=SEED, policy=policy
        )

    def data(self, step):
        """This rank's micro-batches of a step."""
        return [
            self._micro_batch(step, m * self.world.size + self.world.rank)
            for m in range(self.accumulate)
        ]

    def _micro_batch(self, step, j):
        """Global micro-batch j: tokens of its own, ragged targets, and in the second one none that counts."""
        model, draw = MODELS[self.model], np.random.default_rng([step, j])
        each = isinstance(model, GPT)  # every position has a target, or every window one
        inputs = draw.integers(0, model.vocab, (2 if each else 5, model.context))
        targets = draw.integers(-3, model.vocab, inputs.shape if each else len(inputs))
        if j == 1:
            targets[...] = -1
        return inputs, targets

    def run(self):
        """An Outcome after STEPS steps."""
        zero = self.make()
        numbers = []
        for step in range(STEPS):
            zero.train_step(self.data(step))
            numbers.append((zero.last.loss, zero.last.grad_norm))
        with zero.gathered() as parameters:
            return Outcome(
                numbers,
                {
                    name: np.array(zero.world.device.get(w), np.float64)
                    for name, w in parameters.items()
                },
            )


@dataclass(frozen=True)
class Outcome:
    """What a run came to: (loss, gradient norm) of each step, and the weights after the last, by name."""

    numbers: list
    weights: dict

    def difference(self, other):
        """The largest relative difference of a loss, a norm, or a weights array (by its largest element); 0.0: same bits."""
        if self.weights.keys() != other.weights.keys():
            return float("inf")
        pairs = [(np.array(self.numbers), np.array(other.numbers))]
        pairs += [(w, other.weights[name]) for name, w in self.weights.items()]
        return float(
            np.max(
                [
                    np.max(np.abs(a - b)) / np.max(np.abs(b)) if np.any(a != b) else 0.0
                    for a, b in pairs
                ]
            )
        )


def plain_run(trial):
    """The Outcome of the loop without ZeRO over a trial's micro-batches, updated by zmpi.optim as at size 1."""
    model, optimizer = MODELS[trial.model], trial.optimizer
    initial = plain_weights(model, SEED, np.float32)
    layouts = {
        unit: Layout(unit, "", {name: w.shape for name, w in named.items()}, 1)
        for unit, named in initial.items()
    }
    owned = {unit: _plain_slice(layout, optimizer.moments) for unit, layout in layouts.items()}
    weights = {unit: layout.views(owned[unit].master) for unit, layout in layouts.items()}
    _assign(weights, initial)
    norms = []

    def update(_, gradients):
        _assign(
            {unit: layout.views(owned[unit].gradient) for unit, layout in layouts.items()},
            gradients,
        )
        squares = sum(sums_of_squares(part.gradient, PIECES) for part in owned.values())
        norms.append(add_up(squares) ** 0.5)
        for part in owned.values():
            optimizer.update(part, len(norms), optimizer.clip_factor(norms[-1]))

    losses = [plain_step(model, weights, trial.data(step), update) for step in range(STEPS)]
    prefixes = {unit.layout.name: unit.layout.prefix for unit in trial.make().units.values()}
    named = {
        prefixes[unit] + name: np.array(w, np.float64)
        for unit in weights
        for name, w in weights[unit].items()
    }
    return Outcome(list(zip(losses, norms, strict=True)), named)


def _plain_slice(layout, moments):
    """A whole unit as the optimizer sees it, all zeros."""
    whole = slice(0, layout.padded)
    decayed = [
        (start, stop, len(layout.shapes[name]) >= 2) for name, start, stop in layout.spans(whole)
    ]
    vectors = [np.zeros(layout.padded, np.float32) for _ in range(2 + len(moments))]
    return Slice(vectors[0], vectors[1], dict(zip(moments, vectors[2:], strict=True)), decayed)


def _assign(places, values):
    for unit, named in values.items():
        for name, value in named.items():
            places[unit][name][...] = value
