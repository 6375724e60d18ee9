"""The paper's formulas: a stage's bytes of state and elements moved. Counts must equal them."""

from math import prod
from types import SimpleNamespace

from zmpi.core.stages import STAGES, Placement


def axis_sizes(ranks, group):
    """The sizes of the world's axes, inner first. `group`: ranks per group; 1, None: none."""
    return (ranks,) if group in (None, 1) else (group, ranks // group)


def placements(axes):
    """Every Placement on a world of one or two axes: the four stages, or ten pairs."""
    if axes == 1:
        return [Placement((stage,)) for stage in STAGES]
    return [Placement((inner, outer)) for inner in STAGES for outer in STAGES[: inner.number + 1]]


def cut_in_words(placement, sizes):
    """[how the ranks are cut into groups, with the stage on each axis]; [] on a flat world."""
    if len(sizes) == 1:
        return []
    inner, outer = sizes
    within, between = (stage.number for stage in placement.stages)
    groups = f"{inner * outer} ranks = {outer} group{'s' * (outer > 1)} of {inner}"
    return [f"{groups}; stage {within} within, {between} between"]


def state_bytes(stage, elements, ranks, recipe, moments=2):
    """Bytes of owned state per rank: {"parameters", "gradients", "optimizer"}.

    Paper, sections 3.1 and 5.1-5.3. `stage` and `ranks`: a Stage and a number, or a Placement and
    the axes' sizes, inner first. `elements` is Ψ, or the sum of padded unit sizes for an exact
    integer; `recipe` declares each kind's bytes; `moments`: the optimizer's vectors (2 for Adam).
    """
    sizes = ranks if isinstance(ranks, (list, tuple)) else (ranks,)
    stages = stage.stages if isinstance(stage, Placement) else (stage,)

    def owned(kind, bytes_per_parameter):
        total = elements * bytes_per_parameter
        owners = prod(n for n, one in zip(sizes, stages, strict=True) if getattr(one, kind))
        return total // owners if total % owners == 0 else total / owners

    return {
        "parameters": owned("parameters", recipe.parameter.itemsize),
        "gradients": owned("gradients", recipe.gradient.itemsize),
        "optimizer": owned("optimizer", recipe.optimizer_bytes(moments)),
    }


def elements_per_axis(placement, elements, micro_batches, reduce_each):
    """[elements moved by all collectives along each axis] per step, if units are gathered twice.

    Paper, section 7, on each axis. Ranks of the same axis send (n-1)/n of this each.
    """
    twice = SimpleNamespace(gathers={"all": 2}, reduces={"all": 1})
    moved = [
        elements_moved(stage, twice, {"all": elements}, micro_batches, reduce_each)
        for stage in placement.stages
    ]
    return [sum(kinds.values()) for kinds in moved]


def elements_moved(stage, schedule, unit_sizes, micro_batches, reduce_each):
    """Elements moved by a rank's collectives per step: {"all_gather", "reduce_scatter"}.

    Paper, section 7. Of N ranks, each sends (N-1)/N of this. `unit_sizes`: {unit: unpadded size};
    `reduce_each`: stages with whole gradients reduce after every micro-batch too (`ordered`). If
    every unit is gathered twice, this is 2Ψ, 2Ψ, (M+1)Ψ, 3MΨ for stages 0-3; with `reduce_each`,
    (M+1)Ψ for all but stage 3.
    """
    total = sum(unit_sizes.values())
    walked = sum(size * schedule.gathers[name] for name, size in unit_sizes.items())
    reduced = sum(size * schedule.reduces[name] for name, size in unit_sizes.items())
    return {
        # of parameters: for each use, or once after the update; at stage 0, of the summed gradient
        "all_gather": walked * micro_batches if stage.parameters else total,
        "reduce_scatter": reduced * micro_batches if stage.gradients or reduce_each else reduced,
    }


def bytes_sent(along, sizes, itemsize):
    """{collective: bytes sent by one rank} per step, with padding.

    `along`: elements_moved of padded sizes along each axis, whose `sizes` are given inner first. An
    axis of n ranks cuts what the axes inside it left into n slices, and sends n - 1 of them.
    """
    return {
        kind: itemsize
        * sum(moved[kind] // prod(sizes[: i + 1]) * (sizes[i] - 1) for i, moved in enumerate(along))
        for kind in along[0]
    }
