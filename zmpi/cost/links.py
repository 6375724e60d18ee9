"""How long the collectives of training take on this MPI, by the bytes sent; results are checked."""

from statistics import median
from time import perf_counter

import numpy as np

from zmpi.core.layout import Layout
from zmpi.messages.comm import Communicator
from zmpi.messages.ledger import Ledger

VECTOR_ELEMENTS = (1 << 8, 1 << 14, 1 << 18, 1 << 20, 1 << 22)  # float32: 1 KiB to 16 MiB
ROUNDS = 3, 7  # at least and at most, for a median
ENOUGH_S = 0.5  # seconds for the rounds of one size
REDUCTIONS = ("mpi", "ordered")
WHOLE, WITHIN, BETWEEN = "all ranks", "within node 0", "between nodes"


def parts_of(world, nodes):
    """{name: World}: all ranks, and apart those of each node and the first rank of every node.

    Collective. `nodes` is World.nodes(). With one node, or one rank per node, there is one part. A
    rank that has no place in a part gets a world of its own, so that all ranks wait as often.
    """
    parts = {WHOLE: world}
    if 1 < len(set(nodes)) < world.size:
        first = nodes.index(nodes[world.rank]) == world.rank
        parts[WITHIN] = world.part(world.mpi.Split(nodes[world.rank], world.rank))
        parts[BETWEEN] = world.part(world.mpi.Split(0 if first else 1 + world.rank, world.rank))
    return parts


def measure_links(world):
    """({collective: [(bytes that a rank sends in a call, seconds)]}, what was wrong or None).

    Collective. Vectors of VECTOR_ELEMENTS, in order; (0, seconds) in a world of one.
    """
    links, wrong = {"all_gather": [], **{f"reduce_scatter_{how}": [] for how in REDUCTIONS}}, None
    for elements in VECTOR_ELEMENTS:
        sent, seconds, fault = _calls(world, elements)
        for name, value in seconds.items():
            links[name].append((sent, value))
        wrong = wrong or fault
    return links, wrong


def _calls(world, elements):
    """(bytes sent, {collective: seconds}, what was wrong or None) for vectors of this length."""
    layout, wrong = Layout("probe", "", {"x": (elements,)}, world.size), None
    comms = [Communicator(world, Ledger(), reduction) for reduction in REDUCTIONS]
    for comm in comms:
        comm.reserve([layout], np.float32)
    put, get = world.device.put, world.device.get
    shard = put(np.full(layout.shard_length, world.rank + 1, np.float32))
    full = put(np.zeros(layout.padded, np.float32))
    out = put(np.zeros(layout.shard_length, np.float32))
    gather = _seconds(world, lambda: comms[0].all_gather(layout, shard, full).wait())
    seconds = {"all_gather": gather}
    expected = np.repeat(np.arange(1, world.size + 1, dtype=np.float32), layout.shard_length)
    if not np.array_equal(get(full), expected):
        wrong = f"wrong result of all-gather, {elements:,} elements, rank {world.rank}"
    full.fill(world.rank + 1)
    for comm in comms:
        seconds[f"reduce_scatter_{comm.reduction}"] = _seconds(
            world, lambda comm=comm: comm.reduce_scatter(layout, full, out, True)
        )
        if not np.all(get(out) == expected[:: layout.shard_length].sum()):
            kind = f"reduce-scatter ({comm.reduction})"
            wrong = f"wrong result of {kind}, {elements:,} elements, rank {world.rank}"
    return (world.size - 1) * shard.nbytes, seconds, wrong


def _seconds(world, call):
    """Median seconds of a call, after one that is not counted; rank 0 says how often."""
    first = _timed(world, call)
    least, most = ROUNDS
    rounds = max(least, min(most, int(ENOUGH_S / first)))
    rounds = world.share(rounds, "the doctor's figures")[0]
    return median(_timed(world, call) for _ in range(rounds))


def _timed(world, call):
    """Seconds of a call that all ranks begin together."""
    with world.guard.waiting("the doctor's meeting"):
        world.mpi.Barrier()
    began = perf_counter()
    call()
    return perf_counter() - began
