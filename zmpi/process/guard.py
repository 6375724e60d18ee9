"""Nobody hangs (promise P4): a fault on one rank ends all ranks, with one message that names it.

    fault on one rank    found by                                reported by
    exception, signal    its own hook, its own thread            that rank, which aborts the world
    sys.exit alone       a rank blocked for 5 s in a collective  the exited rank: its atexit handler
                         that the exited rank never entered      waits until all ranks exit
    sleep, lost message  a rank blocked for `timeout`            the lowest blocked rank

This file judges which rank is missing and when to end; ending.py decides which rank prints, and
guard_messages.py has the messages. One thread per rank checks the messages, its rank's wait and the
signals ten times a second. It runs while the main thread sleeps or is blocked inside MPI, so every
rank with a live interpreter answers. Time in which the process was stopped does not count
(clock.py). The communicator is passed in: nothing here imports MPI.
"""

import signal
import sys
import threading
import traceback

from zmpi.process.clock import RunningClock, rest
from zmpi.process.ending import ANSWER, Ending
from zmpi.process.errors import Agreed, one_line
from zmpi.process.guard_messages import GuardMessages
from zmpi.process.hooks import END_SIGNALS, Hooks, say

POLL = 0.1  # seconds between two polls of the private communicator
STAND = 5.0  # seconds to wait in a collective that an exited rank never entered
LEAVE = 30.0  # seconds that a rank exiting before its first World() waits for the others

_guard = None  # one per process, however many Worlds it makes


def arm(comm, abort, finalized, multiple: bool) -> "Guard":
    """The process's Guard; the first call makes it and installs its hooks. Sends no message.

    comm: the communicator of all ranks; abort(status): ends all ranks; finalized(): whether MPI is
    over; multiple: whether several threads may call MPI. Without `multiple` ranks cannot ask each
    other: each only times its own waits.
    """
    global _guard
    if _guard is None:
        _guard = Guard(comm, abort, finalized, multiple)
    return _guard


