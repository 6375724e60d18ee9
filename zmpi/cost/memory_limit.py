"""Refuses a step that exceeds the container's memory limit: Linux would kill it silently."""

import os

from zmpi.cost.dryrun import CountedWorld, DryRun
from zmpi.messages.memory import anonymous_bytes
from zmpi.process.launch import ranks_on_this_node
from zmpi.process.machine import node_memory
from zmpi.process.table import in_bytes


def refuse_beyond_limit(model, world, stage, optimizer, policy, batch):
    """Raise ValueError if a step of all this node's ranks exceeds its memory limit, by a dry run.

    `batch`: (sequences per micro-batch, micro-batches per step). Does nothing if the machine has
    less memory than the limit.
    """
    limit, bound = node_memory()
    if world.device.name != "cpu" or "limit" not in bound:
        return
    counted = CountedWorld(world.size, world.rank, world.reduction, world.group)
    run = DryRun(model, counted, stage, optimizer, policy)
    peak = run.count_step(*batch).highest().total
    ranks, process = ranks_on_this_node(os.environ), anonymous_bytes()
    if ranks * (peak + process) > limit:
        each = f", on each of {ranks} ranks" if ranks > 1 else ""
        raise ValueError(
            f"--width: a step's arrays would take {in_bytes(peak)}, and Python takes"
            f" {in_bytes(process)}{each}; {bound} {in_bytes(limit)} (see zmpi.plan)"
        )
