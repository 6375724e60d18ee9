"""A cluster in a box: python benchmarks/cluster.py --nodes 2 --rate 1gbit -- python -m zmpi.verify

Each node is a set of Linux namespaces: a network interface, a host name, shared memory of its own.
A bridge joins them; `tc` shapes every link in both directions. `mpirun` (MPICH's or Open MPI's, the
one beside this Python) starts COMMAND on all nodes, and messages between nodes travel as TCP.

The box itself is a namespace of processes, mounts and networks, so it is reached from nowhere, two
boxes cannot meet, and the kernel takes it down with its first process, however that ends: nothing
is created outside, so there is nothing to clean up. It needs root, or user namespaces.
"""

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "mpirun")
NAMESPACES = {  # clone flags (sched.h)
    "mount": 0x00020000,
    "host name": 0x04000000,
    "IPC": 0x08000000,
    "process": 0x20000000,
    "network": 0x40000000,
}
NEW_USER = 0x10000000
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
BOX = Path("/dev/shm")  # a tmpfs of the box's own
GRACE = 10  # seconds for the command to end after a signal
BURST = 0.002  # seconds at the full rate that a link may send at once
FIRST_BURST = 64 << 10  # bytes, at least: one unsegmented TCP packet
QUEUE = "50ms"  # what a link buffers before it drops
# Between nodes TCP, whatever else the MPI library finds on one machine; within a node its shared
# memory: MPICH's own, which does not go through UCX, and Open MPI's sm.
TCP = {
    "mpich": {
        "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",  # ranks outnumber cores: waiting ones give up theirs
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "eth0",
        "FI_PROVIDER": "tcp",
    },
    "openmpi": {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_btl": "tcp,sm,self",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
        "PRTE_MCA_prte_tmpdir_base": "/dev/shm",  # the node's own: /tmp is shared
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    },
}


class NotPossible(RuntimeError):
    """This machine cannot make a box; the text says what is missing."""


def parser():
    flags = argparse.ArgumentParser(prog="cluster.py", description=__doc__.split("\n")[0])
    flags.add_argument("--nodes", type=int, default=2, metavar="N", help="default: 2")
    flags.add_argument("--ppn", type=int, default=2, metavar="N", help="ranks per node; default: 2")
    flags.add_argument("--rate", help="each link's, each way, as tc writes it: 100mbit, 1gbit")
    flags.add_argument("--delay", help="each way, as tc writes it: 25ms (needs netem)")
    flags.add_argument("--loss", help="of the packets each way: 1%% (needs netem)")
    flags.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND: what each rank runs")
    return flags


def main():
    options = parser().parse_args()
    options.command = options.command[options.command[:1] == ["--"] :]
    try:
        check(options)
        return in_a_box(lambda: run(options))
    except NotPossible as missing:
        print(f"cluster.py: error: {missing}", file=sys.stderr)
        return 2


def check(options):
    """Raise NotPossible for a flag or a tool that will not do."""
    beside = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([beside, os.environ["PATH"], "/usr/sbin", "/sbin"])
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise NotPossible(f"not found: {', '.join(missing)} (Linux with iproute2, util-linux, MPI)")
    if not 1 <= options.nodes <= 100 or options.ppn < 1:
        raise NotPossible("--nodes: expected 1 to 100, --ppn: 1 or more")
    if options.rate and not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", options.rate):
        raise NotPossible(f"--rate: expected a rate like 100mbit or 1gbit, got {options.rate}")
    if not options.command:
        raise NotPossible("expected -- and a command that each rank runs")


