"""The four ZeRO stages: a stage is a row of three booleans, and nothing else (paper, section 5)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Which kinds of training state are sharded: kept apart, one slice per rank."""

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
    """Bytes of owned state per rank, by kind: {"parameters", "gradients", "optimizer"} (paper, sections 3.1 and 5.1-5.3).

    `elements` is Ψ, or the sum of padded unit sizes, where the result is an exact integer; `recipe` declares the bytes
    of each kind; `moments` is the number of float32 vectors that the optimizer keeps (2 for Adam).
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
    """Elements that a rank's collectives carry in one step: {"all_gather", "reduce_scatter"} (paper, section 7).

    In a world of N ranks a rank sends (N-1)/N of each. `unit_sizes` maps a unit to its unpadded size; `reduce_each` says
    that stages which keep gradients whole reduce after every micro-batch too (`ordered`). For a model whose units
    are each gathered twice this is 2Ψ, 2Ψ, (M+1)Ψ, 3MΨ; with `reduce_each` (M+1)Ψ for all but stage 3.
    """
    total = sum(unit_sizes.values())
    walked = sum(size * schedule.gathers[name] for name, size in unit_sizes.items())
    reduced = sum(size * schedule.reduces[name] for name, size in unit_sizes.items())
    return {
        # Parameters are put together for each use; else once, after the update; else (stage 0) it is the summed gradient.
        "all_gather": walked * micro_batches if stage.parameters else total,
        "reduce_scatter": reduced * micro_batches if stage.gradients or reduce_each else reduced,
    }
