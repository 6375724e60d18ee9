"""This process's memory in bytes: resident, in NumPy's arrays, and in CuPy's pool."""

import resource
import sys
import tracemalloc
from functools import lru_cache

import numpy as np


def peak_resident_bytes():
    """This process's peak resident memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def anonymous_bytes():
    """This process's resident anonymous memory, backed by no file (Linux; elsewhere 0)."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
    except (OSError, StopIteration):
        return 0


def traced_array_bytes():
    """Bytes of live NumPy arrays made since tracemalloc was started."""
    domain = np.lib.tracemalloc_domain
    return sum(trace.size for trace in tracemalloc.take_snapshot().traces if trace.domain == domain)


@lru_cache(maxsize=1)
def watched_pool(cupy):
    """Watch this thread's use of CuPy's pool from now on; returns the hook, which has the `peak`.

    The pool counts what is in use but not its peak; a hook sees every allocation. It misses blocks
    freed by other threads, so each reading restarts from the pool's own count.
    """

    class Watch(cupy.cuda.MemoryHook):
        name = "zmpi"

        def __init__(self):
            self.used = self._peak = cupy.get_default_memory_pool().used_bytes()

        def malloc_postprocess(self, **taken):
            self.used += taken["mem_size"]
            self._peak = max(self._peak, self.used)

        def free_postprocess(self, **freed):
            self.used -= freed["mem_size"]

        @property
        def peak(self):
            self.used = cupy.get_default_memory_pool().used_bytes()
            return max(self._peak, self.used)

        def restart(self):
            """Forget the peak so far."""
            self.used = self._peak = cupy.get_default_memory_pool().used_bytes()

    watch = Watch()
    watch.__enter__()
    return watch
