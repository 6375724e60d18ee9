"""How one rank ends all: it says why, and aborts. Where several ranks find a fault together, one of them speaks."""

import faulthandler
import os
import threading
from contextlib import suppress

from zmpi.process.clock import rest
from zmpi.process.hooks import say

SETTLE = 0.5  # seconds in which ranks that find a fault together learn of each other
ANSWER = 2.0  # seconds in which a living rank answers
DRAIN = 0.1  # seconds left to the launcher to carry the last line out
PATIENCE = 8.0  # seconds after which a rank dies without a word where it cannot end (its stderr is blocked, say)
SHARED = "/dev/shm/mpich_shm_"  # how the names of MPICH's shared memory begin
ABORT = 3.0  # seconds for MPI's abort, in which no other thread of Python may run


class Ending:
    """The end of all ranks. It begins at most once in a process, on whichever thread finds a fault first."""

    def __init__(self, messages, abort):
        self._messages, self._abort = messages, abort
        self._first, self._begun = threading.Lock(), threading.Event()

    def watch(self) -> None:
        """Start the thread that ends this process where its end takes too long: at the exit it is too late for one."""
        threading.Thread(target=self._lose_patience, name="zmpi patience", daemon=True).start()

    @property
    def begun(self) -> bool:
        """Whether this rank is ending."""
        return self._begun.is_set()

    def end(self, status: int, line: str, words) -> None:
        """End all ranks with `status`; returns where the end has begun already, or another rank is to speak.

        line: the fault, "rank R: ...", or "" for a report of all ranks; words(others): what is printed, `others` being
        the lines of the ranks that found other faults at the same time.
        """
        if not self._first.acquire(blocking=False):
            return
        self._begun.set()
        remove_shared_files()
        if not self._may_speak(line):
            return
        fault = line.partition(": ")[2]  # after the rank: another that found the same is not named
        claims = sorted(self._messages.claims.items())
        say(words([other for _, other in claims if other.partition(": ")[2] != fault]))
        rest(DRAIN)
        if self._messages.size > 1:
            nothing = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(ABORT, exit=True, file=nothing)
            self._abort(status)
        os._exit(status)

    def _may_speak(self, line: str) -> bool:
        """True on one of the ranks that found a fault: the first, and the lowest of those that find it together."""
        messages = self._messages
        if not messages.can_talk:  # the lowest speaks first, and its abort ends the others
            rest(min(messages.rank * 3 * DRAIN, ANSWER))
            return True
        if messages.claims:
            return False
        messages.claim(line)
        messages.listen(SETTLE, messages.claims)
        return min(messages.claims) == messages.rank

    def _lose_patience(self) -> None:
        self._begun.wait()
        rest(PATIENCE)
        os._exit(1)


def remove_shared_files() -> None:
    """Remove the names of MPICH's shared memory (2 to 4 MB in /dev/shm), which every rank of this node has mapped.

    MPICH does so in MPI_Finalize only, which no run reaches that ends by MPI_Abort. The memory itself stays until the
    last rank is gone. Linux; elsewhere nothing happens.
    """
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for path in {line.split(maxsplit=5)[-1].strip() for line in maps if SHARED in line}:
            with suppress(OSError):  # another rank was first
                os.unlink(path)
