"""Nobody hangs (promise P4): a fault on one rank ends all ranks, with one message that names the rank.

    fault on one rank              who finds it                       who speaks
    exception, signal              its hook, its thread               that rank, which then aborts the world
    sys.exit alone                 whoever stands 5 s in a wait that  the rank that exited: it waits in its
                                   it never entered                   atexit handler until all ranks are there
    sleep, lost message            whoever stands for `timeout`       the lowest of those who stand

One thread per rank looks at a private communicator ten times a second and at the wake-up descriptor of the signals. It
runs while the main thread sleeps or stands inside MPI, so every rank whose interpreter is alive answers. It only ever
probes: a blocking MPI call would hold a core. Where several ranks find a fault together, one speaks (`_may_speak`).

The module knows no MPI library: `zmpi/comm.py` hands it a communicator.
"""
import atexit
import faulthandler
import os
import select
import signal
import sys
import threading
import time
import traceback

POLL = 0.1  # seconds between two looks at the private communicator
SETTLE = 0.5  # seconds in which ranks that find a fault together learn of each other; several POLLs
ANSWER = 2.0  # seconds in which a living rank says where it stands
STAND = 5.0  # seconds in a wait which an exited rank never entered
DRAIN = 0.1  # seconds left to the launcher to carry the last line out
PATIENCE = 5.0  # seconds after which a rank that is ending but cannot (its stderr is blocked, say) dies without a word
ROLL_CALL = 24242  # tag of the one message each rank sends over the world's communicator, in its first World()


class Agreed(Exception):
    """An error which all ranks raise together: rank 0 prints it as one line, no traceback, and all exit with `status`."""

    status = 1


class UsageError(Agreed):
    """Something asked for that cannot be done; status 2."""

    status = 2


_guard = None  # one per process: excepthook, signals and exit belong to the process, however many Worlds it makes


def arm(comm, abort, finalized, multiple: bool) -> "Guard":
    """The process's Guard, made and hooked in by the first call; no message is sent.

    comm: the communicator of all ranks; abort(status): ends them all; finalized(): is MPI over; multiple: may several
    threads call MPI. Without `multiple` the ranks cannot ask each other: each knows its own waits only.
    """
    global _guard
    if _guard is None:
        _guard = Guard(comm, abort, finalized, multiple)
        _guard._hook_in()
    return _guard


