"""How one rank ends all: it prints why, and aborts. If several find a fault at once, one prints."""

import faulthandler
import os
import threading
from contextlib import suppress

from zmpi.process.clock import rest
from zmpi.process.hooks import say

SETTLE = 0.5  # seconds for ranks that find a fault together to learn of each other
ANSWER = 2.0  # seconds within which a live rank answers
DRAIN = 0.1  # seconds for the launcher to forward the last line
PATIENCE = 8.0  # seconds before a rank that cannot end (a blocked stderr, say) exits silently
SHARED = "/dev/shm/mpich_shm_"  # prefix of MPICH's shared memory files
ABORT = 3.0  # seconds for MPI_Abort, which may block all Python threads


class Ending:
    """Ends all ranks; begins at most once per process, on the first thread that finds a fault."""

    def __init__(self, messages, abort):
        self._messages, self._abort = messages, abort
        self._first, self._begun = threading.Lock(), threading.Event()

    def watch(self) -> None:
        """Start the thread that exits if ending takes too long: too late to start one at exit."""
        threading.Thread(target=self._lose_patience, name="zmpi patience", daemon=True).start()

    @property
    def begun(self) -> bool:
        """Whether this rank is ending."""
        return self._begun.is_set()

    def end(self, status: int, line: str, words) -> None:
        """End all ranks with `status`; returns if the end has begun, or another rank will print.

        line: the fault, "rank R: ...", or "" for a report of all ranks; words(others): the text to
        print, where `others` are the lines of ranks that found other faults at the same time.
        """
        if not self._first.acquire(blocking=False):
            return
        self._begun.set()
        remove_shared_files()
        if not self._may_speak(line):
            return
        fault = line.partition(": ")[2]  # without the rank: print the same fault once
        claims = sorted(self._messages.claims.items())
        say(words([other for _, other in claims if other.partition(": ")[2] != fault]))
        rest(DRAIN)
        if self._messages.size > 1:
            nothing = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(ABORT, exit=True, file=nothing)
            self._abort(status)
        os._exit(status)

    def _may_speak(self, line: str) -> bool:
        """Whether this rank prints: the first that found a fault, the lowest if several did."""
        messages = self._messages
        if not messages.can_talk:  # the lowest rank prints first, and its abort ends the others
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
    """Unlink MPICH's shared memory files (2 to 4 MB in /dev/shm), mapped by this node's ranks.

    MPICH does so only in MPI_Finalize, which an aborted run never reaches. The memory itself lives
    until the last rank is gone. Does nothing outside Linux.
    """
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for path in {line.split(maxsplit=5)[-1].strip() for line in maps if SHARED in line}:
            with suppress(OSError):  # another rank did it
                os.unlink(path)
