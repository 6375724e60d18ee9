"""Task 8: a communicator of your own: 8-bit weights, plugged into zmpi. (About 25 lines are
missing.)

Half of stage 3's messages are gathered weights, and a forward does not need all their 32 bits.
Blocks of BLOCK weights share a scale: the largest magnitude of the block is 127 steps, and every
weight is rounded to the nearest step. What travels is one byte a weight and four bytes (a float32
scale) a block. The owner's shard stays float32: only what the others see of it is rounded, so
errors do not add up over steps.

This time you write a part of zmpi: `all_gather` of its Communicator. Read zmpi/messages/comm.py
(the classes' docstrings, all_gather, and Gather) first. Then your class runs in zmpi itself:
    mpirun -n 4 python -m zmpi.train --steps 20 --comm t8_own_communicator.py:Bytes
    mpirun -n 4 python -m zmpi.verify --comm t8_own_communicator.py:Bytes --tolerance 0.02
"""

import numpy as np

from zmpi.messages.comm import Communicator, Gather

BLOCK = 32  # weights that share a scale


def quantise(vector):
    """A message: one flat uint8 array, of (BLOCK + 4) bytes for each block.

    vector   (n,) float32; its last block is filled up with zeros; it must not be changed
    returns  for each block BLOCK bytes, the int8 steps (-127 to 127) of its weights, then 4 bytes,
             its float32 scale (the weight of one step). A block of zeros comes back as zeros.
    """
    raise NotImplementedError


def dequantise(message, n):
    """The weights of a message of n weights: (n,) float32, each at most half a step from what it
    was.
    """
    raise NotImplementedError


class Bytes(Communicator):
    """zmpi's communicator, whose all-gathers carry messages of `quantise`."""

    block = BLOCK  # for zmpi.verify: the weights that share a scale

    def declared_bytes(self, kind, layout, itemsize, whole):
        """Bytes that a rank sends in one call; `whole`: of a vector that the stage keeps whole."""
        raise NotImplementedError

    def all_gather(self, layout, shard, full):
        """As Communicator's: starts putting `full` together and returns a Gather, whose wait() ends
        it.

        Where `shard` is a slice of `full` (stages 1 and 2, which keep whole weights) the message
        must be exact: leave it to super(). Else start one Iallgather of messages on self.mpi, book
        it as

            self.ledger.book("all_gather", layout.name, calls=1, elements=layout.elements,
            bytes_sent=...)

        add 1 to self.in_flight, and return Arriving(self, layout.name, [request], vectors), where
        `vectors` is a tuple of all arrays that must stay alive until MPI is done; wait() finds it
        in self._vectors.
        """
        raise NotImplementedError


class Arriving(Gather):
    """The gather under way."""

    def wait(self):
        """Wait for MPI (super().wait(), after which self._vectors is None), then fill `full` with
        the weights.
        """
        raise NotImplementedError
