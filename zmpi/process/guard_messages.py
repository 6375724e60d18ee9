"""The watchdog's protocol: the messages that ranks' guards exchange, and what this one received.

    message    from -> to                                content                     kept in
    claim      a rank that found a fault -> all          its error line              claims
    ask        a rank that waited too long -> all        (a request for an answer)
    answer     the rank that was asked -> the asker      waits entered, whereabouts  answers
    exit       an exiting rank -> all                    waits entered               exited
    abandoned  a rank left waiting -> the exited rank    the collective it waits in  abandoned
    roll call  every rank -> all, over the world's own   None: it makes a World; or  (returned)
               communicator, before there is a private   (status, how it exited)

A message is a tuple (name, sender's rank, content...). This file only probes and tests: a blocking
MPI call would occupy a core. guard.py decides what to do about a message.
"""

import ctypes
import threading

from zmpi.process.clock import running

PAUSE = 0.01  # seconds between two polls for an answer
LAST = 1.0  # seconds for others to receive what an exiting rank has sent
ROLL_CALL = 24242  # tag of the only message on the world's own communicator


class GuardMessages:
    """Sends this guard's messages, and keeps those it received.

    comm: the communicator of all ranks; whereabouts(): (waits entered, what this rank is doing),
    the answer to `ask`; clock: the guard's RunningClock.
    """

    def __init__(self, comm, whereabouts, clock):
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.claims = {}  # rank: line
        self.answers = {}  # rank: (waits entered, what it is doing)
        self.exited = {}  # rank: (waits entered, time received)
        self.abandoned = None  # the collective in which others wait for this exited rank
        self._comm, self._whereabouts, self._clock = comm, whereabouts, clock
        self._private = None  # the duplicate communicator that the guards use
        self._sent = []  # requests, each with its message
        self._sending = threading.Lock()  # the main thread and the guard's both send

    @property
    def can_talk(self) -> bool:
        """Whether all ranks have met, so that their guards can exchange messages."""
        return self._private is not None

    def open(self) -> None:
        """Make the private communicator. Collective and blocking: only after a full roll call."""
        self._private = self._comm.Dup()

    def roll_call(self, word, seconds: float) -> dict:
        """Exchange a word with all ranks: None (it makes a World) or (status, how it exited).

        Returns {rank: word}. Polls, since a blocking Dup could not say which rank is missing. A
        rank that makes a World stops at the first exit; a rank that exits waits for all.
        """
        heard = {self.rank: None}
        self._send(self._comm, word, range(self.size), ROLL_CALL)
        for _ in running(seconds, PAUSE / 10):
            for rank in range(self.size):
                if rank not in heard and self._comm.iprobe(source=rank, tag=ROLL_CALL):
                    heard[rank] = self._comm.recv(source=rank, tag=ROLL_CALL)
            if len(heard) == self.size or (not word and any(heard.values())):
                break
        return heard

    def claim(self, line: str) -> None:
        """Tell all ranks that this one found a fault."""
        self.claims[self.rank] = line
        self._tell("claim", range(self.size), line)

    def ask_all(self, seconds: float) -> dict:
        """rank -> (waits entered, what it is doing), for all ranks that answer within `seconds`."""
        self.answers = {self.rank: self._whereabouts()}
        self._tell("ask", range(self.size))
        self.listen(seconds, self.answers)
        return self.answers

    def say_exit(self) -> None:
        """Tell all ranks that this one exits."""
        count, _ = self._whereabouts()
        self.exited[self.rank] = (count, self._clock.seconds)
        self._tell("exit", range(self.size), count)

    def say_abandoned(self, rank: int, name: str) -> None:
        """Tell an exited rank that this one waits in a collective which that rank never entered."""
        self._tell("abandoned", [rank], name)

    def receive(self) -> None:
        """Receive all messages that have arrived."""
        while self._private is not None and (message := self._private.improbe()) is not None:
            match message.recv():
                case "claim", rank, line:
                    self.claims[rank] = line
                case "ask", rank:
                    self._tell("answer", [rank], *self._whereabouts())
                case "answer", rank, count, doing:
                    self.answers[rank] = (count, doing)
                case "exit", rank, count:
                    self.exited[rank] = (count, self._clock.seconds)
                case "abandoned", _, name:
                    self.abandoned = name

    def listen(self, seconds: float, heard: dict) -> None:
        """Receive for `seconds`, or until `heard` has every rank."""
        for _ in running(seconds, PAUSE):
            self.receive()
            if len(heard) == self.size:
                break

    def finish(self) -> None:
        """Complete the sends, at exit. Open ones are never freed: Python ends before MPI does."""
        for _ in running(LAST, PAUSE):
            with self._sending:
                self._drop_complete()
            if not self._sent:
                return
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._sent))

    def _drop_complete(self) -> None:
        self._sent = [request for request in self._sent if not request.Test()]

    def _tell(self, what: str, ranks, *facts) -> None:
        self._send(self._private, (what, self.rank, *facts), ranks)

    def _send(self, comm, message, ranks, tag=0) -> None:
        """Start to send. A request holds its message, so it is kept until complete."""
        with self._sending:
            self._drop_complete()
            self._sent += [
                comm.isend(message, dest=rank, tag=tag) for rank in ranks if rank != self.rank
            ]
