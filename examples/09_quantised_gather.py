"""Your own communicator: stage 3 gathers 8-bit weights, with a float32 scale per block of 64.

Run:        mpirun -n 4 python examples/09_quantised_gather.py
Last line:  09 ok: 27% of the bytes, and a loss within 1% after 200 steps

To see which promises it gives up:
mpirun -n 4 python -m zmpi.verify --comm examples/09_quantised_gather.py:Quantised --tolerance 0.02
"""

import numpy as np

from zmpi.messages.comm import Communicator, Gather

BLOCK = 64  # weights that share a scale


class Quantised(Communicator):
    """All-gathers int8 weights and scales. Shards stay float32, so errors do not add up."""

    block = BLOCK  # zmpi.verify measures errors relative to the largest weight of a block

    def declared_bytes(self, kind, layout, itemsize, whole):
        """Bytes that this rank sends per call. `whole`: the stage stores the whole vector."""
        if kind == "all_gather" and not whole:
            return (self.shards - 1) * -(-layout.shard_length // BLOCK) * (BLOCK + 4)
        return (self.shards - 1) * layout.shard_length * itemsize

    def all_gather(self, layout, shard, full):
        """Round to 255 steps per block. A vector that the stage stores whole is sent unchanged."""
        if np.shares_memory(shard, full):
            return super().all_gather(layout, shard, full)
        blocks = np.zeros((-(-len(shard) // BLOCK), BLOCK), np.float32)
        blocks.reshape(-1)[: len(shard)] = shard
        scales = np.abs(blocks).max(axis=1, keepdims=True) / 127 + 1e-30
        message = np.concatenate(
            [np.rint(blocks / scales).astype(np.int8).view(np.uint8), scales.view(np.uint8)], axis=1
        )
        everyone = np.empty((self.shards, *message.shape), np.uint8)
        request = self.mpi.Iallgather(message, everyone)
        sent = (self.shards - 1) * message.nbytes
        self.ledger.book(
            "all_gather", layout.name, calls=1, elements=layout.elements, bytes_sent=sent
        )
        self.in_flight += 1
        return Dequantise(self, layout.name, [request], (message, everyone, full))


class Dequantise(Gather):
    """The gather under way, which turns what arrived into weights."""

    def wait(self):
        _, everyone, full = self._vectors
        super().wait()
        weights = everyone[..., :BLOCK].view(np.int8) * everyone[..., BLOCK:].copy().view(
            np.float32
        )
        shards = len(everyone)
        full.reshape(shards, -1)[...] = weights.reshape(shards, -1)[:, : len(full) // shards]


def main():
    """The same run with float32 and with 8-bit gathers: bytes and losses side by side."""
    from models import GPT
    from zmpi import AdamW, World, ZeRO
    from zmpi.text.data import Batches, load_text

    class QuantisedZeRO(ZeRO):
        make_communicator = Quantised

    world = World(device="cpu")
    batches = Batches(
        load_text("builtin", 32, 256), world.rank, world.size, micro_batch=4, last_only=False
    )
    sent, losses = [], []
    # At lr 3e-3 loss spikes can put two runs with different rounding 1.6% apart; 1e-3 has none.
    for engine in (ZeRO, QuantisedZeRO):
        zero = engine(GPT(2, 48, 4, 32, 256), world, 3, AdamW(lr=1e-3, warmup=20, clip=1.0), seed=0)
        losses.append([zero.train_step(batches.of_step(0, step, 1)) for step in range(1, 201)])
        sent.append(zero.ledger["comm"]["all_gather"]["bytes_sent"])
        if world.rank == 0:
            print(
                f"{engine.__name__}: {sent[-1]:,} bytes in a step's gathers;"
                f" loss {losses[-1][0]:.3f} -> {losses[-1][-1]:.3f}"
            )
    plain, quantised = (np.mean(line[-20:]) for line in losses)
    off = abs(quantised / plain - 1)
    assert off < 0.01, off
    if world.rank == 0:
        print(
            f"predicted bytes: (1 + 4/{BLOCK}) / 4 = {(1 + 4 / BLOCK) / 4:.1%};"
            f" loss off by {off:.2%}"
        )
        print(f"09 ok: {sent[1] / sent[0]:.0%} of the bytes, and a loss within 1% after 200 steps")


if __name__ == "__main__":
    main()
