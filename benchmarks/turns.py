"""Contenders take turns on one machine, so that all see the same speed of the moment.

Each contender is a world of its own processes. Between its turns a process sleeps on a socket read:
neither MPI nor gloo polls there. The driver half is `Contender`, the worker half `serve`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

ROOT = Path(__file__).resolve().parent.parent
SOCKET = "ZMPI_BENCHMARK_SOCKET"
START_S = 600  # seconds in which a world must be ready, and a turn be over
BARE = "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"  # KiB


def peak_bytes():
    """This process's peak resident memory since its program began (getrusage: since its fork)."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10


def bare_bytes():
    """The same of a Python that imported only itself."""
    return (
        int(
            subprocess.run(
                [sys.executable, "-c", BARE], capture_output=True, check=True, text=True
            ).stdout
        )
        << 10
    )


def end_in_order():
    """Let a driver that is told to end close its contenders first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


# ---- the driver ----------------------------------------------------------------------------------


class Contender:
    """A running world of `size` workers, each started as `python WORKER ARGUMENTS`."""

    def __init__(self, name, arguments, size, launched=False, environment=()):
        """`launched`: by mpirun; else the environment gives each its rank, as by torchrun."""
        self.name, self.size = name, size
        self.seconds, self.cpu, self.losses = [], [], []  # of every step so far
        self.peaks = []  # bytes, of each rank
        self._processes, self._workers = [], []
        self._folder = tempfile.TemporaryDirectory(prefix="turns-")
        self._log = open(f"{self._folder.name}/log", "w+b")  # noqa: SIM115  (closed at the end)
        path = f"{self._folder.name}/socket"
        settings = (
            os.environ
            | {"OMP_NUM_THREADS": "1", SOCKET: path, "PYTHONPATH": str(ROOT)}
            | dict(environment)
        )
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen(size)
                listener.settimeout(5)
                self._processes = self._start([sys.executable, *arguments], settings, launched)
                self._workers = [self._accept(listener) for _ in range(size)]
            self.imports = [
                hello["imports"] for hello in self._answers()
            ]  # peak bytes of each rank after its imports
            self._answers()  # ready
        except BaseException:
            self.close(at_once=True)
            raise

    def _start(self, command, settings, launched):
        def start(command, settings):
            quiet = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": self._log}
            return subprocess.Popen(command, env=settings, start_new_session=True, **quiet)

        if launched:
            mpirun = str(Path(sys.executable).parent / "mpirun")
            return [start([mpirun, "-n", str(self.size), *command], settings)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        world = {"WORLD_SIZE": str(self.size), "LOCAL_WORLD_SIZE": str(self.size)}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self.size))
        return [start(command, settings | world | rank) for rank in ranks]

    def _accept(self, listener):
        began = perf_counter()
        while True:
            try:
                connection = listener.accept()[0]
            except TimeoutError:
                if (
                    any(process.poll() is not None for process in self._processes)
                    or perf_counter() - began > START_S
                ):
                    self._fail()
                continue
            connection.settimeout(START_S)
            return connection.makefile("rw")

    def _answers(self):
        lines = [worker.readline() for worker in self._workers]
        if not all(lines):
            self._fail()
        return [json.loads(line) for line in lines]

    def _fail(self):
        self._log.seek(0)
        lines = [
            line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()
        ]
        raise RuntimeError(f"{self.name}: {lines[-1] if lines else 'ended without a word'}")

    def turn(self, steps):
        """Train `steps` steps; returns the seconds of each: the slowest rank's."""
        for worker in self._workers:
            worker.write(f"{steps}\n")
            worker.flush()
        answers = self._answers()
        seconds = [
            max(step) for step in zip(*(answer["seconds"] for answer in answers), strict=True)
        ]
        self.seconds += seconds
        self.cpu += [max(step) for step in zip(*(answer["cpu"] for answer in answers), strict=True)]
        self.losses += [
            sum(step) / self.size
            for step in zip(*(answer["losses"] for answer in answers), strict=True)
        ]
        self.peaks = [answer["peak"] for answer in answers]
        self.extra = answers[0]["extra"]
        return seconds

    def close(self, at_once=False):
        """End the world: its workers see their sockets close; those still alive are killed."""
        for worker in self._workers:
            worker.close()
        for process in self._processes:
            try:
                process.wait(0.1 if at_once else 20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._log.close()
        self._folder.cleanup()


# ---- the workers ---------------------------------------------------------------------------------


class Turns:
    """A worker's side. Make it after the imports; call `serve` when ready for the first step."""

    def __init__(self):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[SOCKET])
        self._file = self._socket.makefile("rw")
        self._say(imports=peak_bytes())

    def _say(self, **words):
        self._file.write(json.dumps(words) + "\n")
        self._file.flush()

    def serve(self, batches, train_step, extra=dict):
        """Take turns. train_step(inputs, targets) returns a loss; `extra()` is sent too."""
        self._say(ready=True)
        done = 0
        while line := self._file.readline():
            seconds, cpu, losses = [], [], []
            for _ in range(int(line)):
                batch = batches.of_step(done)
                began, cpu_began = perf_counter(), process_time()
                loss = train_step(*batch)
                seconds.append(perf_counter() - began)
                cpu.append(process_time() - cpu_began)
                losses.append(float(loss))
                done += 1
            self._say(seconds=seconds, cpu=cpu, losses=losses, peak=peak_bytes(), extra=extra())
