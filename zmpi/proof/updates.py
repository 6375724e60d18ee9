"""P1, the update: learning rates, clipping, norm and optimizers, against a float64 textbook."""

from functools import partial

import numpy as np

from zmpi.numbers.optim import SGD, AdamW, Optimizer
from zmpi.proof import textbook
from zmpi.proof.outcome import parts
from zmpi.proof.rows import Finding, both, first_index, judged, largest, named_index, off

UPDATES = 5
# The first clips, the second never does, so a factor above 1 would show. Large rates and decays
# make errors stand out from float32's rounding.
FOLLOWED = (
    AdamW(
        lr=0.05, warmup=2, schedule="cosine", decay_steps=4, clip=0.05, weight_decay=0.5, eps=1e-3
    ),
    SGD(lr=0.1, warmup=3, clip=1e3, weight_decay=0.1, momentum=0.9),
)
TEXTBOOK = {AdamW: textbook.adamw, SGD: textbook.sgd}
# Relative to one update's largest change, and to the largest weight: about ten float32 operations
# in another order, and the sum's last bits. 1e-5 leaves a factor of ten; t + 1 for t = 5 is off by
# 0.2.
CHANGE, WEIGHT = 1e-5, 4 * 2.0**-24


def updates_are_right(trial):
    """Learning rates and clipping, then whole updates in the trial's precision and in float16."""
    trial = trial.but(tolerance=0.0)  # each update is compared with its own gradients
    mine, known = trial.optimizer, tuple(TEXTBOOK)
    # Follow your own subclass of AdamW or SGD as such; others have the base class's rates, or their
    # own.
    followed = [*FOLLOWED, *[mine] * (isinstance(mine, known) and type(mine) not in known)]
    own_rates = not isinstance(mine, known) and type(mine).rate is not Optimizer.rate
    optimizers = followed if own_rates else [mine, *followed]
    yield judged(trial, "P1", "learning rates and clipping with a textbook's", _numbers(optimizers))
    kinds = {trial.precision: [*trial.models], "float16": [[*trial.models][-1]]}
    for precision, models in kinds.items():
        norms, weights = [], []
        for optimizer in followed:
            one = trial.but(precision=precision, optimizer=optimizer, accumulate=2)
            for model in models:
                norm, weight = _followed(one.but(model=model))
                norms.append(norm)
                weights.append(weight)
        yield judged(
            trial, "P1", f"gradient norm with the gradients' own, {precision}", norms, "equal"
        )
        yield judged(trial, "P1", f"AdamW and SGD with a textbook's, {precision}", weights, "equal")
    yield judged(
        trial, "P1", "a float16 step that overflows changes nothing", _skipped(trial), "equal"
    )
    yield judged(trial, "P1", "the norm's pieces in their owners' order", [_ordered(trial)])


def _ordered(trial):
    """The Finding of a norm of pieces that come to another number in any other order of owners.

    The pieces before the large one count, half a unit in its last place each; those after it are
    rounded away.
    """
    zero = trial.but(precision="float32").make()
    small, large = 2.0**-53, min(1, zero.comm.shards - 1)
    first = next(iter(zero.units.values()))
    own = np.full(first.layout.pieces, small)
    if zero.comm.shard == large:
        own = np.where(np.arange(len(own)) == 0, 1.0, 0.0)
    for unit in zero.units.values():
        unit.squares = partial(np.multiply, own, float(unit is first))
    pieces = [np.full(len(own), small) for _ in range(zero.comm.shards)]
    pieces[large] = np.where(np.arange(len(own)) == 0, 1.0, 0.0)
    expected = textbook.norm_in_order(np.concatenate(pieces))
    zero.train_step(trial.data(0))
    here = zero.last.grad_norm
    if here == expected:
        return Finding(0.0)
    return Finding(abs(here / expected - 1), f"{trial}: norm {both(here, expected, 'in order')}")