class Guard:
    """What this rank knows about itself and the others. Made by `arm`."""

    def __init__(self, comm, abort, finalized, multiple: bool):
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.program = "zmpi"  # starts every line
        self.line_start = ""  # before a message; "\n" while a progress bar is on the last line
        self.timeout = 300.0  # seconds
        self.stop_requested = 0  # signal number, see finish_on_signal
        self.lane = None  # carries vectors; World makes one per process
        self._finalized, self._multiple = finalized, multiple
        self._clock = RunningClock()  # the guard's thread drives it
        self._messages = GuardMessages(comm, lambda: (self._state[0], self._doing()), self._clock)
        # (waits entered, the last one's name, time entered or None outside): one tuple, so that the
        # thread reads a consistent state. All ranks enter the same waits in the same order.
        self._state = (0, "the start", None)
        self._why = ""  # the reason for exiting, if there is more than a status
        self._told = 0  # the wait for which this rank last sent `abandoned`
        self._all_gone, self._stop = threading.Event(), threading.Event()
        self._ending = Ending(self._messages, abort)
        self._finish = self._closed = False
        self._hooks, self._thread = Hooks(), None
        self._hooks.take_exits(self.close)
        self._hooks.take_exceptions(self._uncaught, threads=self.size > 1)
        if self.size > 1:
            self._start(END_SIGNALS)

    def waiting(self, name: str) -> "Guard":
        """`with guard.waiting("all_gather h.3"):` around all that blocks on ranks; never nested."""
        self._state = (self._state[0] + 1, name, self._clock.seconds)
        return self

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        count, name, _ = self._state
        # a rank that leaves with an exception did not take part
        self._state = (count - (kind is not None), name, None)

    def meet(self, timeout: float) -> "Guard":
        """Wait for all ranks, the first time; each World() calls it. Sets `timeout` (seconds)."""
        self.timeout = timeout
        if self.size > 1 and self._multiple and not self._messages.can_talk:
            heard = self._messages.roll_call(None, timeout)
            exits = [(rank, *word) for rank, word in sorted(heard.items()) if word]
            absent = [rank for rank in range(self.size) if rank not in heard]
            for rank, status, doing in exits[:1]:
                line = f"rank {rank}: {doing}; the others wait in World(), which it never entered"
                self.end(status, line)
            if absent:
                never = f"{_ranks(absent)} never made one"
                self.end(1, f"World() did not complete within {timeout:g} s: {never}")
            self._messages.open()
            self._hooks.wake()
        return self

    def finish_on_signal(self) -> None:
        """Let the first SIGTERM or SIGUSR1 only set `stop_requested`; a second ends all ranks."""
        self._finish = True
        if self._thread is None:  # a world of one, with no listener so far
            self._start((signal.SIGTERM, signal.SIGUSR1))

    def close(self) -> None:
        """At exit, before MPI is finalized: wait until all ranks exit. The last calls of MPI."""
        if self._closed:
            return
        self._closed = True
        if self.size > 1 and self._multiple and not self._finalized():
            if not self._messages.can_talk:
                self._messages.roll_call((self._exit_status(), self._doing()), LEAVE)
            else:
                self._messages.say_exit()
                self._hooks.wake()
                self._all_gone.wait()
            self._messages.finish()
        self._stop.set()
        if self._thread is not None:
            self._hooks.wake()
            self._thread.join()

    def _start(self, signals) -> None:
        self._hooks.take_signals(signals)
        self._thread = threading.Thread(target=self._watch, name="zmpi guard", daemon=True)
        self._thread.start()
        self._ending.watch()

    def _uncaught(self, kind, error, trace) -> None:
        main = threading.current_thread() is threading.main_thread()
        if isinstance(error, Agreed) and main:
            if self.rank == 0:
                say(f"{self.line_start}{self.program}: error: {one_line(error)}\n")
            self._hooks.status, self._why = error.status, f" ({error})"
            raise SystemExit(error.status)  # raised in an excepthook, it sets the exit status
        if self.size == 1 and kind is KeyboardInterrupt and main and not hasattr(sys, "ps1"):
            say(f"{self.line_start}{self.program}: rank 0: ended by SIGINT\n")
        elif self.size == 1:
            self._hooks.report_as_before(kind, error, trace)
        elif main or kind is not SystemExit:  # in another thread, SystemExit ends only that thread
            status = 128 + signal.SIGINT if kind is KeyboardInterrupt else 1
            line = one_line(traceback.format_exception_only(kind, error)[-1].strip())
            self.end(
                status,
                f"rank {self.rank}: {line}",
                lambda: "".join(traceback.format_exception(kind, error, trace)),
            )

    def _watch(self) -> None:
        while not self._stop.is_set():
            only_signals = not self._messages.can_talk and (self._multiple or self.size == 1)
            for number in self._hooks.heard(None if only_signals else POLL):
                self._signalled(number)
            self._clock.look()
            if not self._finalized():
                self._messages.receive()
                self._judge()

    def _signalled(self, number: int) -> None:
        if self._finish and number != signal.SIGINT and not self.stop_requested:
            self.stop_requested = number
        else:
            if self.size > 1 and not self._messages.can_talk:
                rest(ANSWER)  # it may come from the launcher, after another rank aborted
            self.end(128 + number, f"rank {self.rank}: ended by {signal.Signals(number).name}")

    def _judge(self) -> None:
        """Check whether all have exited, a rank deserted the others, or a wait timed out."""
        exited = self._messages.exited
        if len(exited) == self.size:
            self._all_gone.set()
        if self._messages.abandoned:
            fault = f"the others wait in {self._messages.abandoned}, which it never entered"
            self.end(self._exit_status(), f"rank {self.rank}: {self._doing()}; {fault}")
        count, name, entered = self._state
        now = self._clock.seconds
        if entered is None or self._ending.begun:
            return
        deserters = [
            rank
            for rank, (reached, heard) in exited.items()
            if reached < count and now - max(heard, entered) > STAND
        ]
        if deserters and self._told != count:
            self._told = count
            self._messages.say_abandoned(min(deserters), name)
        if now - entered > self.timeout:
            self.end(1, "", lambda: self._report(count, name))

    def _exit_status(self) -> int:
        """All ranks' status when this one exits alone: its own, or 1 if that is 0 or unknown."""
        return (self._hooks.status or 0) & 255 or 1

    def _doing(self) -> str:
        count, name, entered = self._state
        if self._closed:
            status = self._hooks.status
            with_status = "" if status is None else f" with status {status}"
            return f"exited{with_status}{self._why} after {name}"
        if entered is not None:
            return f"in {name} (wait {count}) for {self._clock.seconds - entered:.1f} s"
        return f"outside, after {name} (wait {count})"

    def _report(self, count: int, name: str) -> str:
        """Ask every rank where it is: which never arrived at this wait, and a line per rank."""
        opening = f"{self.program}: {name} did not complete within {self.timeout:g} s: "
        if not self._messages.can_talk:
            alone = "the other ranks cannot be asked (no MPI_THREAD_MULTIPLE)"
            return f"{opening}rank {self.rank} is waiting in it; {alone}\n"
        answers = self._messages.ask_all(ANSWER)
        # Ranks that wait for the missing one in other groups' collectives are behind as well.
        least = min((reached for reached, _ in answers.values()), default=count)
        behind = least if least < count else -1
        absent = [rank for rank in sorted(answers) if answers[rank][0] == behind]
        silent = [rank for rank in range(self.size) if rank not in answers]
        verdict = [f"{_ranks(absent)} never arrived"] if absent else []
        verdict += [f"no answer from {_ranks(silent)}"] if silent else []
        lines = [opening + ("; ".join(verdict) or "all ranks arrived")]
        lines += [
            f"  rank {rank}: {answers.get(rank, (0, 'no answer'))[1]}" for rank in range(self.size)
        ]
        return "\n".join(lines) + "\n"

    def end(self, status: int, line: str, text=lambda: "") -> None:
        """End all ranks with `status`; one prints text() and the line.

        Returns only on the guard's own thread.
        """

        def words(others):
            lines = [f"{self.program}: {one}\n" for one in [line, *others] if one]
            return self.line_start + text() + "".join(lines)

        self._ending.end(status, line, words)
        while threading.current_thread() is not self._thread:
            rest(POLL)


def _ranks(ranks: list) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
