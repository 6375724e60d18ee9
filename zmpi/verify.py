"""mpirun -n 4 python -m zmpi.verify: check the promises on this MPI and this device, and print them as a table.

From Python, `promises(Trial(world, engine=MyZeRO))` checks a changed engine or communicator: a subclass of ZeRO.
"""

import sys
import tracemalloc
import weakref
from collections import Counter
from dataclasses import dataclass

import numpy as np

from zmpi.layout import PIECES
from zmpi.ledger import Ledger
from zmpi.manners.options import Parser
from zmpi.manners.own import own_or
from zmpi.manners.start import engine_of, start, world_flags
from zmpi.optim import SGD
from zmpi.stages import STAGES, elements_moved, state_bytes
from zmpi.sums import add_up
from zmpi.trial import Trial, plain_run

# Bytes that NumPy (or CuPy, in blocks of 512) may hold after a step beside what is named: a third of the large GPT's
# smallest unit.
SLACK = 64 << 10
CLOSE = 1e-5  # relative, where sums are ordered differently (DESIGN: promise P1)


@dataclass(frozen=True)
class Row:
    """One line of the table: what was compared, how far it is off, and whether that keeps the promise."""

    promise: str
    compared: str
    figure: str
    passed: bool


def promises(trial):
    """The rows of the table, one after the other; all ranks see the same."""
    yield stages_agree(trial)
    yield from order_is_kept(trial)
    yield schedule_changes_nothing(trial)
    yield gradient_is_right(trial)
    for reduction in trial.reductions:
        yield volumes_are_exact(trial.reduced(reduction))
    yield state_is_exact(trial)
    yield from nothing_is_kept(trial)


# -- P1: same training ------------------------------------------------------------------------------------------------


def stages_agree(trial):
    """(a) With one micro-batch the four stages give the same bits, with every reduction."""
    worst = []
    for reduction in trial.reductions:
        for model in ("GPT", "MLP"):
            runs = [
                trial.reduced(reduction).but(model=model, stage=stage.number).run()
                for stage in STAGES
            ]
            worst += [run.difference(runs[0]) for run in runs[1:]]
    return _same_bits(
        trial, "P1 a", f"stages 1, 2, 3 with 0; reduction {', '.join(trial.reductions)}", worst
    )


def order_is_kept(trial):
    """(b) Ordered, three micro-batches a rank: each stage gives the bits of one rank, and of the loop without ZeRO."""
    split = trial.reduced("ordered").but(accumulate=3)
    runs = [split.but(stage=stage.number).run() for stage in STAGES]
    references = {"one rank": split.alone().but(stage=0).run()}
    if (
        trial.precision == "float32" and trial.world.device.name == "cpu"
    ):  # the plain loop computes with NumPy
        references["the plain loop"] = plain_run(split.alone())
    for name, reference in references.items():
        worst = [run.difference(reference) for run in runs]
        if PIECES % trial.world.size == 0:
            yield _same_bits(
                trial, "P1 b", f"every stage, ordered, 3 micro-batches, with {name}", worst
            )
        else:  # the norm is then summed in other pieces, and the clipped gradient differs in its last bit
            text = f"every stage with {name} (same bits only if the ranks divide {PIECES})"
            yield _within(trial, "P1", text, worst, CLOSE)


def schedule_changes_nothing(trial):
    """(c) Prefetch and recomputation change no bit."""
    plain = trial.but(accumulate=2).run()
    others = [
        trial.but(accumulate=2, prefetch=p, recompute=r).run()
        for p, r in ((1, False), (0, True), (1, True))
    ]
    return _same_bits(
        trial,
        "P1 c",
        "prefetch, recompute and both with neither",
        [run.difference(plain) for run in others],
    )


def gradient_is_right(trial):
    """The sharded gradient of the global loss along a random direction, against finite differences in float64."""
    worst = []
    for stage in STAGES:
        one = trial.but(
            stage=stage.number, precision="float64", accumulate=2, optimizer=SGD(lr=0.0)
        )
        zero, data, step = one.make(), one.data(0), 3e-6
        zero.train_step(data)
        units = list(zero.units.values())
        draws = [
            np.random.default_rng(i).standard_normal(unit.layout.padded)
            for i, unit in enumerate(units)
        ]
        directions = [zero.world.device.put(draw) for draw in draws]
        shares = [
            float(unit.summed @ along[unit.part])
            for unit, along in zip(units, directions, strict=True)
        ]
        slope = add_up(zero.comm.gather_scalars([add_up(shares)]).ravel())
        losses = []
        for move in (step, -2 * step):
            for unit, along in zip(units, directions, strict=True):
                unit.parameters += move * (along[unit.part] if stage.parameters else along)
            losses.append(zero.evaluate(data))
        expected = (losses[0] - losses[1]) / (2 * step)
        worst.append(abs(slope - expected) / abs(expected))
    # 1e-6: the differences are off by the square of the step (1e-11) times a third derivative of some thousands
    return _within(
        trial, "P1", "gradient with finite differences, stages 0-3, float64", worst, 1e-6
    )


# -- P2: exact accounting ---------------------------------------------------------------------------------------------


def volumes_are_exact(trial):
    """Elements and bytes of each collective equal the closed form, at every stage, with one and three micro-batches."""
    wrong = 0
    for model in ("GPT", "MLP"):
        for stage in STAGES:
            for accumulate in (1, 3):
                one = trial.but(model=model, stage=stage.number, accumulate=accumulate)
                zero = one.make()
                zero.train_step(one.data(0))
                wrong += _volume_surplus(zero, accumulate)
    text = f"elements and bytes moved with the formula, {trial.world.reduction}"
    return _none(trial, "P2", text, wrong, "elements and bytes")


