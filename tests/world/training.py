"""What the tests of the engine share: small models, data that differs on every rank, and the run without ZeRO.

Shapes: b sequences, T positions. Sizes are chosen so that they do not divide: units of the GPT here are 1 or 2 mod 3, 4, 5.
"""

import numpy as np

from models import GPT, MLP, plain_step, plain_weights, unit_of, units
from models.layer import forward_backward, zeros_like
from zmpi import Policy, World, ZeRO
from zmpi.core.layout import Layout
from zmpi.numbers.optim import SGD, AdamW, Slice
from zmpi.numbers.precision import RECIPES

STAGES = (0, 1, 2, 3)


def gpt(layers=2):
    return GPT(layers=layers, width=14, heads=2, context=7, vocab=23)


def mlp(layers=2):
    return MLP(layers=layers, width=11, context=5, vocab=23)


def adamw(**changed):
    """AdamW with everything on: warm-up, cosine, decay, and clipping that bites (the first norms are about 1)."""
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
    """Global micro-batch j of a step, a function of (step, j) alone; `ragged`: about a third of the targets do not count."""
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


class Plain:
    """One process without ZeRO: the plain loop of models/layer.py, and zmpi.numbers.optim over units padded as at one rank.

    In 16 bits, where an overflow skips the step, the loop is written out again here, with the three roundings of the
    recipe: weights before they are used, the partial gradient of each micro-batch, and their float32 sum.
    """

    def __init__(self, model, optimizer, seed=0, precision="float32"):
        self.model, self.optimizer, self.recipe = model, optimizer, RECIPES[precision]
        wide = self.recipe.master
        self.layouts = {
            unit: Layout(unit, spec.prefix, spec.shapes, shards=1)
            for unit, spec in units(model).items()
            if spec.shapes
        }
        self.empty = {unit: {} for unit in units(model)}  # of layers without parameters
        self.masters = self._vectors(plain_weights(model, seed, wide))
        self.moments = {
            u: {n: np.zeros_like(v) for n in optimizer.moments} for u, v in self.masters.items()
        }
        self.scaler = Policy(precision).scaler()
        self.updates, self.norm = 0, None

    def step(self, micro_batches):
        """The mean loss before the update."""
        if self.recipe.own_master:
            weights = self.empty | {
                unit: self.layouts[unit].views(vector) for unit, vector in self.masters.items()
            }
            return plain_step(
                self.model, weights, micro_batches, lambda w, dw: self._update(self._vectors(dw))
            )
        narrow = self.recipe.parameter
        rounded = {u: v.astype(narrow).astype(self.recipe.compute) for u, v in self.masters.items()}
        weights = self.empty | {
            unit: self.layouts[unit].views(vector) for unit, vector in rounded.items()
        }
        counted = sum(int((targets >= 0).sum()) for _, targets in micro_batches)
        sums, losses = {unit: np.zeros_like(vector) for unit, vector in self.masters.items()}, 0.0
        for batch in micro_batches:
            partial = zeros_like(weights)
            losses += forward_backward(
                self.model, weights, partial, batch, counted / self.scaler.scale
            )
            for unit, vector in self._vectors(partial).items():
                sums[unit] += narrowed(vector, narrow)
        self._update({unit: narrowed(vector, narrow) for unit, vector in sums.items()})
        return losses / counted

    def run(self, number, steps=3, **options):
        """(losses, norms, final parameters), as `train` gives them; `number` micro-batches a step."""
        losses, norms = [], []
        for step in range(1, steps + 1):
            losses.append(self.step(everything(self.model, step, number, **options)))
            norms.append(self.norm)
        return losses, norms, self.parameters()

    def parameters(self):
        found = {}
        for unit, layout in self.layouts.items():
            stored = self.masters[unit].astype(self.recipe.parameter).astype(self.recipe.compute)
            found |= {layout.prefix + name: view for name, view in layout.views(stored).items()}
        return found

    def _vectors(self, named):
        """{unit: {name: array}} as padded flat vectors."""
        vectors = {}
        for unit, layout in self.layouts.items():
            vectors[unit] = np.zeros(layout.padded, next(iter(named[unit].values())).dtype)
            for name, view in layout.views(vectors[unit]).items():
                view[...] = named[unit][name]
        return vectors

    def _update(self, gradients):
        pieces = [0.0] * 192
        for vector in gradients.values():
            pieces = [
                so_far + float(np.sum(piece.astype(np.float64) ** 2))
                for so_far, piece in zip(pieces, np.split(vector, 192), strict=True)
            ]
        squares = 0.0
        for piece in pieces:
            squares += piece
        self.norm, scale = squares**0.5 / self.scaler.scale, self.scaler.scale
        overflow = not np.isfinite(self.norm)
        self.scaler.after_step(overflow)
        if overflow:
            return
        self.updates += 1
        for unit, layout in self.layouts.items():
            decayed = [
                (a, b, len(layout.shapes[name]) >= 2)
                for name, a, b in layout.spans(slice(0, layout.padded))
            ]
            owned = Slice(self.masters[unit], gradients[unit], self.moments[unit], decayed)
            self.optimizer.update(
                owned, self.updates, self.optimizer.clip_factor(self.norm) / scale
            )


def narrowed(vector, dtype):
    """Rounded to 16 bits; what is too large becomes infinite, without a warning."""
    with np.errstate(over="ignore"):
        return vector.astype(dtype)


def unit_names(model):
    return list(dict.fromkeys(unit_of(layer) for layer in model.layers))
