"""A small user script with one planted fault: driver.py FAULT PLACE RANK TIMEOUT.

zmpi has no switch for this: the places lie in this script, or in a method that it wraps from
outside. The fault strikes once, in the third step where the place is inside one; just before, the
rank prints `fault TIME`.
"""

import os
import signal
import sys
import threading
import time

import numpy as np

import zmpi.messages.comm
import zmpi.messages.world
from models import MLP
from zmpi import AdamW, World, ZeRO

STEPS, STRUCK = 6, 3
FAULT, PLACE, RANK, TIMEOUT = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])


class Planted(RuntimeError):
    pass


def strike():
    print(f"fault {time.time()}", flush=True)
    if FAULT in ("exception", "together", "caught"):
        raise Planted("this fault was planted")
    if FAULT == "exit":
        sys.exit(3)
    if FAULT == "sleep":
        time.sleep(3600)
    os.kill(os.getpid(), getattr(signal, FAULT))


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
    for step in range(1, STEPS + 1):
        places.step = step
        try:
            zero.train_step([batch(world.rank, step, places)])
        except Planted:
            if FAULT == "caught":
                return None  # and the process exits
            raise
        places.here("between")


def healthy(world):
    """Rank RANK still writes, for TIMEOUT seconds, when all others are done."""
    if world.rank == RANK:
        time.sleep(TIMEOUT)
        print("written", flush=True)


main()
