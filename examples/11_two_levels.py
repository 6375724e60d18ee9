"""Two nodes of two ranks: a stage within each node, another between them.

Run:        mpirun -n 4 python examples/11_two_levels.py
Last line:  11 ok: same losses; between the nodes 3,1 moves 3,502,080 bytes, 3,3 moves 5,253,120

Links between nodes are slow. Stage 3,1 gathers parameters within a node only (each node has all of
them), and still keeps one shard of the optimizer state per rank.
"""

from models import GPT
from zmpi import World, ZeRO
from zmpi.text.data import Batches, load_text

world = World(device="cpu", group=2)  # on real nodes: group="node"
model = GPT(layers=2, width=128, heads=4, context=64, vocab=256)
text = load_text("builtin", model.context, model.vocab, world.rank, world.size)
batches = Batches.on(world, text, micro_batch=2, last_only=False)


def tell(line):
    if world.rank == 0:
        print(line, flush=True)


def slices(unit, owned):
    """Which elements of a unit this rank stores, as in "0 - 1,023"."""
    part = unit.cut.slices[owned.rung]
    return f"{part.start:,} - {part.stop - 1:,}"


between, losses = {}, {}
for stage in ((0, 0), (3, 0), (3, 1), (3, 3)):
    zero = ZeRO(model, world, stage=stage)
    losses[stage] = zero.train_step(batches.of_step(seed=0, step=1, accumulate=1))
    comm = zero.ledger["comm"].values()
    across = sum(kind["bytes_between"] - kind["padding_between"] for kind in comm)
    sent = sum(kind["bytes_sent"] - kind["padding_bytes"] for kind in zero.ledger["comm"].values())
    sent -= zero.ledger["comm"]["all_reduce"]["bytes_sent"]  # scalars
    between[stage] = sum(world.share(across))
    within = sum(world.share(sent - across))
    tell(
        f"stage {zero.stage.number}: {within:,} bytes within the nodes, {between[stage]:,} between"
    )
    if stage == (3, 1):
        unit = zero.units["h.0"]
        kinds = unit.parameters, next(iter(unit.moments.values()))
        for rank, (weights, moments) in enumerate(world.share([slices(unit, k) for k in kinds])):
            tell(f"  node {rank // 2}, rank {rank}: weights {weights}; optimizer state {moments}")

assert len(set(losses.values())) == 1
tell(
    f"11 ok: same losses; between the nodes 3,1 moves {between[3, 1]:,} bytes,"
    f" 3,3 moves {between[3, 3]:,}"
)
