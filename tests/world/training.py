"""Shared by the tests of the engine: small models, different data per rank, runs without ZeRO.

Shapes: b sequences, T positions. Sizes are chosen so that they do not divide: units of the GPT here
are 1 or 2 mod 3, 4, 5.
"""

from functools import cache

import numpy as np

from models import GPT, MLP, plain_step, unit_of
from zmpi import World, ZeRO
from zmpi.numbers.optim import SGD, AdamW
from zmpi.proof import plain

STAGES = (0, 1, 2, 3)


def gpt(layers=2):
    return GPT(layers=layers, width=14, heads=2, context=7, vocab=23)


def mlp(layers=2):
    return MLP(layers=layers, width=11, context=5, vocab=23)


def adamw(**changed):
    """AdamW with everything: warm-up, cosine, decay, and clipping (first norms are about 1)."""
    return AdamW(
        **{
            "lr": 3e-3,
            "warmup": 2,
            "schedule": "cosine",
            "decay_steps": 5,
            "clip": 0.5,
            "eps": 1e-3,
        }
        | changed
    )


def sgd(**changed):
    return SGD(**{"lr": 0.1, "momentum": 0.9, "clip": 0.5, "weight_decay": 0.01} | changed)


def micro_batch(model, step, j, b=2, ragged=True):
    """Global micro-batch j of a step; `ragged`: about a third of the targets do not count."""
    rng = np.random.default_rng([step, j])
    inputs = rng.integers(0, model.vocab, (b, model.context))
    shape = (b,) if isinstance(model, MLP) else (b, model.context)
    targets = rng.integers(0, model.vocab, shape)
    if ragged:
        targets[rng.random(shape) < 0.3] = -1
    if j == 0:
        targets.flat[0] = 1  # a step has at least one target that counts
    return inputs, targets


def share(model, step, world, accumulate, **options):
    """This rank's micro-batches of a step: j = m x size + rank."""
    return [
        micro_batch(model, step, m * world.size + world.rank, **options) for m in range(accumulate)
    ]


def everything(model, step, number, **options):
    """All micro-batches of a step, in order of j."""
    return [micro_batch(model, step, j, **options) for j in range(number)]


def world_of(reduction):
    return World(device="cpu", reduction=reduction)


def copied(zero):
    """{full name: array}, the whole model, kept."""
    with zero.gathered() as parameters:
        return {name: array.copy() for name, array in parameters.items()}


def train(zero, accumulate, steps=3, **options):
    """(losses, norms, final parameters) of some steps on this rank's share of the data."""
    losses, norms = [], []
    for step in range(1, steps + 1):
        losses.append(zero.train_step(share(zero.model, step, zero.world, accumulate, **options)))
        norms.append(zero.last.grad_norm)
    return losses, norms, copied(zero)


def run(model, world, stage, optimizer, accumulate=1, steps=3, policy=None, kind=ZeRO, **options):
    """`train` of a fresh engine."""
    return train(kind(model, world, stage, optimizer, policy=policy), accumulate, steps, **options)


def assert_same_bits(one, other, what=""):
    """Two results of `train` are equal to the last bit."""
    for i, name in enumerate(("losses", "norms")):
        assert [number.hex() for number in one[i]] == [number.hex() for number in other[i]], (
            what,
            name,
        )
    assert one[2].keys() == other[2].keys()
    for name, array in one[2].items():
        assert array.dtype == other[2][name].dtype, (what, name)
        assert array.tobytes() == other[2][name].tobytes(), (what, name)


class Plain(plain.Plain):
    """The plain loop of zmpi.verify; where nothing is rounded, models.plain_step's."""

    def __init__(self, model, optimizer, seed=0, precision="float32"):
        super().__init__(model, optimizer, precision, seed)

    def step(self, micro_batches):
        """The mean loss before the update."""
        if not self.recipe.own_master:
            return super().step(micro_batches).loss
        return plain_step(
            self.model,
            self.views(self.masters),
            micro_batches,
            lambda _, dw: self.update(self.vectors(dw, self.recipe.master)),
        )

    def run(self, number, steps=3, **options):
        """(losses, norms, final parameters), like `train`'s; `number` micro-batches per step."""
        losses, norms = [], []
        for step in range(1, steps + 1):
            losses.append(self.step(everything(self.model, step, number, **options)))
            norms.append(self.norm)
        return losses, norms, self.parameters()

    def parameters(self):
        """{full name: array}, as the engine's `gathered` has them."""
        named = self.views(self.stored())
        return {
            layout.prefix + name: array
            for unit, layout in self.layouts.items()
            for name, array in named[unit].items()
        }


# What several tests compare is computed once. Nobody changes these results.


@cache
def plain_run(model, optimizer, number, steps=3, precision="float32"):
    """`Plain.run` for a model() with `number` micro-batches a step, computed by rank 0 for all."""
    world, found = world_of("auto"), None
    if world.rank == 0:
        found = Plain(model(), optimizer, precision=precision).run(number, steps)
    return world.mpi.bcast(found)


@cache
def zero_run(model, reduction, stage, optimizer, accumulate=1, steps=3, policy=None):
    """`run` of a fresh engine for a model()."""
    return run(model(), world_of(reduction), stage, optimizer, accumulate, steps, policy)


def unit_names(model):
    return list(dict.fromkeys(unit_of(layer) for layer in model.layers))
