"""Checkpoints under fire: `python tests/faults/checkpoints.py kills 50 | flips 100 | resumes`.

With --group at the end kills and flips are of 4 ranks in two groups, at stage 3,1.

kills N     N times, near a save, SIGKILL to all ranks or to one; every restart must continue from a
            complete step, and the run that got through must end with the bits of one that was left
            alone
flips N     N times, a flipped bit or a truncation in a file of a checkpoint: found, named, status 2
resumes     10 steps against 5 + a new process + 5: all stages, precisions, accumulate 1 and 2
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from mpirun import ROOT, mpirun, run_world  # noqa: E402

from zmpi.saving.folder import NAME, newest  # noqa: E402
from zmpi.saving.manifest import Manifest  # noqa: E402
from zmpi.train import KEEP  # noqa: E402

MODEL = [
    "--layers",
    "2",
    "--width",
    "24",
    "--heads",
    "2",
    "--context",
    "16",
    "--micro-batch",
    "2",
    "--warmup",
    "2",
]
RANKS, STEPS, LIVES = 3, 8, 6


def train(size, *flags, timeout=60):
    """The command, to its end."""
    return run_world(size, ["-m", "zmpi.train", *flags], timeout=timeout)


def bits(folder):
    """What a folder's newest checkpoint contains, after its check: every rank's file, in full."""
    manifest = Manifest.read(newest(folder))
    manifest.check(0, 1)
    counts = [manifest[key] for key in ("step", "updates", "scaler", "seed")]
    return counts, [(manifest.folder / record.name).read_bytes() for record in manifest.files]


def numbers(log):
    """What must be the same in two logs: all but times, memory, and how each run ended."""
    entries = [json.loads(line) for line in Path(log).read_text().splitlines()[1:]]
    entries = [entry for entry in entries if "end" not in entry]
    keys = (
        "step",
        "loss",
        "grad_norm",
        "lr",
        "optimizer_t",
        "loss_scale",
        "skipped",
        "tokens",
        "val_loss",
    )
    return [[entry.get(key) for key in keys] for entry in entries]


# -- kills -----------------------------------------------------------------------------------------


class Killed:
    """A run of the command that is killed at a random moment, if it lives as long."""

    def __init__(self, folder, log, draw):
        self.folder, self.draw = folder, draw
        self.mark = f"killed-{os.getpid()}-{draw.random()}"
        resume = ["--resume"] if list(folder.glob("step-*")) else []
        flags = [
            *MODEL,
            "--steps",
            str(STEPS),
            "--save-every",
            "1",
            "--checkpoint",
            str(folder),
            "--log",
            str(log),
            *resume,
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "KILLED": self.mark}
        command = [mpirun(), "-n", str(RANKS), sys.executable, "-m", "zmpi.train", *flags]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdout=pipe, stderr=subprocess.STDOUT
        )

    def kill(self):
        """Wait for one of the next saves and a random while; kill. (who, the folder), or None."""
        for _ in range(self.draw.randint(1, 3)):
            if not self._wait_for_a_save():
                self.output = self.process.communicate()[0]
                return None
        time.sleep(
            self.draw.uniform(0, self.draw.choice([0.02, 0.15]))
        )  # a save takes some 10 ms here
        ranks = self._ranks()
        victims, killed = (
            ranks if self.draw.random() < 0.5 else ranks[:1] and [self.draw.choice(ranks)],
            0,
        )
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        self.output = self.process.communicate(timeout=30)[0]
        while self._ranks():  # mpirun may be gone before them
            time.sleep(0.01)
        return ("all" if killed == RANKS else "one", stage_of(self.folder)) if killed else None

    def _wait_for_a_save(self):
        """False if the run ended before."""
        before = set(self.folder.glob(".saving-*"))
        while self.process.poll() is None:
            if set(self.folder.glob(".saving-*")) - before:
                return True
            time.sleep(0.001)
        return False

    def _ranks(self):
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes().split(b"\0")
                    if b"python" in command[0] and b"zmpi.train" in command:
                        found.append(int(entry.name))
            except OSError:
                continue
        return found


def stage_of(folder):
    """How far a save had come, by what lies in the folder."""
    for saving in folder.glob(".saving-*"):
        names = sorted(path.name for path in saving.iterdir())
        return (
            "manifest written"
            if "manifest.sha256" in names
            else f"{sum('rank' in name for name in names)} files open"
        )
    complete = sorted(folder.glob("step-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    marked = complete and (folder / "latest").exists() and newest(folder) == complete[-1]
    if complete and not marked:
        return "complete, not marked"
    return "removing an old one" if list(folder.glob(".removing-*")) else "between two saves"


def kills(count, seed=0):
    """Returns a Counter of where the kills fell; raises AssertionError for a broken promise."""
    draw, where, work = random.Random(seed), Counter(), Path(tempfile.mkdtemp())
    alone = train(
        RANKS,
        *MODEL,
        "--steps",
        str(STEPS),
        "--checkpoint",
        work / "alone",
        "--log",
        work / "alone.log",
    )
    assert alone.status == 0, alone.output
    expected, life = bits(work / "alone"), 0
    while sum(where.values()) < count:
        life += 1
        folder, log, last = work / f"life-{life}", work / f"life-{life}.log", None
        folder.mkdir()
        for _ in range(min(LIVES, count - sum(where.values()))):
            run = Killed(folder, log, draw)
            fell = run.kill()
            if fell is None:
                last = run.process.wait(), run.output
                break
            where[fell] += 1
            if (
                folder / "latest"
            ).exists():  # killed before its first mark, a folder has none: the next job sets it
                step = bits(folder)[0][0]
                assert 1 <= step <= STEPS
        if not last:
            resume = ["--resume"] if list(folder.glob("step-*")) else MODEL
            ended = train(
                RANKS, *resume, "--steps", str(STEPS), "--checkpoint", folder, "--log", log
            )
            assert not ended.left
            last = ended.status, ended.output
        assert last[0] == 0, last[1]
        assert bits(folder) == expected, f"life {life} ended with other bits"
        assert numbers(log) == numbers(work / "alone.log"), f"life {life} logged other numbers"
        entries = sorted(path.name for path in folder.iterdir())
        kept = KEEP + (
            "nothing to train" in last[1]
        )  # what a kill left beyond --keep, the next save would remove
        assert entries[:2] == [".flock", "latest"] and all(
            NAME.fullmatch(name) for name in entries[2:]
        ), entries
        assert len(entries[2:]) <= kept, entries
        print(f"life {life}: the same final bits; {sum(where.values())} kills so far", flush=True)
    shutil.rmtree(work)
    return where


# -- flips -----------------------------------------------------------------------------------------


def flips(count, seed=0):
    """Returns a Counter of the damaged files."""
    draw, where, work = random.Random(seed), Counter(), Path(tempfile.mkdtemp())
    saved = train(RANKS, *MODEL, "--steps", "2", "--checkpoint", work / "good", "--save-every", "1")
    assert saved.status == 0, saved.output
    for trial in range(count):
        folder = work / "damaged"
        shutil.copytree(work / "good", folder)
        files = [*sorted(newest(folder).iterdir()), folder / "latest"]
        file = files[trial % len(files)]
        good = file.read_bytes()
        position, cut = draw.randrange(8 * len(good)), trial % 5 == 4
        damaged = bytearray(good)
        damaged[position // 8] ^= 1 << position % 8
        file.write_bytes(good[: position // 8] if cut else damaged)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        ranks = (1, 2, RANKS)[trial % 3]
        flat = ["--group", "1", "--stage", "3"] if "--group" in MODEL and ranks < RANKS else []
        resumed = train(
            ranks,
            *flat,
            "--checkpoint",
            folder,
            "--resume",
            "--steps",
            "4",
            "--micro-batch",
            "1",
        )
        lines = [line for line in resumed.output.splitlines() if "error" in line]
        assert resumed.status == 2 and len(lines) == 1 and file.name in lines[0], (
            file,
            resumed.output,
        )
        way_out = "delete this file" if file.name == "latest" else ", delete "
        assert way_out in lines[0], lines[0]
        assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        where[f"{file.name}, {'cut' if cut else 'flipped'}"] += 1
        shutil.rmtree(folder)
    shutil.rmtree(work)
    return where


# -- resumes ---------------------------------------------------------------------------------------


def resumes(cases=None):
    """Returns a Counter of the cases, all of which came to the same bits."""
    where = Counter()
    for stage, precision, accumulate in cases or itertools.product(
        range(4), ("float32", "bfloat16", "float16"), (1, 2)
    ):
        work = Path(tempfile.mkdtemp())
        flags = [
            *MODEL,
            "--stage",
            stage,
            "--precision",
            precision,
            "--accumulate",
            accumulate,
            "--decay-steps",
            "10",
        ]
        reports = ["--eval-every", "2"]
        flags += [*(["--loss-scale-window", "3"] if precision == "float16" else []), *reports]
        straight = train(
            2,
            *flags,
            "--steps",
            "10",
            "--checkpoint",
            work / "straight",
            "--log",
            work / "straight.log",
        )
        where_to = ["--checkpoint", work / "halves", "--log", work / "halves.log"]
        first = train(2, *flags, "--steps", "5", *where_to)
        second = train(2, "--steps", "10", *where_to, "--resume", *reports)
        for run in (straight, first, second):
            assert run.status == 0, run.output
        assert bits(work / "straight") == bits(work / "halves"), (stage, precision, accumulate)
        logged = [
            [entry for entry in numbers(work / name) if entry[1] is not None]
            for name in ("straight.log", "halves.log")
        ]
        assert logged[0] == logged[1] and len(logged[0]) == 10, (stage, precision, accumulate)
        assert logged[1][5][0] == 6 and logged[1][5][4] <= 6
        where[f"stage {stage}, {precision}, accumulate {accumulate}: the same bits"] += 1
        shutil.rmtree(work)
    return where


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if arguments[-1:] == ["--group"]:
        RANKS, arguments = 4, arguments[:-1]
        MODEL += ["--group", "2", "--stage", "3,1"]
    began = time.time()
    found = {"kills": kills, "flips": flips, "resumes": resumes}[what](*map(int, arguments))
    for case, number in sorted(found.items(), key=str):
        print(f"{number:4}  {case if isinstance(case, str) else ', '.join(case)}")
    print(f"{sum(found.values())} {what}, all as promised, in {time.time() - began:.0f} s")
