"""A communicator of your own: stage 3 gathers weights as float16. One class, one flag:

mpirun -n 4 python -m zmpi.train --comm tests/own/half.py:Half
mpirun -n 4 python -m zmpi.verify --comm tests/own/half.py:Half --tolerance 0.01
"""

import numpy as np

from zmpi.messages.comm import Communicator, Gather


class Half(Communicator):
    """Half the bytes per gather, weights rounded to 11 bits; each owner keeps a float32 shard."""

    def declared_bytes(self, kind, layout, itemsize, whole):
        """Bytes that this rank sends in one call. `whole`: the stage stores the whole vector."""
        narrow = kind == "all_gather" and not whole
        return (self.shards - 1) * layout.shard_length * (2 if narrow else itemsize)

    def all_gather(self, layout, shard, full):
        if np.shares_memory(shard, full):  # a vector that is kept whole is sent as it is
            return super().all_gather(layout, shard, full)
        mine, everyone = shard.astype(np.float16), np.empty(layout.padded, np.float16)
        request = self.mpi.Iallgather(mine.view(np.uint16), everyone.view(np.uint16))
        sent = (self.shards - 1) * mine.nbytes
        self.ledger.book(
            "all_gather", layout.name, calls=1, elements=layout.elements, bytes_sent=sent
        )
        self.in_flight += 1
        return Widen(self, layout.name, [request], (mine, everyone, full))


class Widen(Gather):
    """The gather under way; what arrived becomes float32."""

    def wait(self):
        _, everyone, full = self._vectors
        super().wait()
        full[...] = everyone