def _volume_surplus(zero, accumulate):
    """Elements and bytes by which the ledger and the closed form differ, without regard to sign."""
    sizes = {unit.layout.name: unit.layout.elements for unit in zero.units.values()}
    wrong = 0
    for kind, elements in elements_moved(
        zero.stage, zero.schedule, sizes, accumulate, zero.comm.ordered
    ).items():
        entry = zero.ledger["comm"][kind]
        payload = add_up(
            zero.comm.gather_scalars([entry["bytes_sent"] - entry["padding_bytes"]]).ravel()
        )
        itemsize = zero.policy.recipe.parameter.itemsize
        wrong += abs(entry["elements"] - elements) + abs(
            payload - (zero.comm.shards - 1) * elements * itemsize
        )
    return wrong


def state_is_exact(trial):
    """Bytes of the live arrays that a rank owns equal the stage's formula over the padded sizes."""
    wrong = 0
    for model in ("GPT", "MLP"):
        for stage in STAGES:
            zero = trial.but(model=model, stage=stage.number).make()
            units = zero.units.values()
            padded, moments = sum(unit.layout.padded for unit in units), len(zero.optimizer.moments)
            formula = state_bytes(stage, padded, zero.comm.shards, zero.policy.recipe, moments)
            wrong += sum(
                abs(formula[kind] - sum(unit.owned_bytes()[kind] for unit in units))
                for kind in formula
            )
    return _none(trial, "P2", "owned bytes with the stage's formula, stages 0-3", wrong, "bytes")


# -- P3: nothing kept -------------------------------------------------------------------------------------------------


class Counting(Ledger):
    """A ledger that also counts how many arrays of each kind are alive, by weak references."""

    def __init__(self):
        super().__init__()
        self.living, self.most = Counter(), Counter()

    def track(self, kind, array):
        """Count the array until its memory is given back."""
        self.living[kind] += 1
        self.most[kind] = max(self.most[kind], self.living[kind])
        weakref.finalize(array, self._count_down, kind).atexit = False
        return super().track(kind, array)

    def _count_down(self, kind):
        self.living[kind] -= 1


def nothing_is_kept(trial):
    """At stage 3 at most prefetch + 1 full vectors are alive, none after a step; memory holds what is named, no more."""
    watched = trial.but(
        model="large GPT", engine=type("Watched", (trial.engine,), {"make_ledger": Counting})
    )
    for prefetch in (0, 1):
        one = watched.but(prefetch=prefetch)
        tracemalloc.start()
        try:
            before = trial.world.device.held_bytes()
            zero = one.make()
            zero.ledger.most.clear()
            for step in range(2):
                zero.train_step(one.data(step))
                zero.evaluate(one.data(step))
            held = trial.world.device.held_bytes() - before
        finally:
            tracemalloc.stop()
        alive = zero.ledger.alive
        unnamed = (
            held
            - sum(alive.values())
            + (alive["pinned"] if trial.world.device.name != "cpu" else 0)
        )  # the host's
        figures = zero.ledger.most["full"], zero.ledger.living["full"], unnamed
        most, left, unnamed = zero.comm.gather_scalars(figures).max(axis=0)
        good = most <= prefetch + 1 and not left and unnamed <= SLACK
        figure = f"{most:.0f} at most, {left:.0f} after, {unnamed / 1024:.0f} KiB unnamed"
        yield Row("P3", f"full vectors alive at stage 3, prefetch {prefetch}", figure, bool(good))


# -- rows -------------------------------------------------------------------------------------------------------------


def _everywhere(trial, worst):
    """The largest of the figures on any rank."""
    return float(
        trial.make().comm.gather_scalars([np.max(worst)]).max()
    )  # np.max: one that is not a number stays so


def _same_bits(trial, promise, compared, worst):
    worst = _everywhere(trial, worst)
    return Row(
        promise,
        compared,
        "same bits" if worst == 0 else f"off by {worst:.1e}, relative",
        worst == 0,
    )


def _within(trial, promise, compared, worst, bound):
    worst = _everywhere(trial, worst)
    return Row(promise, compared, f"off by {worst:.1e}, relative", worst <= bound)


def _none(trial, promise, compared, wrong, of):
    wrong = _everywhere(trial, [wrong])
    return Row(
        promise, compared, "equal" if wrong == 0 else f"off by {wrong:,.0f} {of}", wrong == 0
    )


def main(argv=None):
    """Run the command; status 1 if a promise is not kept."""
    flags = Parser("zmpi.verify", __doc__.splitlines()[0])
    add = flags.add_argument
    add(
        "--precision",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        help="number types of the runs",
    )
    world_flags(flags)
    add(
        "--comm",
        type=own_or("zmpi"),
        metavar="FILE:CLASS",
        help="a Communicator or ZeRO of your own (default: zmpi, its own)",
    )
    args, world = start(flags, argv)
    with world.agreed():
        engine = engine_of(args.comm)
    if world.rank == 0:
        print(
            f"zmpi.verify: {world.size} rank(s), {args.precision}, device {world.device.name}, {world.library}",
            flush=True,
        )
    given_up = []
    for row in promises(Trial(world, engine, args.precision)):
        if not row.passed:
            given_up.append(row.promise)
        if world.rank == 0:
            print(
                f"{row.promise:5} {row.compared:64} {row.figure:44} {'pass' if row.passed else 'FAIL'}",
                flush=True,
            )
    if world.rank == 0:
        print(
            f"not kept: {', '.join(dict.fromkeys(given_up))}" if given_up else "all promises kept",
            flush=True,
        )
    sys.exit(1 if given_up else 0)


if __name__ == "__main__":
    main()
