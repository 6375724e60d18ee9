"""The results of a run, step by step, and the first place where two runs differ."""

from dataclasses import dataclass

import numpy as np

from zmpi.proof.rows import Finding, both, first_index, largest, named_index, off
from zmpi.proof.trial import TRIAL_STEPS


@dataclass(frozen=True)
class Part:
    """The consecutive elements of a parameter (or its gradient) on one rank, as float64."""

    shape: tuple  # of the whole parameter
    first: int  # flat index of the first element
    values: np.ndarray

    @classmethod
    def whole(cls, array):
        """A whole parameter."""
        return cls(array.shape, 0, np.array(array, np.float64).ravel())

    def common(self, other):
        """(first index, this part's values, the other's) of the common elements."""
        first = max(self.first, other.first)
        stop = min(self.first + len(self.values), other.first + len(other.values))
        stop = max(first, stop)
        return (
            first,
            self.values[first - self.first : stop - self.first],
            other.values[first - other.first : stop - other.first],
        )


@dataclass(frozen=True)
class Taken:
    """One training step on this rank, its fields in the order in which they are computed."""

    loss: float
    gradients: dict  # {full name: Part}, summed over ranks
    norm: float
    weights: dict  # {full name: Part}, after the update


@dataclass(frozen=True)
class Outcome:
    """A run on this rank: its steps, and the whole model at the end, by `gathered`."""

    run: str  # description of the run
    steps: list
    final: dict  # {full name: array}

    def difference(self, other):
        """The largest relative difference of losses, norms and weights; 0.0: the same bits."""
        mine, its = (np.array([(t.loss, t.norm) for t in run.steps]) for run in (self, other))
        pairs = [*zip(mine.T, its.T, strict=True)]
        pairs += [(array, other.final[name]) for name, array in self.final.items()]
        return float(np.max([off(*pair) for pair in pairs]))

    def compared(self, other, reference, bound=0.0):
        """The Finding of the first number that is off by more than `bound`, relative.

        Losses, norms and weights decide whether there is one; if a gradient differs before them,
        it is named instead.
        """
        size = self.difference(other)
        found = [*self._findings(other, reference, bound)] if not size or not size <= bound else []
        decisive = [finding for finding, decides in found if decides]
        if not decisive:
            return Finding(size)
        first = found[0][0]
        return Finding(size or decisive[0].size, f"{self.run}, {first.where}", first.order)

    def drifted(self, other, reference, tolerance):
        """The Finding of a run with rounded messages: its losses, and its weights' distance.

        Weights are compared as one vector, relative to the length of the whole model's: the first
        updates of an element that starts at zero follow a gradient's sign, which may be all
        rounding.
        """
        losses = [
            off(*map(np.array, (a.loss, b.loss)))
            for a, b in zip(self.steps, other.steps, strict=True)
        ]
        apart = 0.0
        for name, part in self.steps[-1].weights.items():
            _, mine, its = part.common(other.steps[-1].weights[name])
            apart += float((mine - its) @ (mine - its))
        length = sum(float(np.sum(array**2)) for array in other.final.values())
        size = float(np.max([*losses, np.sqrt(apart / length)]))
        if size <= tolerance:
            return Finding(size)
        last = self.steps[-1].loss, other.steps[-1].loss
        text = f"{self.run}, step {len(self.steps)}: loss {both(*last, reference)}"
        found = self.compared(other, reference, tolerance)
        return Finding(size, found.where or text, found.order)

    def _findings(self, other, reference, bound):
        """Yield (Finding, whether it decides), in the order in which numbers are computed."""
        for step, (mine, its) in enumerate(zip(self.steps, other.steps, strict=True), 1):
            stages = (
                ("loss", mine.loss, its.loss),
                ("gradient of ", mine.gradients, its.gradients),
                ("gradient norm", mine.norm, its.norm),
                ("weight ", mine.weights, its.weights),
            )
            for place, (kind, here, there) in enumerate(stages):
                for finding in _compared(kind, here, there, reference, bound):
                    where = f"step {step}: {finding.where}"
                    order = (step, place, *finding.order)
                    yield Finding(finding.size, where, order), "gradient of" not in kind
        for finding in _compared(
            "gathered weight ", _whole(self.final), _whole(other.final), reference, bound
        ):
            where = f"after step {len(self.steps)}: {finding.where}"
            yield Finding(finding.size, where, (len(self.steps) + 1, *finding.order)), True


def _whole(arrays):
    return {name: Part.whole(array) for name, array in arrays.items()}


def _compared(kind, here, there, reference, bound):
    """Findings between two numbers, or two {name: Part}, at most one per array."""
    if not isinstance(here, dict):
        here, there = {"": Part((), 0, np.array([here]))}, {"": Part((), 0, np.array([there]))}
    for place, (name, part) in enumerate(here.items()):
        if name not in there:
            continue
        first, mine, its = part.common(there[name])
        finite = [numbers[np.isfinite(numbers)] for numbers in (mine, its)]
        at = first_index(mine, its, bound * max(map(largest, finite)))
        if at is not None:
            element = named_index(name, part.shape, first + at) if part.shape else ""
            where = f"{kind}{element}: {both(mine[at], its[at], reference)}"
            yield Finding(off(mine, its), where, (place, first + at))


def parts(layout, part, vector):
    """{full name: Part} of a slice of a unit's vector."""
    found = {}
    for name, start, stop in layout.spans(part):
        first = part.start + start - layout.offsets[name]
        values = np.array(vector[start:stop], np.float64)
        found[layout.prefix + name] = Part(layout.shapes[name], first, values)
    return found


def run(trial):
    """The Outcome of a trial on this rank, after TRIAL_STEPS steps."""
    zero = trial.make()
    steps = []
    for step in range(TRIAL_STEPS):
        zero.train_step(trial.data(step))
        steps.append(_taken(zero))
    get = zero.world.device.get
    with zero.gathered() as parameters:
        final = {name: np.array(get(w), np.float64) for name, w in parameters.items()}
    name = str(trial.reduced(zero.comm.reduction))
    return Outcome(name, steps, final)


def _taken(zero):
    """This rank's part of the engine's last step, without communication."""
    gradients, weights, get = {}, {}, zero.world.device.get
    for unit in zero.units.values():
        gradients |= parts(unit.layout, unit.part, get(unit.summed))
        kept = unit.cut.slices[unit.parameters.rung]
        weights |= parts(unit.layout, kept, get(unit.parameters.stored))
    return Taken(zero.last.loss, gradients, zero.last.grad_norm, weights)