class Guard:
    """What this rank knows of itself and of the others. Made by `arm`."""

    def __init__(self, comm, abort, finalized, multiple: bool):
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.program = "zmpi"  # opens every line
        self.timeout = 300.0  # seconds
        self.stop_requested = 0  # signal number, see finish_on_signal
        self._comm, self._abort, self._finalized, self._multiple = comm, abort, finalized, multiple
        self._private = None  # the duplicate on which the threads talk, once all ranks have met
        # (waits entered, name of the last one, time entered or 0.0 outside). One tuple, so that the thread reads all three
        # of one moment. Ranks enter the same waits in the same order, so the first number compares them.
        self._state = (0, "the start", 0.0)
        self._status, self._why = None, ""  # how this rank is exiting
        self._gone = {}  # rank -> (waits entered, time heard) of those who are exiting
        self._claims = {}  # rank -> line of those who found a fault
        self._answers = {}  # rank -> (waits entered, what it is doing)
        self._told = 0  # the wait for which an exited rank was told that this one stands
        self._all_gone, self._stop, self._ending = threading.Event(), threading.Event(), threading.Lock()
        self._finish, self._closed, self._ear = False, False, None

    # --- the hot path -------------------------------------------------------------------------------------------------
    def waiting(self, name: str) -> "Guard":
        """`with guard.waiting("all_gather h.3"):` around everything that blocks on other ranks. Does not nest."""
        self._state = (self._state[0] + 1, name, time.monotonic())
        return self

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        count, name, _ = self._state
        self._state = (count, name, 0.0)

    # --- a rank's life ------------------------------------------------------------------------------------------------
    def meet(self, timeout: float) -> "Guard":
        """Wait for all ranks, the first time; every World() calls it. `timeout` (seconds) holds from now on."""
        self.timeout = timeout
        if self.size > 1 and self._multiple and self._private is None:
            absent = self._roll_call()
            if absent:
                self._end(1, lambda: f"{self.program}: World() did not complete within {timeout:g} s: "
                                     f"{_ranks(sorted(absent))} never made one\n")
            self._private = self._comm.Dup()
            self._wake()
        return self

    def _roll_call(self) -> set:
        """Say "here" to all; the ranks not heard of within the timeout. By polling: a blocking Dup could name nobody."""
        others = set(range(self.size)) - {self.rank}
        sent = [self._comm.isend(None, dest=rank, tag=ROLL_CALL) for rank in others]
        end = time.monotonic() + self.timeout
        while others and time.monotonic() < end:
            for rank in [rank for rank in others if self._comm.iprobe(source=rank, tag=ROLL_CALL)]:
                self._comm.recv(source=rank, tag=ROLL_CALL)
                others.remove(rank)
            time.sleep(0.001)
        if not others:
            for request in sent:
                request.wait()
        return others

    def finish_on_signal(self) -> None:
        """From now on the first SIGTERM or SIGUSR1 only sets `stop_requested`; the second ends the world at once."""
        self._finish = True
        if self._ear is None:  # a world of one, which nothing watched so far
            self._listen_to_signals()

    def close(self) -> None:
        """Tell the others that this rank is done, and wait until all are; the guard calls no MPI afterwards.

        Called at exit, before MPI is finalized. A rank that exits before its first World() meets the others here, so
        that those who go on can learn of it.
        """
        if self._closed:
            return
        self._closed = True
        if self.size > 1 and self._multiple and not self._finalized():
            if self._private is not None or not self._roll_call():
                self._private = self._private or self._comm.Dup()
                count = self._state[0]
                sent = self._tell("exit", set(range(self.size)) - {self.rank}, count)
                self._gone[self.rank] = (count, time.monotonic())
                self._wake()
                self._all_gone.wait()
                for request in sent:
                    request.wait()
        self._stop.set()
        if self._ear is not None:
            self._wake()
            self._thread.join()

    # --- hooks of the process -----------------------------------------------------------------------------------------
    def _hook_in(self) -> None:
        self._hooks = sys.excepthook, threading.excepthook, sys.exit
        sys.excepthook = self._uncaught
        if self.size > 1:
            threading.excepthook = self._uncaught_in_thread
            sys.exit = self._exit
            self._listen_to_signals()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._leave_child_alone)

    def _listen_to_signals(self) -> None:
        """Start the thread, and let signals at their default action wake it; a script's own handlers stay."""
        self._ear, self._voice = os.pipe()
        os.set_blocking(self._voice, False)
        if threading.current_thread() is threading.main_thread():
            wanted = (signal.SIGTERM, signal.SIGUSR1) + (signal.SIGINT,) * (self.size > 1)
            for number in wanted:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    signal.signal(number, _by_the_thread)
            signal.set_wakeup_fd(self._voice, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="zmpi guard", daemon=True)
        self._thread.start()

    def _leave_child_alone(self) -> None:
        """A forked child is no rank: its faults are its own."""
        self._closed = True
        sys.excepthook, threading.excepthook, sys.exit = self._hooks
        if self._ear is not None:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                if signal.getsignal(number) is _by_the_thread:
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def _exit(self, status=None):
        """sys.exit that remembers: no atexit handler is told the status."""
        self._status = status if isinstance(status, int) else int(status is not None)
        raise SystemExit(status)

    def _uncaught(self, kind, error, trace) -> None:
        if isinstance(error, Agreed):
            if self.rank == 0:
                self._print(f"{self.program}: error: {error}\n")
            self._status, self._why = error.status, f" ({error})"
            raise SystemExit(error.status)  # from an excepthook, Python exits with it
        if self.size == 1:
            self._hooks[0](kind, error, trace)
            return
        line = traceback.format_exception_only(kind, error)[-1].strip()
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        self._end(status, lambda: "".join(traceback.format_exception(kind, error, trace)) + self._own(line), line)

    def _uncaught_in_thread(self, args) -> None:
        if args.exc_type is not SystemExit:  # which ends its own thread only
            line = traceback.format_exception_only(args.exc_type, args.exc_value)[-1].strip()
            trace = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
            self._end(1, lambda: trace + self._own(line), line)

    # --- the thread ---------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        while not self._stop.is_set():
            quiet = self._private is None and (self._multiple or self.size == 1)  # nothing to look at but signals
            for number in self._signals(None if quiet else POLL):
                self._signalled(number)
            if not self._finalized():
                self._receive()
                self._judge()

    def _signals(self, seconds) -> list:
        ready, _, _ = select.select([self._ear], [], [], seconds)
        numbers = os.read(self._ear, 512) if ready else b""
        return [number for number in numbers if number and signal.getsignal(number) is _by_the_thread]

    def _wake(self) -> None:
        os.write(self._voice, b"\0")

    def _signalled(self, number: int) -> None:
        if self._finish and number != signal.SIGINT and not self.stop_requested:
            self.stop_requested = number
        else:
            line = f"ended by {signal.Signals(number).name}"
            self._end(128 + number, lambda: self._own(line), line)

    def _tell(self, what: str, ranks, *facts) -> list:
        return [self._private.isend((what, self.rank, *facts), dest=rank) for rank in ranks if rank != self.rank]

    def _receive(self) -> None:
        while self._private is not None and (message := self._private.improbe()) is not None:
            match message.recv():
                case "claim", rank, line:
                    self._claims[rank] = line
                case "ask", rank:
                    self._tell("answer", [rank], self._state[0], self._doing())
                case "answer", rank, count, doing:
                    self._answers[rank] = (count, doing)
                case "exit", rank, count:
                    self._gone[rank] = (count, time.monotonic())
                case "stands", _, name:
                    line = f"{self._doing()}; the others stand in {name}, which it never entered"
                    self._end(self._status or 1, lambda line=line: self._own(line), line)

    def _judge(self) -> None:
        """Is it time to leave, has an exited rank left this one standing, is the time over."""
        if len(self._gone) == self.size:
            self._all_gone.set()
        count, name, entered = self._state
        now = time.monotonic()
        if not entered or self._ending.locked():
            return
        deserters = [rank for rank, (reached, heard) in self._gone.items()
                     if reached < count and now - max(heard, entered) > STAND]
        if deserters and self._told != count:
            self._told = count
            self._tell("stands", [min(deserters)], name)
        if now - entered > self.timeout:
            self._end(1, lambda: self._report(count, name))

    def _doing(self) -> str:
        count, name, entered = self._state
        if self._closed:
            return f"exited{'' if self._status is None else f' with status {self._status}'}{self._why} after {name}"
        if entered:
            return f"in {name} (wait {count}) for {time.monotonic() - entered:.1f} s"
        return f"outside, after {name} (wait {count})"

    # --- the end ------------------------------------------------------------------------------------------------------
    def _report(self, count: int, name: str) -> str:
        """Ask every rank where it is; who never arrived at this wait, and a line for each rank."""
        self._answers = {self.rank: (count, self._doing())}
        self._tell("ask", range(self.size))
        self._listen(ANSWER, lambda: len(self._answers) == self.size)
        answers = [self._answers.get(rank, (None, f"no answer within {ANSWER:g} s")) for rank in range(self.size)]
        silent = [rank for rank, (reached, _) in enumerate(answers) if reached is None]
        absent = [rank for rank, (reached, _) in enumerate(answers) if reached is not None and reached < count]
        verdict = [f"{_ranks(absent)} never arrived"] * bool(absent) + [f"no answer from {_ranks(silent)}"] * bool(silent)
        verdict = "; ".join(verdict) or "all ranks arrived"
        return (f"{self.program}: {name} did not complete within {self.timeout:g} s: {verdict}\n"
                + "".join(f"  rank {rank}: {doing}\n" for rank, (_, doing) in enumerate(answers)))

    def _end(self, status: int, compose, line: str = "") -> None:
        """End all ranks with `status`; the one rank that may speak prints compose().

        Returns on the guard's own thread only, which goes on answering until it is killed.
        """
        if self._ending.acquire(blocking=False):
            faulthandler.dump_traceback_later(PATIENCE, exit=True, file=open(os.devnull, "w"))
            if self._may_speak(line):
                also = {rank: text for rank, text in sorted(self._claims.items()) if text not in ("", line)}
                self._print(compose() + "".join(f"{self.program}: rank {rank}: {also[rank]}\n" for rank in also))
                time.sleep(DRAIN)
                if self.size > 1:
                    self._abort(status)
                os._exit(status)
        while threading.current_thread() is not self._thread:
            time.sleep(POLL)

    def _may_speak(self, line: str) -> bool:
        """True on one of the ranks that found a fault: the first, and the lowest of those who find it together."""
        if self._private is None:  # they cannot ask each other: the lowest speaks first, and its abort ends the others
            time.sleep(min(self.rank * POLL, ANSWER))
            return True
        if self._claims:
            return False
        self._claims[self.rank] = line
        self._tell("claim", range(self.size), line)
        self._listen(SETTLE, lambda: False)
        return min(self._claims) == self.rank

    def _listen(self, seconds: float, enough) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not enough():
            self._receive()
            time.sleep(POLL / 10)

    def _own(self, line: str) -> str:
        return f"{self.program}: rank {self.rank}: {line}\n"

    def _print(self, text: str) -> None:
        """One write to stderr, then what the script itself had buffered; a closed terminal is no reason to go on."""
        for stream, last in ((sys.stderr, text), (sys.stdout, "")):
            try:
                stream.write(last)
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue


def _ranks(ranks) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _by_the_thread(number, frame) -> None:
    """The signal's Python handler: the thread has read the number from the wake-up descriptor."""
