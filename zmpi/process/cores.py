"""How a node's ranks share its cores.

Used before MPI and NumPy load: both read the environment once.
"""

import os
from math import inf

from zmpi.process.cgroup import core_quota
from zmpi.process.launch import ranks_on_this_node

SYSTEM = "/"  # the root of /proc and /sys


def usable_cores(environ) -> tuple[int, int]:
    """(cores this process may use, cores all ranks of this node may use together).

    The second is what the parent, the launcher's process on this node, may use: less than the whole
    machine in a container or under Slurm, more than the first if the launcher pins each rank.
    """
    own, together = _whole(core_quota("self", SYSTEM)), _whole(core_quota(os.getppid(), SYSTEM))
    if not hasattr(os, "sched_getaffinity"):
        bound = parents = os.cpu_count() or 1
    else:
        bound = len(os.sched_getaffinity(0))
        try:
            parents = max(bound, len(os.sched_getaffinity(os.getppid())))
        except OSError:  # the parent is gone, or in another namespace
            parents = bound
    lent = environ.get("SLURM_CPUS_ON_NODE", "")
    lent = int(lent) if lent.isdecimal() and int(lent) else inf
    return min(bound, own), min(parents, together, lent)


def share_of_cores(environ) -> int:
    """A rank's share of its node's cores, at least 1."""
    own, together = usable_cores(environ)
    return max(1, min(own, together // ranks_on_this_node(environ)))


def wait_politely(environ) -> bool:
    """On a node with more ranks than cores, let MPICH's waiting ranks yield; returns whether it is.

    MPI waits in a busy loop, on a core that the awaited rank may need. A value you set is kept.
    """
    crowded = ranks_on_this_node(environ) > usable_cores(environ)[1]
    if crowded:
        environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")  # read when MPI starts
    return crowded


def _whole(quota):
    """Whole cores: a thread with part of a core would hold up the others."""
    return max(1, int(quota)) if quota < inf else inf