def in_a_box(work):
    """The status of `work`, which runs as the first process of new namespaces. Signals reach it."""
    new_namespaces()
    if child := os.fork():
        ask = {number: lambda number, _: _send(child, number) for number in (2, 15, 1)}
        for number, handler in ask.items():
            signal.signal(number, handler)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    status = 2
    try:
        status = work()
    except NotPossible as missing:
        print(f"cluster.py: error: {missing}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)  # and the kernel ends every process of the box


def new_namespaces():
    """Leave this machine's namespaces; as a user without rights, with a user namespace first."""
    libc, flags = ctypes.CDLL(None, use_errno=True), sum(NAMESPACES.values())
    user, group = os.getuid(), os.getgid()
    if libc.unshare(flags if user == 0 else flags | NEW_USER):
        kind = "namespaces" if user == 0 else "user namespaces (this is not root)"
        raise NotPossible(f"{kind} are not permitted here: {os.strerror(ctypes.get_errno())}")
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def run(options):
    """Make the nodes and run the command on them; its status."""
    for mount in ("--make-rprivate /", "-t proc proc /proc", f"-t tmpfs box {BOX}"):
        tool("mount", *mount.split())
    tool("hostname", "head")
    names = [f"node{number}" for number in range(options.nodes)]
    addresses = {name: f"10.0.0.{1 + number}" for number, name in enumerate(names)}
    hosts = "".join(f"{at} {name}\n" for name, at in (addresses | {"head": "10.0.0.254"}).items())
    (BOX / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    tool("mount", "--bind", BOX / "hosts", "/etc/hosts")
    tool("ip", "link", "add", "switch", "type", "bridge")
    tool("ip", "address", "add", "10.0.0.254/24", "dev", "switch")
    for device in ("lo", "switch"):
        tool("ip", "link", "set", device, "up")
    keepers = {name: node(name, addresses[name], options) for name in names}
    return launch(options, keepers)


def node(name, address, options):
    """Make a node; the process that keeps its namespaces."""
    keep = f"hostname {name}; mount -t tmpfs {name} /dev/shm; echo; exec sleep infinity"
    command = ["unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c", keep]
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE)
    keeper.stdout.readline()
    inside = ("nsenter", "-t", str(keeper.pid), "-n")
    tool(*f"ip link add {name} type veth peer name eth0 netns {keeper.pid}".split())
    tool(*f"ip link set {name} master switch up".split())
    tool(*inside, *f"ip address add {address}/24 dev eth0".split())
    for device in ("lo", "eth0"):
        tool(*inside, *f"ip link set {device} up".split())
    for place, device in (((), name), (inside, "eth0")):
        shape(place, device, options)
    return keeper


def shape(place, device, options):
    """Give a device's outgoing side its rate, delay and loss."""
    parent = "root"
    if options.rate:
        number, unit = re.fullmatch(r"([\d.]+)([kmg])bit", options.rate).groups()
        rate = float(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[unit]
        burst = max(FIRST_BURST, int(rate / 8 * BURST))
        queue = f"tbf rate {options.rate} burst {burst} latency {QUEUE}"
        tool(*place, *f"tc qdisc add dev {device} root handle 1: {queue}".split())
        parent = "parent 1:1"
    if options.delay or options.loss:
        netem = f"netem limit 100000 delay {options.delay or '0ms'} loss {options.loss or '0%'}"
        try:
            tool(*place, *f"tc qdisc add dev {device} {parent} {netem}".split())
        except NotPossible as refused:
            raise NotPossible(f"not tried: no netem ({refused})") from None


def launch(options, keepers):
    """Run the command on all nodes. A signal is passed on; who ignores it ends with the box."""
    enter = BOX / "enter"  # in the place of ssh: enter [OPTION...] HOST COMMAND...
    pids = "\n".join(f"{name}) pid={keeper.pid};;" for name, keeper in keepers.items())
    script = (
        '#!/bin/sh\nwhile case "$1" in -*) true;; *) false;; esac; do shift; done\n'
        f'host=$1; case "$1" in\n{pids}\nesac\nshift\n'
        'nsenter -t $pid -n -u -i -m sh -c "$*"; status=$?\n'
        # As ssh: an end on the other side of a dead link stays unknown.
        "until ip link show $host | grep -q LOWER_UP; do sleep 0.2; done\nexit $status\n"
    )
    for root in ("", *(f"/proc/{keeper.pid}/root" for keeper in keepers.values())):
        there = Path(f"{root}{enter}")  # Open MPI's daemons look for it in their node
        there.write_text(script)
        there.chmod(0o755)
    command = [*mpirun(enter, options), *options.command]
    running = subprocess.Popen(command, env=os.environ)
    asked = []

    def pass_on(number, _):
        asked.append(time.monotonic())
        running.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    while running.poll() is None:
        time.sleep(0.05)
        if asked and time.monotonic() - asked[0] > GRACE:
            running.kill()
    return _all_ended(keepers.values()) or running.returncode % 256


def _all_ended(keepers):
    """0 if all processes of the nodes end with the launcher; else 1, and one line that says who."""
    kept = {keeper.pid for keeper in keepers}
    until = time.monotonic() + GRACE
    while left := [pid for pid in _processes_of_nodes() if pid not in kept]:
        if time.monotonic() > until:
            print(f"cluster.py: ended by force: processes {left}", file=sys.stderr, flush=True)
            return 1
        time.sleep(0.05)
    return 0


def _processes_of_nodes():
    """The living processes in the nodes' networks, not in that of this one."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a zombie has no namespaces
            if os.readlink(entry / "ns/net") != os.readlink("/proc/self/ns/net"):
                yield int(entry.name)


def mpirun(enter, options):
    """The launcher's command line for this box; sets the environment that its MPI needs."""
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    hosts = [f"node{number}" for number in range(options.nodes)]
    if "Open MPI" in said.stdout or "PRRTE" in said.stdout or "prte" in said.stdout:
        os.environ.update(TCP["openmpi"])
        where = ["--host", ",".join(f"{host}:{options.ppn}" for host in hosts), "--bind-to", "none"]
        # Its daemons would detach, and lose their session before they report back.
        attached = "--leave-session-attached"
        return ["mpirun", attached, "--prtemca", "plm_ssh_agent", str(enter), *where]
    os.environ.update(TCP["mpich"])
    where = ["-hosts", ",".join(hosts), "-ppn", str(options.ppn)]
    many = ["-n", str(options.nodes * options.ppn)]
    return ["mpirun", "-launcher", "ssh", "-launcher-exec", str(enter), *where, *many]


def tool(*command):
    """Run a system tool; its one line of complaint is a NotPossible."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise NotPossible(f"{' '.join(map(str, command))}: {said}")


def _send(process, number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


if __name__ == "__main__":
    sys.exit(main())
