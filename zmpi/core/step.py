"""What the ranks exchange as a step opens, the step's result, and a step that fails."""

import signal
from dataclasses import dataclass
from functools import wraps
from typing import NamedTuple

import numpy as np

from zmpi.process.errors import Agreed, UsageError


@dataclass(frozen=True)
class Step:
    """The result of a training step: the same numbers on every rank."""

    loss: float  # mean over the counted targets of all ranks, before the update
    grad_norm: float  # of the gradient of that mean, unscaled and before clipping
    lr: float
    tokens: int  # counted targets of all ranks
    micro_batches: int  # of each rank
    loss_scale: float  # in this step
    skipped: bool  # 16-bit gradients overflowed, so nothing was updated


class Stopped(Agreed):
    """A signal ends the run; all ranks agreed on it before a step, so there is time to save."""

    def __init__(self, number):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.status = 143 if number == signal.SIGTERM else 0


class Opening(NamedTuple):
    """What a rank sends the others as a step opens; `columns` has each field of all ranks."""

    micro_batches: int  # 0 if one of them is empty
    counted: int  # targets
    too_large: int  # weights that the last update made too large for 16 bits
    stop: int  # the signal that asked this rank to stop, or 0
    started: int  # collectives on the vectors' lane, see World.settle
    refused: int  # whether the model's check fails for a micro-batch

    @classmethod
    def of(cls, micro_batches, *rest):
        """This rank's Opening, from [(inputs, targets), ...]; `rest`: the other fields."""
        number = len(micro_batches) * all(len(targets) for _, targets in micro_batches)
        counted = sum(int(np.count_nonzero(targets >= 0)) for _, targets in micro_batches)
        return cls(number, counted, *rest)

    @classmethod
    def columns(cls, everyone):
        """All ranks' Openings as columns in rank order, from Communicator.gather_scalars."""
        return cls(*everyone.T.astype(np.int64))

    def check_numbers(self):
        """Raise UsageError if ranks have different numbers of micro-batches, or one is empty."""
        numbers = self.micro_batches.tolist()
        if len(set(numbers)) > 1 or not numbers[0]:
            raise UsageError(
                f"micro-batches: expected the same number on every rank, none empty; got {numbers}"
            )

    def check_counted(self):
        """The counted targets of all ranks; UsageError if there are none."""
        counted = int(sum(self.counted))
        if not counted:
            raise UsageError("targets: expected one of at least 0, got none on any rank")
        return counted


def drop_on_error(walk):
    """Decorate a walk through the layers: an exception drops everything not owned."""

    @wraps(walk)
    def guarded(self, *arguments):
        try:
            return walk(self, *arguments)
        except BaseException:
            for unit in self.units.values():
                unit.drop()
            self.comm.drop()
            raise

    return guarded
