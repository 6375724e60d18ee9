"""P1, same training: runs that must agree with each other, and with the loop without ZeRO."""

from zmpi.core.layout import PIECES
from zmpi.core.stages import placement
from zmpi.numbers.optim import SGD
from zmpi.proof.gradients import exact_slope, gradient_at_gathered_weights
from zmpi.proof.outcome import run
from zmpi.proof.plain import plain_run
from zmpi.proof.rows import CLOSE, Finding, both, judged


def stages_agree(trial):
    """(a) With one micro-batch the four stages give the same bits, with every reduction."""
    for reduction in trial.reductions:
        found = []
        for model in trial.models:
            of_model = trial.reduced(reduction).but(model=model)
            runs = [run(of_model.but(stage=stage)) for stage in trial.stages]
            found += [_compared(trial, one, runs[0], "at stage 0") for one in runs[1:]]
        text = f"{_others(trial)}, reduction {reduction}"
        yield judged(trial, "P1 a", text, found)


def rungs_agree(trial):
    """(a') Summed by MPI, the bits depend on where gradients are kept, for any accumulation."""
    if "mpi" not in trial.reductions:
        return
    found, first = [], {}
    split = trial.reduced("mpi").but(accumulate=3)
    for stage in trial.stages:
        one = run(split.but(stage=stage))
        rung = placement(stage, len(trial.world.axes)).rung("gradients")
        found.append(
            _compared(trial, one, first.setdefault(rung, one), "where they are kept alike")
        )
    text = "stages that keep gradients alike, mpi, 3 micro-batches"
    yield judged(trial, "P1 a'", text, found)


def _others(trial):
    return "stages 1, 2, 3 with stage 0" if trial.group == 1 else "placements with 0,0"


def order_is_kept(trial):
    """(b) Ordered, three micro-batches: every stage gives one rank's bits, and the plain loop's."""
    split = trial.reduced("ordered").but(accumulate=3)
    runs = [run(split.but(stage=stage)) for stage in trial.stages]
    references = {} if trial.group > 1 else {"one rank": run(split.alone().but(stage=0))}
    if trial.world.device.name == "cpu":  # the plain loop computes with NumPy
        blocks = f", in blocks of {trial.group}" if trial.group > 1 else ""
        references[f"the plain loop{blocks}"] = plain_run(split.alone(), trial.group)
    same = PIECES % trial.world.size == 0
    for name, reference in references.items():
        bound = 0.0 if same else CLOSE
        found = [_compared(trial, one, reference, f"by {name}", bound) for one in runs]
        if same:
            text = f"{trial.all_stages}, ordered, 3 micro-batches, with {name}"
            yield judged(trial, "P1 b", text, found)
        else:  # the norm is summed in other pieces: the clipped gradient differs in its last bit
            yield judged(
                trial, "P1", f"{trial.all_stages} with {name} ({PIECES} % ranks is not 0)", found
            )


def narrow_types_follow(trial):
    """(b) Training in 16 bits, with loss scale and rounding, gives the plain loop's bits."""
    if trial.world.device.name != "cpu" or PIECES % trial.world.size:
        return
    found = []
    for precision in sorted({"float16", "bfloat16"} - {trial.precision}):
        split = trial.reduced("ordered").but(precision=precision, accumulate=2)
        split = split.but(model=[*trial.models][-1])
        reference = plain_run(split.alone(), trial.group)
        for stage in (trial.stages[0], trial.stages[-1]):
            one = run(split.but(stage=stage))
            found.append(_compared(trial, one, reference, "by the plain loop"))
    yield judged(trial, "P1 b", "stages 0 and 3 in 16 bits with the plain loop", found)


def schedule_changes_nothing(trial):
    """(c) Prefetch and recomputation change no bit."""
    trial = trial.but(accumulate=2)
    plain = run(trial)
    found = [
        _compared(trial, run(trial.but(prefetch=p, recompute=r)), plain, "without either")
        for p, r in ((1, False), (0, True), (1, True))
    ]
    yield judged(trial, "P1 c", "prefetch, recompute and both with neither", found)


def evaluation_agrees(trial):
    """An evaluation gives the loss of a training step on the same data, before its update."""
    found = []
    for model in trial.models:
        for stage in trial.stages:
            one = trial.but(model=model, stage=stage, accumulate=2)
            zero = one.make()
            evaluated = zero.evaluate(one.data(0))
            trained = zero.train_step(one.data(0))
            if not abs(evaluated - trained) <= trial.tolerance * abs(trained):
                text = f"{one}, step 1: evaluation loss {both(evaluated, trained, 'in training')}"
                found.append(Finding(abs(evaluated / trained - 1), text))
    yield judged(trial, "P1", "loss of an evaluation with the training step's", found)


def gradient_is_right(trial):
    """The sharded gradient, in float64, against finite differences along a random direction.

    A communicator that rounds makes the loss a staircase: its gradient is compared with the plain
    loop's, at the weights that it delivers.
    """
    found = []
    trial = trial.but(precision="float64", accumulate=2, optimizer=SGD(lr=0.0))
    for stage in trial.stages:
        one = trial.but(stage=stage)
        zero = one.make()
        zero.train_step(one.data(0))
        if trial.tolerance:
            found.append(gradient_at_gathered_weights(one, zero, trial.tolerance))
            continue
        # 1e-6: finite differences are off by the squared step (1e-11) times a third derivative of a
        # few thousand
        slope, expected = exact_slope(zero, one.data(0))
        size = abs(slope - expected) / abs(expected)
        if not size <= 1e-6:
            elsewhere = gradient_at_gathered_weights(one, zero, 1e-6)
            text = f"{one}, step 1: slope of all weights: {both(slope, expected, 'by differences')}"
            found.append(Finding(size, elsewhere.where if elsewhere else text))
    how = "the plain loop's" if trial.tolerance else "finite differences"
    text = f"gradient with {how}, stages 0-3, float64"
    yield judged(trial, "P1", text, found, good="equal")


def _compared(trial, one, other, reference, bound=0.0):
    """The Finding of two runs, which rounded messages may make differ."""
    if trial.tolerance:
        return one.drifted(other, reference, trial.tolerance)
    return one.compared(other, reference, bound)
