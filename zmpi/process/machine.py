"""Describes the machine a run is on, and how much memory it may use."""

import os
import platform
import sys

import numpy as np

from zmpi.process.cgroup import memory_left, memory_max
from zmpi.process.cores import usable_cores
from zmpi.process.launch import launcher


def machine_facts(world):
    """{"hosts", "cpu", "usable_cores", "system", "python", "numpy", "mpi", ...}. Collective."""
    hosts = world.share(platform.node(), "the machines' names")
    return {
        "hosts": len(set(hosts)),
        "cpu": cpu_name(),
        "cores": usable_cores(os.environ)[1],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "mpi": " ".join(world.library.split()),
        "launcher": launcher(os.environ),
        "threads": world.threads,
        "device": world.device.name,
    }


def cpu_name():
    """The processor's name, as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next(
                line.partition(":")[2].strip() for line in lines if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or sys.platform


def node_memory(system="/"):
    """(bytes that this node's processes may use together, what sets that limit)."""
    physical, limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_max(system)
    return (limit, "the memory limit is") if limit < physical else (physical, "this machine has")


def free_node_memory(system="/"):
    """Bytes still available to this node's processes together; None if the system does not say."""
    try:
        with open(os.path.join(system, "proc/meminfo"), encoding="ascii") as lines:
            free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    return min(free << 10, memory_left(system))
