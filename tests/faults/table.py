"""Every fault at every place, on rank 0 and on another, at 3 and 4 ranks: how it ends, and when.

`python tests/faults/table.py` runs all of them, some at a time, and prints a table; its status is 1
if one run fails. tests/test_faults.py runs a part of it.
"""

import itertools
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from mpirun import run_world

DRIVER = Path(__file__).resolve().parent / "driver.py"
FAULTS = {  # what zmpi's own line says of it, after the rank
    "exception": r"Planted: this fault was planted$",
    "exit": r"exited with status 3 after .*; the others wait in .*, which it never entered$",
    "SIGKILL": None,  # the launcher speaks alone
    "SIGTERM": r"ended by SIGTERM$",
    "sleep": None,  # the line names the collective first
}
ON_ALL_RANKS = {  # one raises before it posts a gather, the others after they did
    "together": r"Planted: this fault was planted$",
    "caught": None,  # by the script, which then ends: nothing to say, and status 0
}
PLACES = ("set-up", "data", "gather", "reduce", "update", "between")
TIMEOUT = 2  # seconds that a collective may take where a rank sleeps
BOUND = (
    10  # seconds from the fault (from the timeout, for the sleep) to the end of the last process
)
AT_ONCE = 4  # worlds that run at the same time: they mostly wait


@dataclass(frozen=True)
class Run:
    """One planted fault."""

    fault: str
    place: str
    rank: int
    size: int

    def __str__(self):
        return f"{self.fault:10}{self.place:9}rank {self.rank} of {self.size}"

    def make(self):
        timeout = TIMEOUT if self.fault == "sleep" else 60
        return run_world(
            self.size, [DRIVER, self.fault, self.place, self.rank, timeout], timeout=90
        )

    def seconds(self, ended):
        """Seconds from the fault (a sleep: the timeout) to the last process's end, or None."""
        struck = re.search(r"^fault (\d+\.\d+)$", ended.output, re.MULTILINE)
        return (
            ended.ended - float(struck[1]) - TIMEOUT * (self.fault == "sleep") if struck else None
        )

    def wrong(self, ended):
        """What is not as promised (P4), in words; empty if nothing."""
        seconds = self.seconds(ended)
        checks = {
            "never struck": seconds is None,
            f"took over {BOUND} s": seconds is not None and seconds > BOUND,
            f"status {ended.status}": (ended.status == 0) != (self.fault == "caught"),
            "had to be ended": ended.status == 124,
            "left processes behind": ended.left,
        }
        return [what for what, is_so in checks.items() if is_so] + self.wrong_words(ended.output)

    def wrong_words(self, output):
        own = [
            line
            for line in output.splitlines()
            if line.startswith(f"{DRIVER.name}: ") or line.startswith("zmpi: ")
        ]
        if self.fault == "SIGKILL":
            return []
        if self.fault == "caught":
            return own
        if self.fault == "sleep":
            said = [
                line
                for line in own
                if re.search(
                    rf" did not complete within 2 s: rank {self.rank} never arrived$", line
                )
            ]
        else:
            rank = r"\d" if self.fault in ON_ALL_RANKS else self.rank
            told = (FAULTS | ON_ALL_RANKS)[self.fault]
            said = [line for line in own if re.search(rf": rank {rank}: {told}", line)]
        words = [] if len(said) == len(own) == 1 else [f"{len(said)} of {len(own)} lines name it"]
        traces = output.count("Traceback (most recent call last)")
        expected = self.fault in ("exception", "together")
        return words + ([f"{traces} tracebacks"] if traces != expected else [])


def full_table():
    runs = [
        *itertools.product(FAULTS, PLACES, (3, 4), ("first", "other")),
        *itertools.product(ON_ALL_RANKS, ["post"], (3, 4), ("first", "other")),
    ]
    return [
        Run(fault, place, 0 if which == "first" else size - 2, size)
        for fault, place, size, which in runs
    ]


def run_all(runs):
    """[(run, how it ended), ...], in order."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(zip(runs, pool.map(Run.make, runs), strict=True))


def main():
    failed = 0
    print(f"{'fault':10}{'place':9}{'rank':12}{'seconds':>9}{'status':>8}")
    for run, ended in run_all(full_table()):
        wrong, seconds = run.wrong(ended), run.seconds(ended)
        failed += bool(wrong)
        print(f"{run!s:31}{seconds or -1:9.1f}{ended.status:8}  {', '.join(wrong)}", flush=True)
    print(f"{len(full_table())} runs, {failed} not as promised")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
