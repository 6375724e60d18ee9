"""A container's limits, from folders that look like /proc and /sys/fs/cgroup: cores and memory."""

from math import inf
from types import SimpleNamespace

import pytest

from models import MLP
from zmpi import SGD, Policy
from zmpi.cost import memory_limit as limit_of_a_step
from zmpi.process import cores, machine
from zmpi.process.cgroup import core_quota, memory_left, memory_max

MEBI = 1 << 20
NO_LIMIT = str(9223372036854771712)  # how version 1 writes it


def system(folder, processes, groups):
    """A system's root: {process: text of its cgroup file} and {group's folder: {file: text}}."""
    for process, text in processes.items():
        (folder / "proc" / str(process)).mkdir(parents=True)
        (folder / "proc" / str(process) / "cgroup").write_text(text)
    for group, files in groups.items():
        path = folder / "sys/fs/cgroup" / group
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name).write_text(f"{text}\n")
    return folder


def one(folder, text, groups):
    return system(folder, {"self": text}, groups)


V1 = "4:memory:/job/step\n1:cpu,cpuacct:/job/step\n0::/\n"


@pytest.mark.parametrize(
    ("text", "groups", "quota"),
    [
        ("0::/\n", {"": {"cpu.max": "100000 100000"}}, 1),  # a container that is its own root
        ("0::/\n", {"": {"cpu.max": "max 100000"}}, inf),
        ("0::/\n", {"": {"cpu.max": "50000"}}, 0.5),  # the period is 100,000 µs
        ("0::/\n", {}, inf),  # the machine's own root has no such file
        ("0::/a/b\n", {"a": {"cpu.max": "300000 100000"}, "a/b": {"cpu.max": "max 100000"}}, 3),
        ("0::/../other\n", {"": {"cpu.max": "200000 100000"}}, 2),  # outside its name space
        (V1, {"cpu,cpuacct/job": {"cpu.cfs_quota_us": 150000, "cpu.cfs_period_us": 50000}}, 3),
        (V1, {"cpu/job/step": {"cpu.cfs_quota_us": 100000, "cpu.cfs_period_us": 100000}}, 1),
        (V1, {"cpu/job/step": {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000}}, inf),
        # Docker with version 1: the path is the host's, the mount is the container's own group
        (V1, {"cpu": {"cpu.cfs_quota_us": 100000, "cpu.cfs_period_us": 100000}}, 1),
        ("", {}, inf),
    ],
)
def test_the_quota_of_cores_is_the_smallest_on_the_way_to_the_root(tmp_path, text, groups, quota):
    assert core_quota(system=one(tmp_path, text, groups)) == quota


@pytest.mark.parametrize(
    ("text", "groups", "limit", "left"),
    [
        ("0::/\n", {"": {"memory.max": 400 * MEBI, "memory.current": 150 * MEBI}}, 400, 250),
        ("0::/\n", {"": {"memory.max": "max", "memory.current": 150 * MEBI}}, inf, inf),
        (
            "0::/a/b\n",
            {
                "a": {
                    "memory.max": 400 * MEBI,
                    "memory.current": 390 * MEBI,
                    "memory.stat": f"anon 7\ninactive_file {300 * MEBI}",  # droppable
                },
                "a/b": {"memory.max": 900 * MEBI, "memory.current": 10 * MEBI},
            },
            400,
            310,
        ),
        (
            V1,
            {
                "memory/job": {
                    "memory.limit_in_bytes": 400 * MEBI,
                    "memory.usage_in_bytes": 300 * MEBI,
                    "memory.stat": f"inactive_file 0\ntotal_inactive_file {200 * MEBI}",
                },
                "memory/job/step": {"memory.limit_in_bytes": NO_LIMIT},
            },
            400,
            300,
        ),
        ("", {}, inf, inf),
    ],
)
def test_the_limit_of_memory_is_the_smallest_on_the_way_to_the_root(
    tmp_path, text, groups, limit, left
):
    one(tmp_path, text, groups)
    assert memory_max(tmp_path) == limit * MEBI
    assert memory_left(tmp_path) == left * MEBI


@pytest.mark.parametrize(("quota", "share"), [(1, 1), (1.9, 1), (0.5, 1), (3, 1), (4, 2), (8, 2)])
def test_the_ranks_of_a_container_share_its_quota(tmp_path, monkeypatch, quota, share):
    """2 ranks on 4 cores. A fraction of a core is no thread's: it would delay the others."""
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: set(range(4)), raising=False)
    container = {"job": {"cpu.max": f"{int(quota * 1000)} 1000"}}
    system(tmp_path, {"self": "0::/job\n", cores.os.getppid(): "0::/job\n"}, container)
    monkeypatch.setattr(cores, "SYSTEM", tmp_path)
    assert cores.share_of_cores({"MPI_LOCALNRANKS": "2"}) == share


def test_a_rank_in_a_container_of_its_own_has_its_quota_alone(tmp_path, monkeypatch):
    """The launcher is outside: what limits this rank does not limit the others."""
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    groups = {"job/rank0": {"cpu.max": "3000 1000"}, "job": {"cpu.max": "max 1000"}}
    system(tmp_path, {"self": "0::/job/rank0\n", cores.os.getppid(): "0::/job\n"}, groups)
    monkeypatch.setattr(cores, "SYSTEM", tmp_path)
    assert cores.usable_cores({}) == (3, 8)
    assert cores.share_of_cores({"MPI_LOCALNRANKS": "2"}) == 3


def test_a_memory_limit_is_named_instead_of_the_machines_memory(tmp_path):
    container = one(tmp_path, "0::/\n", {"": {"memory.max": 400 * MEBI, "memory.current": 0}})
    assert machine.node_memory(container) == (400 * MEBI, "the memory limit is")
    assert machine.node_memory(tmp_path / "none")[1] == "this machine has"
    (container / "proc/meminfo").write_text("MemTotal: 1 kB\nMemAvailable: 999999999 kB\n")
    assert machine.free_node_memory(container) == 400 * MEBI
    (container / "proc/meminfo").write_text("MemTotal: 1 kB\nMemAvailable: 3 kB\n")
    assert machine.free_node_memory(container) == 3 << 10


def test_a_step_that_does_not_fit_into_the_limit_is_refused(monkeypatch):
    """By its peak, gathered weights and activations included: the state alone would fit."""
    model, world = MLP(1, 300, 8, 200), SimpleNamespace(size=2, rank=0, reduction="auto")
    world.device, world.group = SimpleNamespace(name="cpu"), None
    batch = 5, 1  # sequences, micro-batches
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    monkeypatch.setattr(limit_of_a_step, "anonymous_bytes", lambda: 40 * MEBI)

    def refuse(limit):
        monkeypatch.setattr(limit_of_a_step, "node_memory", lambda: (limit, "the memory limit is"))
        limit_of_a_step.refuse_beyond_limit(model, world, 3, SGD(), Policy(), batch)

    parameters = 8 * 200 * 300 + 300 * 200  # the two matrices, some 2 MB
    state = 2 * 4 * parameters // 2  # a half of weights and gradients
    with pytest.raises(ValueError, match=r"on each of 2 ranks; the memory limit is"):
        refuse(2 * (40 * MEBI + state))
    refuse(2 * (40 * MEBI + state + 10 * 4 * parameters))
    monkeypatch.setattr(limit_of_a_step, "node_memory", lambda: (0, "this machine has"))
    limit_of_a_step.refuse_beyond_limit(model, world, 3, SGD(), Policy(), batch)
