"""The four ZeRO stages: each is a row of three booleans, and nothing else (paper, section 5)."""

from dataclasses import dataclass

from zmpi.numbers.domains import Domain


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
STAGE = Domain(highest=len(STAGES) - 1, whole=True, words="0, 1, 2 or 3")


@dataclass(frozen=True)
class Placement:
    """One Stage for each axis of the world, inner first; on a flat world one alone."""

    stages: tuple

    @property
    def number(self):
        """The stage's number on a flat world, else as in "3,1"."""
        numbers = [stage.number for stage in self.stages]
        return numbers[0] if len(numbers) == 1 else ",".join(map(str, numbers))

    optimizer = property(lambda self: self.stages[0].optimizer)
    gradients = property(lambda self: self.stages[0].gradients)
    parameters = property(lambda self: self.stages[0].parameters)

    def rung(self, kind):
        """How many axes shard the kind: 0 whole, 1 in the group's slices, 2 in each rank's."""
        return sum(getattr(stage, kind) for stage in self.stages)


def placement(asked, axes=1):
    """The Placement of one stage 0-3 for all axes, or of one for each, inner first, as in (3, 1).

    Raises ValueError for anything else, and where an axis shards what the one inside does not.
    """
    numbers = asked if isinstance(asked, (list, tuple)) else [asked]
    numbers = [STAGE.of("--stage", number) for number in numbers]
    said = ",".join(map(str, numbers))
    if len(numbers) > axes:
        needs = "a --group of 2 ranks or more" if axes == 1 else "one stage inside and one outside"
        raise ValueError(f"--stage: {said} needs {needs}")
    if numbers != sorted(numbers, reverse=True):
        raise ValueError(f"--stage: expected a stage outside at most that inside, got {said}")
    return Placement(tuple(STAGES[number] for number in (numbers * axes)[:axes]))
