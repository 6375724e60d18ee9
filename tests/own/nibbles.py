"""Your own communicators with 4-bit weights: a right one, and one whose mistake training survives.

mpirun -n 4 python -m zmpi.verify --comm tests/own/nibbles.py:Nibbles --tolerance 0.1
mpirun -n 4 python -m zmpi.verify --comm tests/own/nibbles.py:Swapped --tolerance 0.1
"""

import numpy as np

from zmpi.messages.comm import Communicator, Gather

BLOCK = 32  # weights that share a scale


class Unpacked(Gather):
    """The gather under way; what arrived becomes weights."""

    first, second = 4, 0  # where in a byte they are: bits to shift by

    def wait(self):
        _, everyone, full = self._vectors
        super().wait()
        bytes_, scales = everyone[..., : BLOCK // 2], everyone[..., BLOCK // 2 :]
        pairs = [bytes_ >> self.first & 15, bytes_ >> self.second & 15]
        steps = np.stack(pairs, axis=-1).reshape(*bytes_.shape[:-1], BLOCK).astype(np.float32) - 8
        weights = steps * scales.copy().view(np.float32)
        full.reshape(len(everyone), -1)[...] = weights.reshape(len(everyone), -1)[
            :, : len(full) // len(everyone)
        ]


class UnpackedSwapped(Unpacked):
    """The second weight of each byte in the place of the first."""

    first, second = 0, 4


class Nibbles(Communicator):
    """Gathers two weights per byte, a float32 scale per block: 7 steps on either side of zero."""

    block = BLOCK
    unpacked = Unpacked

    def declared_bytes(self, kind, layout, itemsize, whole):
        """Bytes that this rank sends per call, with padding. Vectors stored whole are exact."""
        if kind == "all_gather" and not whole:
            return (self.shards - 1) * -(-layout.shard_length // BLOCK) * (BLOCK // 2 + 4)
        return (self.shards - 1) * layout.shard_length * itemsize

    def all_gather(self, layout, shard, full):
        if np.shares_memory(shard, full):
            return super().all_gather(layout, shard, full)
        blocks = np.zeros((-(-len(shard) // BLOCK), BLOCK), np.float32)
        blocks.reshape(-1)[: len(shard)] = shard
        scales = np.abs(blocks).max(axis=1, keepdims=True) / 7 + 1e-30
        steps = (np.rint(blocks / scales) + 8).astype(np.uint8)
        message = np.concatenate(
            [steps[:, ::2] << 4 | steps[:, 1::2], scales.view(np.uint8)], axis=1
        )
        everyone = np.empty((self.shards, *message.shape), np.uint8)
        request = self.mpi.Iallgather(message, everyone)
        sent = (self.shards - 1) * message.nbytes
        self.ledger.book(
            "all_gather", layout.name, calls=1, elements=layout.elements, bytes_sent=sent
        )
        self.in_flight += 1
        return self.unpacked(self, layout.name, [request], (message, everyone, full))


class Swapped(Nibbles):
    """Nibbles with that mistake."""

    unpacked = UnpackedSwapped
