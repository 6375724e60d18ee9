"""Watch one training step on four ranks, A to D: gather a unit, use it, free it, reduce, update.

Run:        mpirun -n 4 python examples/02_four_ranks.py
Last line:  02 ok: each rank kept 1/4 of the state, and no full vector is left
"""

import numpy as np

from models import MLP
from zmpi import SGD, Policy, World, ZeRO
from zmpi.core.unit import Unit
from zmpi.messages.comm import Communicator

NAMES = "ABCD"


def tell(line):
    """Print a line on rank 0 only: all ranks do the same thing at the same time."""
    if world.rank == 0:
        print(line, flush=True)


def owners(unit):
    """A picture of a unit's shards, such as [A|B|C|D]."""
    return "[" + "|".join(NAMES[: world.size]) + f"] of {unit}"


class Talking(Communicator):
    """A communicator that prints a line for each collective."""

    def all_gather(self, layout, shard, full):
        n = layout.elements
        tell(
            f"  gather  {owners(layout.name)}: {n} weights, {layout.shard_length} sent by each rank"
        )
        return super().all_gather(layout, shard, full)

    def reduce_scatter(self, layout, full, out, fresh):
        n = layout.elements
        tell(f"  reduce  {owners(layout.name)}: {n} gradients, {layout.shard_length} sums per rank")
        super().reduce_scatter(layout, full, out, fresh)


class TalkingUnit(Unit):
    """A unit that prints when its full vector is freed and when its shards are updated."""

    def free(self):
        tell(f"  free    {self.layout.name}: only the shards are left")
        super().free()

    def update(self, *how):
        tell(f"  update  {owners(self.layout.name)}: each rank its own shard, and no other")
        super().update(*how)


class TalkingZeRO(ZeRO):
    """An engine that prints when a layer is used."""

    make_communicator = Talking
    make_unit = TalkingUnit

    def gather(self, visit):
        w = super().gather(visit)
        passes = (
            "forward and backward" if visit.turn else "forward" if visit.forward else "backward"
        )
        tell(f"  use     {visit.unit}: {passes}")
        return w


world = World(device="cpu")

zero = TalkingZeRO(
    MLP(layers=1, width=8, context=4, vocab=16),
    world,
    stage=3,
    optimizer=SGD(lr=0.1),
    policy=Policy(prefetch=0),
)
# each rank has its own five windows
inputs = np.random.default_rng(world.rank).integers(0, 16, (5, 4))
tell(f"rank A stores the first shard of every unit, B the second, ...\n\n{zero.schedule}\n")
zero.train_step([(inputs, inputs[:, 0])])

owned = sum(sum(unit.owned_bytes().values()) for unit in zero.units.values())
# weights and gradients, float32
whole = sum(2 * unit.layout.padded * 4 for unit in zero.units.values())
gathered = zero.ledger["comm"]["all_gather"]
tell(
    f"\nstored: {owned:,} bytes per rank, {world.size * owned:,} in all;"
    f" without sharding {whole:,} per rank, {world.size * whole:,} in all"
)
tell(f"sent: {gathered['bytes_sent']:,} bytes per rank in {gathered['calls']} gathers")
assert owned * world.size == whole and zero.ledger.alive["full"] == 0
tell(f"02 ok: each rank kept 1/{world.size} of the state, and no full vector is left")
