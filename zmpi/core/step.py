"""What the ranks tell each other in a step: as it opens, and what it came to."""

import signal
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zmpi.process.errors import Agreed, UsageError


@dataclass(frozen=True)
class Step:
    """What the last training step was: the same numbers on every rank."""

    loss: float  # mean over the counted targets of all ranks, before the update
    grad_norm: float  # of the gradient of that mean, unscaled and before clipping
    lr: float
    tokens: int  # counted targets of all ranks
    micro_batches: int  # of each rank
    loss_scale: float  # the scale of this step
    skipped: bool  # whether 16-bit gradients overflowed, and nothing was updated


class Stopped(Agreed):
    """The signal that ends the run, agreed by all ranks before a step: time to save and leave."""

    def __init__(self, number):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.status = 143 if number == signal.SIGTERM else 0


class Opening(NamedTuple):
    """What a rank tells the others as a step opens; of all ranks, a column each, in rank order."""

    micro_batches: int  # 0 if one of them is empty
    counted: int  # targets
    too_large: int  # weights that the last update took beyond 16 bits
    stop: int  # the signal that asked this rank to stop, or 0
    started: int  # collectives on the lane of vectors, see World.settle
    refused: int  # whether the model refuses one of the micro-batches

    @classmethod
    def of(cls, micro_batches, *rest):
        """This rank's, from [(inputs, targets), ...]; `rest` are the other fields."""
        number = len(micro_batches) * all(len(targets) for _, targets in micro_batches)
        counted = sum(int(np.count_nonzero(targets >= 0)) for _, targets in micro_batches)
        return cls(number, counted, *rest)

    @classmethod
    def columns(cls, everyone):
        """All ranks', from Communicator.gather_scalars."""
        return cls(*everyone.T.astype(np.int64))

    def check_numbers(self):
        """Raises UsageError where ranks have different numbers of micro-batches, or an empty one."""
        numbers = self.micro_batches.tolist()
        if len(set(numbers)) > 1 or not numbers[0]:
            raise UsageError(
                f"micro-batches: every rank needs the same number, none empty; got {numbers}"
            )

    def check_counted(self):
        """The counted targets of all ranks. Raises UsageError where there are none."""
        counted = int(sum(self.counted))
        if not counted:
            raise UsageError("targets: none is counted (all are below 0) on any rank")
        return counted
