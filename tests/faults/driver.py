"""A small user script with one planted fault: driver.py FAULT PLACE RANK TIMEOUT.

zmpi has no switch for this: the places lie in this script, or in a method that it wraps from
outside. The fault strikes once, in the third step where the place is inside one; just before, the
rank prints `fault TIME`.
"""

import contextlib
import ctypes
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

import zmpi.messages.comm
import zmpi.messages.world
import zmpi.saving.checkpoint
from models import MLP
from zmpi import AdamW, World, ZeRO

STEPS, STRUCK = 6, 3
FAULT, PLACE, RANK, TIMEOUT = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])


class Planted(RuntimeError):
    pass


def strike():
    print(f"fault {time.time()}", flush=True)
    if "FAULTS_FOLDER" in os.environ:  # a line may not arrive over the link that goes down
        Path(os.environ["FAULTS_FOLDER"], "struck").write_text(str(time.time()))
    if FAULT in ("exception", "together", "caught"):
        raise Planted("this fault was planted")
    if FAULT == "exit":
        sys.exit(3)
    if FAULT == "sleep":
        time.sleep(3600)
    if FAULT == "lock":
        ctypes.PyDLL(None).sleep(3600)  # as a C extension that keeps the interpreter's lock
    if FAULT in ("link", "power"):
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    if FAULT in ("node", "power"):
        end_this_node()
    if FAULT.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, FAULT))


def end_this_node():
    """Kill all processes in this network namespace but its keeper; this one at last."""
    network = os.readlink("/proc/self/ns/net")
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            mine = os.readlink(entry / "ns/net") == network
            if (
                mine
                and (entry / "comm").read_text() != "sleep\n"
                and entry.name != str(os.getpid())
            ):
                os.kill(int(entry.name), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class Places:
    """Where it strikes: at `here(place)` in this script; three more places wrap zmpi's own."""

    def __init__(self, rank):
        self.mine, self.step = rank == RANK, 0
        self.wrap(
            zmpi.messages.comm.Gather, "wait", "gather"
        )  # the gather was started, nobody has waited for it yet
        self.wrap(
            zmpi.messages.comm, "add_in_order", "reduce"
        )  # the slices are here, their sum is not made yet
        self.wrap(AdamW, "update", "update")
        self.wrap(zmpi.saving.checkpoint, "_write_shards", "save")
        if FAULT in ("together", "caught"):
            self.raise_on_all_ranks()

    def here(self, place):
        if self.mine and place == PLACE and self.step in (0, STRUCK):
            self.mine = False
            strike()

    def raise_on_all_ranks(self):
        """Rank RANK raises before it posts a gather; the others' gathers then never complete."""
        post = zmpi.messages.comm.Communicator.all_gather

        def posted(*args):
            gather = None if self.mine else post(*args)
            if self.step == STRUCK:
                strike()
            return gather or post(*args)

        zmpi.messages.comm.Communicator.all_gather = posted

    def wrap(self, owner, name, place):
        inside = getattr(owner, name)

        def wrapped(*args, **kwargs):
            if self.step:
                self.here(place)
            return inside(*args, **kwargs)

        setattr(owner, name, wrapped)


def batch(rank, step, places):
    places.here("data")
    rng = np.random.default_rng([rank, step])
    return rng.integers(0, 11, (3, 4)), rng.integers(0, 11, 3)


def main():
    places = Places(zmpi.messages.world.MPI.COMM_WORLD.rank)
    places.here("start")
    world = World(
        device="cpu", timeout=60
    )  # the ranks of a busy machine need longer to start than TIMEOUT
    world = World(device="cpu", timeout=TIMEOUT)
    if FAULT == "healthy":
        return healthy(world)
    if (
        PLACE == "MPI"
    ):  # the signal comes while the main thread is in a collective, which another rank joins late
        if world.rank == RANK:
            threading.Timer(0.5, strike).start()
        else:
            time.sleep(3)
    places.here("set-up")
    zero = ZeRO(MLP(layers=2, width=7, context=4, vocab=11), world, stage=3, optimizer=AdamW())
    seeded = PLACE.startswith("seed-")  # at some time of the training, which goes on until then
    if seeded and world.rank == RANK:
        when = random.Random(PLACE).uniform(0, 1.5)
        threading.Timer(when, strike).start()
    for step in itertools.count(1) if seeded else range(1, STEPS + 1):
        places.step = step
        try:
            zero.train_step([batch(world.rank, step, places)])
        except Planted:
            if FAULT == "caught":
                return None  # and the process exits
            raise
        places.here("between")
        if PLACE == "save":
            zero.save(Path(os.environ["FAULTS_FOLDER"], "checkpoint"))


def healthy(world):
    """Rank RANK still writes, for TIMEOUT seconds, when all others are done."""
    if world.rank == RANK:
        time.sleep(TIMEOUT)
        print("written", flush=True)


main()
