"""The four ZeRO stages: each is a row of three booleans, and nothing else (paper, section 5)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Which kinds of training state are sharded, one slice per rank."""

    number: int
    optimizer: bool
    gradients: bool
    parameters: bool


STAGES = (
    Stage(0, optimizer=False, gradients=False, parameters=False),  # plain data parallelism
    Stage(1, optimizer=True, gradients=False, parameters=False),  # P_os
    Stage(2, optimizer=True, gradients=True, parameters=False),  # P_os+g
    Stage(3, optimizer=True, gradients=True, parameters=True),  # P_os+g+p
)


def state_bytes(stage, elements, ranks, recipe, moments=2):
    """Bytes of owned state per rank: {"parameters", "gradients", "optimizer"}.

    Paper, sections 3.1 and 5.1-5.3. `elements` is Ψ, or the sum of padded unit sizes for an exact
    integer; `recipe` declares each kind's bytes; `moments`: the optimizer's vectors (2 for Adam).
    """

    def owned(sharded, bytes_per_parameter):
        total = elements * bytes_per_parameter
        if not sharded:
            return total
        return total // ranks if total % ranks == 0 else total / ranks

    return {
        "parameters": owned(stage.parameters, recipe.parameter.itemsize),
        "gradients": owned(stage.gradients, recipe.gradient.itemsize),
        "optimizer": owned(stage.optimizer, recipe.optimizer_bytes(moments)),
    }


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