def _numbers(optimizers):
    """Findings of each optimizer's first learning rate and clip factor that are wrong."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        pairs = [
            (f"learning rate of update {t}", optimizer.rate(t), textbook.rate(optimizer, t))
            for t in range(1, 12)
        ]
        clip = optimizer.clip or 1.0
        pairs += [
            (f"clip factor at norm {norm:g}", optimizer.clip_factor(norm), expected)
            for norm in (clip / 3, clip, 3 * clip)
            for expected in [textbook.clipped(optimizer, norm)]
        ]
        for what, here, there in pairs:
            if not abs(here - there) <= 1e-12 * there:
                yield Finding(
                    off(*map(np.array, (here, there))),
                    f"{name}, {what}: {both(here, there, 'by a textbook')}",
                )
                break


def _followed(trial):
    """(Finding of the norm, Finding of the weights) of UPDATES steps, from their own gradients."""
    zero = trial.make()
    norms, weights = [Finding(0.0)], [Finding(0.0)]
    for step in range(UPDATES):
        before = [_state(zero, unit) for unit in zero.units.values()]
        updates = zero.updates
        zero.train_step(trial.data(step))
        if zero.last.skipped:
            continue
        gradients = [_gradient(zero, unit) for unit in zero.units.values()]
        squares = [sum(float(np.sum(part.values**2)) for part in g.values()) for g in gradients]
        norm = textbook.norm_of(np.sum(zero.comm.gather_scalars(squares), axis=1))
        where = f"{trial}, {type(zero.optimizer).__name__}, step {step + 1}"
        size = off(*map(np.array, (zero.last.grad_norm, norm)))
        text = f"{where}: gradient norm {both(zero.last.grad_norm, norm, 'by its gradients')}"
        norms.append(Finding(size, "" if size <= CHANGE else text, (step,)))
        for unit, state, gradient in zip(zero.units.values(), before, gradients, strict=True):
            now = _state(zero, unit)
            for name, part in gradient.items():
                found = _updated(zero.optimizer, updates + 1, norm, (name, part), (state, now))
                if found:
                    weights.append(
                        Finding(found.size, f"{where}: {found.where}", (step, *found.order))
                    )
    return _first(norms), _first(weights)


def _updated(optimizer, t, norm, gradient, states):
    """The Finding of one update of a parameter's elements that this rank owns, or None."""
    (name, part), (before, now) = gradient, states
    # with the parameter's number of dimensions, which decides decay
    decays = np.zeros((1,) * max(1, len(part.shape)))
    shape = (-1, *decays.shape[1:])
    g = part.values.reshape(shape) * textbook.clipped(optimizer, norm)
    w = before["master"][name].values.reshape(shape)
    moments = {kind: before[kind][name].values.reshape(shape) for kind in optimizer.moments}
    kind = next(kind for kind in TEXTBOOK if isinstance(optimizer, kind))
    expected, new_moments = TEXTBOOK[kind](optimizer, t, w, g, moments)
    change = largest(expected - w)
    bound = CHANGE * change + WEIGHT * largest(w)
    for vector, there in {"master": expected, **new_moments}.items():
        here, there = now[vector][name].values, there.ravel()
        if vector != "master":
            bound = CHANGE * largest(there)
        at = first_index(here, there, bound or CHANGE)
        if at is not None:
            element = named_index(name, part.shape, part.first + at)
            what = "weight" if vector == "master" else f"moment {vector} of"
            return Finding(
                off(here, there), f"{what} {element}: {both(here[at], there[at], 'by a textbook')}"
            )
    return None


def _state(zero, unit):
    """{"master" or a moment's name: {full name: Part}} of this rank's shard."""
    return {
        kind: parts(unit.layout, unit.part, zero.world.device.get(shard))
        for kind, shard in unit.shards().items()
    }


def _gradient(zero, unit):
    """{full name: Part} of this rank's shard of the last gradient, without the loss scale."""
    found = parts(unit.layout, unit.part, zero.world.device.get(unit.summed))
    for part in found.values():
        part.values[...] /= zero.last.loss_scale
    return found


def _skipped(trial):
    """Findings of a float16 step that overflows: nothing is updated, and the scale is halved."""
    one = trial.but(precision="float16", model=[*trial.models][-1])
    zero = one.make()
    zero.scaler.scale = zero.scaler.HIGHEST
    before = [_state(zero, unit) for unit in zero.units.values()]
    zero.train_step(one.data(0))
    expected = {"skipped": True, "updates": 0, "loss scale": zero.scaler.HIGHEST / 2}
    found = {"skipped": zero.last.skipped, "updates": zero.updates, "loss scale": zero.scaler.scale}
    for what, value in expected.items():
        if found[what] != value:
            yield Finding(
                1.0, f"{one}, step 1, loss scale 2^24: {what}: {found[what]} here, {value} expected"
            )
    for unit, state in zip(zero.units.values(), before, strict=True):
        now = _state(zero, unit)
        for kind, named in state.items():
            for name, part in named.items():
                here, there = now[kind][name].values, part.values
                at = first_index(here, there)
                if at is not None:
                    element = named_index(name, part.shape, part.first + at)
                    pair = both(here[at], there[at], "before")
                    yield Finding(
                        off(here, there),
                        f"{one}, step 1, loss scale 2^24: {kind} of {element}: {pair}",
                    )


def _first(findings):
    """One Finding from several: the largest size, and the first that is too large."""
    size = max(finding.size for finding in findings)
    wrong = [finding for finding in findings if finding.where]
    return Finding(size, wrong[0].where, wrong[0].order) if wrong else Finding(size)
