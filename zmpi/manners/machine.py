"""What a run ran on, in words."""

import os
import platform
import sys

import numpy as np

from zmpi.manners.launch import cores, launcher


def machine(world):
    """{"hosts", "cpu", "cores", "system", "python", "numpy", "mpi", "launcher", "threads", "device"}; all ranks call it."""
    hosts = world.share(platform.node(), "the machines' names")
    return {
        "hosts": len(set(hosts)),
        "cpu": cpu_name(),
        "cores": cores(os.environ)[1],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "mpi": " ".join(world.library.split()),
        "launcher": launcher(os.environ),
        "threads": world.threads,
        "device": world.device.name,
    }


def cpu_name():
    """The processor's name, as well as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next(
                line.partition(":")[2].strip() for line in lines if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or sys.platform
