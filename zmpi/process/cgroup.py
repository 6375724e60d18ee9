"""The limits that a container or batch system sets through Linux's control groups.

Version 2 has one hierarchy of folders, version 1 one per controller. A group's limit also binds all
groups below it, so the smallest limit between a process's group and the root counts. A container
often sees its own group as the root, and a path in /proc that does not exist there.

    file                   version 2                  version 1
    cores: quota / period  cpu.max                    cpu.cfs_quota_us / cpu.cfs_period_us
    bytes allowed          memory.max                 memory.limit_in_bytes
    bytes in use           memory.current             memory.usage_in_bytes
      of these, droppable  memory.stat inactive_file  memory.stat total_inactive_file
"""

from math import inf
from pathlib import Path


def core_quota(process="self", system="/") -> float:
    """How many cores' time the process may use, inf if unlimited. `system`: root of /proc, /sys."""
    return min((_quota(group) for group in _groups("cpu", process, system)), default=inf)


def memory_max(system="/") -> float:
    """Bytes that this process and others in its groups may use together, inf if unlimited."""
    return min((limit for limit, _ in _memory(system)), default=inf)


def memory_left(system="/") -> float:
    """The bytes of `memory_limit` not in use."""
    return min((limit - used for limit, used in _memory(system) if limit < inf), default=inf)


def _groups(controller, process, system):
    """The folders of the process's groups, from its own up to the root."""
    mounted = Path(system, "sys/fs/cgroup")
    for line in _read(Path(system, "proc", str(process), "cgroup")).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            tops = [mounted, mounted / "unified"]
        elif controller in controllers.split(","):
            tops = [mounted / controllers] + [mounted / controller] * (controllers != controller)
        else:
            continue
        names = [name for name in path.split("/") if name not in ("", "..")]
        for top in tops:
            yield from (top.joinpath(*names[:depth]) for depth in range(len(names), -1, -1))


def _quota(group):
    """A group's limit, in cores."""
    words = _read(group / "cpu.max").split() or [
        _read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
    ]
    quota, period = [_number(word) for word in [*words, "100000"][:2]]
    return quota / period if 0 < period < inf else inf


def _memory(system):
    """(limit, bytes used) of each group."""
    for group in _groups("memory", "self", system):
        limit = _number(_read(group / "memory.max") or _read(group / "memory.limit_in_bytes"))
        used = _number(_read(group / "memory.current") or _read(group / "memory.usage_in_bytes"))
        stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
        files = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        yield limit, max(0, used - files) if used < inf else 0


def _number(text):
    """A limit; inf for "max", "-1" and ""."""
    return int(text) if text.strip().isdecimal() else inf


def _read(path):
    """A file's text; "" if it is missing or unreadable."""
    try:
        return path.read_text()
    except OSError:
        return ""
