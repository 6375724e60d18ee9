"""Does a step fit into the memory that a container lends? Where it does not, Linux ends a process without a word."""

import os

from zmpi.cost.dryrun import CountedWorld, DryRun
from zmpi.manners.launch import ranks_on_this_node
from zmpi.manners.machine import node_memory
from zmpi.manners.own import Place
from zmpi.manners.table import in_bytes
from zmpi.memory import anonymous_bytes


def refuse_beyond_limit(args, model, world, optimizer, policy):
    """Raise ValueError where a step of all ranks of this node takes more than its memory limit, as a dry run counts it.

    Where the machine has less than the limit nothing is counted, nor with a class of the user's own.
    """
    limit, bound = node_memory()
    own = any(isinstance(value, Place) for value in (args.model, args.optimizer, args.comm))
    if own or world.device.name != "cpu" or "limit" not in bound:
        return
    counted = CountedWorld(world.size, world.rank, world.reduction)
    run = DryRun(model, counted, args.stage, optimizer, policy)
    peak = run.count_step(args.micro_batch, args.accumulate).highest().total
    ranks, process = ranks_on_this_node(os.environ), anonymous_bytes()
    if ranks * (peak + process) > limit:
        each = f", on each of {ranks} ranks" if ranks > 1 else ""
        raise ValueError(
            f"--width: a step's arrays would take {in_bytes(peak)}, and Python takes"
            f" {in_bytes(process)}{each}; {bound} {in_bytes(limit)} (see zmpi.plan)"
        )
