"""Faults between nodes, and ranks that no longer answer, in the box of benchmarks/cluster.py.

`python tests/faults/nodes.py [TIMES]` makes every fault at every place, TIMES times (default 10),
and prints a table; its status is 1 if a run is not as promised. Loss and delay need netem.

    link   a node's link goes down; nobody is told
    power  the same, and all its processes are gone: the others' connections stay half open
    node   all processes of a node are killed, and the kernel closes their connections
    lock   a rank keeps the interpreter's lock, as a C extension may: its guard cannot answer
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CLUSTER, DRIVER = ROOT / "benchmarks" / "cluster.py", ROOT / "tests" / "faults" / "driver.py"
NODES = ("link", "power", "node")
RANKS = ("SIGSTOP", "SIGSEGV", "lock")
PLACES = ("gather", "reduce", "save")
TIMEOUT, BOUND = 2, 10  # seconds that a collective may take; and more until all ranks are gone
AT_ONCE = 4  # boxes that run at the same time: they mostly wait, and do not meet
STRUCK = 2  # the rank: the first of the second node
# What a line says, by fault. Where the launcher sees a process end, its own line is all there is.
NAMES = {
    "link": r"^zmpi: .* did not complete within 2 s: .*no answer from ranks 2, 3$",
    "power": r"^zmpi: .* did not complete within 2 s: .*no answer from ranks 2, 3$",
    "node": r"node1",
    "SIGSTOP": r"^zmpi: .* did not complete within 2 s: .*no answer from rank 2$",
    "SIGSEGV": r"node1",
    "lock": r"^zmpi: .* did not complete within 2 s: .*no answer from rank 2$",
}


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    status: int
    output: str
    seconds: float  # from the fault to the end of all ranks


def strike(fault, place):
    """One fault in a box of 2 nodes x 2 ranks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [DRIVER, fault, place, STRUCK, TIMEOUT]
        box = [sys.executable, CLUSTER, "--rate", "1gbit", "--", sys.executable, *command]
        path = {"PYTHONPATH": str(ROOT), "FAULTS_FOLDER": folder}
        done = subprocess.run(
            list(map(str, box)),
            env={**os.environ, **path},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=90,
            check=False,
        )
        ended, struck = time.time(), Path(folder, "struck")
        seconds = ended - float(struck.read_text()) if struck.exists() else -1
    return Ended(done.returncode, done.stdout, seconds)


def wrong(fault, ended):
    """What is not as promised (P4), in words; empty if nothing."""
    named = re.findall(NAMES[fault], ended.output, re.MULTILINE)
    checks = {
        "never struck": ended.seconds < 0,
        f"took over {TIMEOUT + BOUND} s": ended.seconds > TIMEOUT + BOUND,
        "status 0": ended.status == 0,
        "ranks stayed": "ended by force" in ended.output,
        "nobody is named": not named,
    }
    return [what for what, is_so in checks.items() if is_so]


def main():
    times, failed = int(sys.argv[1]) if len(sys.argv) > 1 else 10, 0
    print(f"{'fault':9}{'place':10}{'runs':>5}{'slowest':>10}  not as promised")
    for fault in NODES + RANKS:
        for place in (*PLACES, "seed"):
            found, slowest = Counter(), 0.0
            places = [f"seed-{n}" if place == "seed" else place for n in range(times)]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                for ended in pool.map(partial(strike, fault), places):
                    slowest = max(slowest, ended.seconds)
                    found.update(wrong(fault, ended))
            failed += bool(found)
            told = ", ".join(f"{what} ({count})" for what, count in found.items())
            print(f"{fault:9}{place:10}{times:5}{slowest:8.1f} s  {told}", flush=True)
    for row in ("1 % loss", "50 ms delay"):
        print(f"{row:24} not tried here: python benchmarks/cluster.py --loss, --delay need netem")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
