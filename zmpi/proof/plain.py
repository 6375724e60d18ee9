"""The same training without ZeRO, on one process: models/layer.py's loop over a trial's data.

In 16 bits it makes the recipe's three roundings: of weights before use, of each micro-batch's
partial gradient, and of their float32 sum.
"""

import numpy as np

from models import plain_weights
from models.layer import forward_backward, units, zeros_like
from zmpi.core.layout import PIECES, Layout
from zmpi.numbers.optim import Slice, sums_of_squares
from zmpi.numbers.precision import RECIPES, Policy
from zmpi.numbers.sums import add_up
from zmpi.proof.outcome import Outcome, Part, Taken
from zmpi.proof.trial import TRIAL_SEED, TRIAL_STEPS


def plain_run(trial, block=1):
    """The Outcome of a one-rank trial without an engine, with units padded as at size 1.

    Micro-batches are added up in blocks, as groups of that many ranks do.
    """
    plain = Plain.of(trial)
    plain.block = block
    steps = [plain.step(trial.data(step)) for step in range(TRIAL_STEPS)]
    final = {
        name: part.values.reshape(part.shape) for name, part in plain.named(plain.stored()).items()
    }
    return Outcome("the plain loop", steps, final)


class Plain:
    """A model in training on one process, in whole vectors, {unit: vector}."""

    block = 1  # micro-batches that are added up first

    @classmethod
    def of(cls, trial):
        """A trial's model, before its first step."""
        return cls(trial.models[trial.model], trial.optimizer, trial.precision)

    def __init__(self, model, optimizer, precision="float32", seed=TRIAL_SEED):
        self.model, self.optimizer = model, optimizer
        self.recipe, self.scaler = RECIPES[precision], Policy(precision).scaler()
        self.layouts = {
            unit: Layout(unit, spec.prefix, spec.shapes, 1)
            for unit, spec in units(model).items()
            if spec.shapes
        }
        self.without = {unit: {} for unit in units(model)}  # views of layers without parameters
        # Drawn in float32, so that every precision starts from the same weights.
        self.masters = self.vectors(plain_weights(model, seed, np.float32), self.recipe.master)
        self.moments = {
            unit: {name: np.zeros_like(vector) for name in self.optimizer.moments}
            for unit, vector in self.masters.items()
        }
        self.updates, self.norm = 0, None  # the norm of the last step's gradient, unscaled

    def step(self, micro_batches):
        """The step Taken from [(inputs, targets), ...]."""
        sums, loss = self.gradient(self.views(self.stored()), micro_batches)
        gradients = {unit: _rounded(vector, self.recipe.gradient) for unit, vector in sums.items()}
        self.update(gradients)
        return Taken(loss, self.named(gradients), self.norm, self.named(self.stored()))

    def gradient(self, weights, micro_batches):
        """({unit: scaled gradient of the mean loss}, the mean loss) at these weights."""
        counted = sum(int((targets >= 0).sum()) for _, targets in micro_batches)
        sums, losses = {unit: np.zeros_like(v) for unit, v in self.masters.items()}, []
        for start in range(0, len(micro_batches), self.block):
            of_block = {unit: np.zeros_like(v) for unit, v in self.masters.items()}
            for batch in micro_batches[start : start + self.block]:
                partial = zeros_like(weights)
                divisor = counted / self.scaler.scale
                losses.append(forward_backward(self.model, weights, partial, batch, divisor))
                for unit, vector in self.vectors(partial, self.recipe.partial).items():
                    of_block[unit] += _rounded(vector, self.recipe.gradient)
            for unit, vector in of_block.items():
                sums[unit] += _rounded(vector, self.recipe.gradient)
        return sums, add_up(losses) / counted

    def stored(self):
        """The stored parameters: the masters, rounded."""
        return {u: _rounded(vector, self.recipe.parameter) for u, vector in self.masters.items()}

    def named(self, vectors):
        """{full name: Part} of whole vectors."""
        found = {}
        for unit, layout in self.layouts.items():
            for name, view in layout.views(vectors[unit]).items():
                found[layout.prefix + name] = Part.whole(view)
        return found

    def update(self, gradients):
        """Update the masters from {unit: scaled gradient}; one that is not finite is skipped."""
        squares = sum(sums_of_squares(vector, PIECES) for vector in gradients.values())
        scale = self.scaler.scale
        self.norm = add_up(squares) ** 0.5 / scale
        overflow = not np.isfinite(self.norm)
        self.scaler.after_step(overflow)
        if overflow:
            return
        self.updates += 1
        for unit, layout in self.layouts.items():
            decayed = [
                (start, stop, len(layout.shapes[name]) >= 2)
                for name, start, stop in layout.spans(slice(0, layout.padded))
            ]
            owned = Slice(self.masters[unit], gradients[unit], self.moments[unit], decayed)
            factor = self.optimizer.clip_factor(self.norm) / scale
            self.optimizer.update(owned, self.updates, factor)

    def vectors(self, named, dtype):
        """{unit: {local name: array}} as flat padded vectors of a type."""
        vectors = {}
        for unit, layout in self.layouts.items():
            vectors[unit] = np.zeros(layout.padded, dtype)
            for name, view in layout.views(vectors[unit]).items():
                view[...] = named[unit][name]
        return vectors

    def views(self, vectors):
        """{unit: {local name: array}} of whole vectors, in the type that is computed in."""
        return self.without | {
            unit: self.layouts[unit].views(vector.astype(self.recipe.compute, copy=False))
            for unit, vector in vectors.items()
        }


def _rounded(vector, dtype):
    """Converted to another type; overflows become infinite, and show in the norm."""
    with np.errstate(over="ignore"):
        return vector.astype(dtype, copy=False)
