"""The guard in small worlds of raw mpi4py: the cases that the table of faults does not have."""

import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from faults.table import AT_ONCE
from mpirun import ROOT, run_world

HEAD = """
import os, signal, sys, threading, time, warnings
from mpi4py import MPI
from zmpi.process.errors import Agreed, UsageError
from zmpi.process.guard import arm
comm, rank = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
guard = arm(comm, comm.Abort, MPI.Is_finalized, MPI.Query_thread() == MPI.THREAD_MULTIPLE)
def all_gather(name):
    with guard.waiting(f"all_gather {name}"):
        return comm.allgather(rank)
"""
MEET = "guard.meet(60)\nall_gather('first')\n"


@dataclass(frozen=True, eq=False)
class Script:
    """A script that every rank of a world runs, after HEAD and what comes before that."""

    body: str
    size: int = 3
    before: str = ""
    environment: dict = field(default_factory=dict)

    def run(self):
        return run_world(
            self.size, ["-c", self.before + HEAD + self.body], timeout=60, **self.environment
        )


@dataclass(frozen=True)
class End:
    status: int
    lines: list  # zmpi's own
    output: str  # all there is
    size: int


def world(*scripts):
    """The test gets `end`, how the script's world ended; once for each of several scripts."""
    return pytest.mark.parametrize(
        "end", scripts, indirect=True, ids=range(len(scripts)) if len(scripts) > 1 else ["world"]
    )


@pytest.fixture(scope="module")
def started(request):
    """The worlds of all tests that were asked for, some at a time: they mostly wait."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tests = [
            item
            for item in request.session.items
            if item.path == request.path and "end" in item.fixturenames
        ]
        scripts = [item.callspec.params["end"] for item in tests]
        yield {script: pool.submit(script.run) for script in scripts}


@pytest.fixture
def end(request, started):
    ended = started[request.param].result()
    assert not ended.left, ended.output
    lines = [line for line in ended.output.splitlines() if line.startswith("zmpi: ")]
    return End(ended.status, lines, ended.output, request.param.size)


@world(Script(MEET + "raise UsageError('--heads: 7 does not divide width 64')"))
def test_a_usage_error_of_all_ranks_is_one_line_and_status_2(end):
    assert (end.status, end.lines) == (2, ["zmpi: error: --heads: 7 does not divide width 64"]), (
        end.output
    )
    assert "Traceback" not in end.output


@world(Script("raise Agreed('the loss is nan')"))
def test_an_agreed_error_before_any_world_is_one_line_too(end):
    assert (end.status, end.lines) == (1, ["zmpi: error: the loss is nan"]), end.output
    assert "Traceback" not in end.output


@world(Script(MEET + "if rank == 1: raise UsageError('FILE: unreadable')\nall_gather('next')"))
def test_an_agreed_error_that_only_one_rank_raises_is_told_as_that_ranks_exit(end):
    assert (end.status, len(end.lines)) == (2, 1), end.output
    assert end.lines[0].startswith(
        "zmpi: rank 1: exited with status 2 (FILE: unreadable) after all_gather first;"
    )


BAR = (
    MEET
    + "guard.line_start = '\\n'\n"
    + "sys.stderr.write('50% |#####    |'); comm.Barrier(); time.sleep(0.2)\n"
)


@world(
    Script(BAR + "raise Agreed('over')"),
    Script(BAR + "os.kill(os.getpid(), signal.SIGTERM); time.sleep(100)"),
)
def test_a_message_does_not_stand_behind_a_progress_bar(end):
    assert end.lines in (["zmpi: error: over"], ["zmpi: rank 0: ended by SIGTERM"]), end.output


@world(Script(MEET + "{}['x']"))
def test_the_same_exception_on_all_ranks_is_one_traceback(end):
    assert (end.status, end.lines) == (1, ["zmpi: rank 0: KeyError: 'x'"]), end.output
    assert end.output.count("Traceback") == 1


@world(Script(MEET + "{}[rank]"))
def test_different_exceptions_at_the_same_time_are_a_line_each(end):
    assert (end.status, end.lines) == (1, [f"zmpi: rank {n}: KeyError: {n}" for n in range(3)]), (
        end.output
    )


@world(Script("if rank == 2: raise OSError('no data')\n" + MEET))
def test_an_exception_before_the_first_world_ends_all(end):
    assert (end.status, end.lines) == (1, ["zmpi: rank 2: OSError: no data"]), end.output


@world(
    Script("if rank == 1: sys.exit(4)\n" + MEET + "all_gather('next')"),
    Script("if rank == 1: sys.exit(4)\nif rank == 2: time.sleep(100)\n" + MEET),
)
def test_an_exit_before_the_first_world_is_told(end):
    assert end.status == 4
    assert end.lines == [
        "zmpi: rank 1: exited with status 4 after the start;"
        " the others wait in World(), which it never entered"
    ]


@world(Script("if rank == 1: time.sleep(100)\nguard.meet(3)"))
def test_a_rank_that_never_makes_a_world_is_named(end):
    assert (end.status, end.lines) == (
        1,
        ["zmpi: World() did not complete within 3 s: rank 1 never made one"],
    ), end.output


@world(Script(MEET + "sys.exit(3)"), Script("sys.exit(3)"), Script(MEET + "raise SystemExit(3)"))
def test_all_ranks_may_exit_with_a_status_of_their_choice(end):
    assert (end.status, end.lines) == (3, []), end.output


@world(
    Script(
        MEET
        + "with guard.waiting('all_gather next'):\n"
        + "    sys.exit(3) if rank == 1 else comm.allgather(rank)"
    )
)
def test_who_leaves_a_wait_by_an_exit_has_not_taken_part_in_it(end):
    assert (end.status, len(end.lines)) == (3, 1), end.output
    assert "; the others wait in all_gather next" in end.lines[0]


@world(Script(MEET + "if rank == 2: raise SystemExit(256)\nall_gather('next')"))
def test_who_exits_alone_ends_the_world_with_a_status_other_than_0(end):
    """The system turns 256 into 0, and the guard does not see the status of a raised SystemExit."""
    assert (end.status, len(end.lines)) == (1, 1), end.output
    assert end.lines[0].startswith("zmpi: rank 2: exited after all_gather first;")


@world(Script(MEET + "os.kill(os.getpid(), signal.SIGINT); time.sleep(100)"))
def test_a_signal_to_all_ranks_is_one_line(end):
    """Which is what Ctrl-C in a terminal is: the launcher passes it on to every rank."""
    assert (end.status, end.lines) == (128 + signal.SIGINT, ["zmpi: rank 0: ended by SIGINT"]), (
        end.output
    )


@world(
    Script(
        MEET
        + """
mapped = [line.split()[-1] for line in open('/proc/self/maps') if '/dev/shm/mpich' in line]
paths = sorted(set(filter(os.path.exists, mapped)))
os.write(1, ' '.join(['mapped', *paths, '\\n']).encode())  # in one piece: ranks share the pipe
all_gather('after')
1 // (rank - 1)
"""
    )
)
def test_an_aborted_world_leaves_no_shared_memory_behind(end):
    """MPICH removes its file in MPI_Finalize, which MPI_Abort skips. Open MPI leaves none."""
    said = [line.split()[1:] for line in end.output.splitlines() if line.startswith("mapped")]
    assert len(said) == end.size and end.status == 1, end.output
    if not any(said):
        pytest.skip("this MPI has no file of that name in /dev/shm")
    assert not any(Path(path).exists() for path in said[0])


def test_ctrl_c_ends_one_process_with_one_line_too():
    """Also if this test runs in a background shell that ignores the signal: children inherit."""
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code = heard + HEAD + "os.kill(os.getpid(), signal.SIGINT); time.sleep(100)"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "zmpi: rank 0: ended by SIGINT\n")


PDB = ["-m", "pdb", "-c", "continue", "-c", "quit"]


def test_a_script_and_a_command_run_under_the_debugger(tmp_path):
    """pdb runs them in a __main__ without __spec__, and keeps the stdout of its start."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os; from zmpi import World; os.write(1, b'rank %d\\n' % World(device='cpu').rank)"
    )
    ended = run_world(2, [*PDB, script], timeout=60)
    assert ended.status == 0 and "Error" not in ended.output, ended.output
    assert sorted(re.findall(r"^rank .*$", ended.output, re.MULTILINE)) == ["rank 0", "rank 1"]
    wrong_flag = [sys.executable, *PDB, "-m", "zmpi.train", "nonsense"]
    ended = subprocess.run(
        wrong_flag, cwd=ROOT, text=True, capture_output=True, check=False, timeout=60
    )
    assert "UsageError: nonsense: no such flag" in ended.stdout + ended.stderr
    assert "detached" not in ended.stdout + ended.stderr


@world(
    Script(
        MEET
        + "t = threading.Thread(target=lambda: 1 // (rank - 1))\n"
        + "t.start(); t.join(); all_gather('next'); time.sleep(9)"
    )
)
def test_an_exception_in_another_thread_ends_all(end):
    assert (end.status, len(end.lines)) == (1, 1), end.output
    assert end.lines[0].startswith("zmpi: rank 1: ZeroDivisionError: ")


@world(
    Script(
        MEET
        + "guard.timeout = 2\nif rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        + "all_gather('next')"
    )
)
def test_a_stopped_rank_gives_no_answer(end):
    """SIGSTOP stops all threads, like a dead node or a system call that never returns."""
    assert (end.status, end.lines) == (
        1,
        ["zmpi: all_gather next did not complete within 2 s: no answer from rank 1"],
    )
    assert "  rank 1: no answer\n" in end.output


SUSPEND = """
import subprocess
pids = " ".join(map(str, comm.allgather(os.getpid())))
def suspend_all(seconds):
    command = f"kill -STOP {pids}; sleep {seconds}; kill -CONT {pids}"
    if rank == 1: subprocess.Popen(["sh", "-c", command])
def work(seconds):  # in small parts, as a suspended process would go on with it
    for _ in range(int(seconds * 50)): time.sleep(0.02)
"""


@world(
    Script(
        f"{MEET}guard.timeout = 2\n{SUSPEND}suspend_all(4)\nif rank == 1: work(1)\n"
        "all_gather('next')"
    ),
    Script(f"{SUSPEND}suspend_all(4)\nif rank == 1: work(1)\nguard.meet(2)\nall_gather('first')"),
)
def test_a_job_that_was_suspended_as_a_whole_goes_on(end):
    """SIGSTOP to all ranks for longer than the timeout: none is late, though the clock says so."""
    assert (end.status, end.lines) == (0, []), end.output


PATIENCE = """
import zmpi.process.ending as ending
ending.PATIENCE = 3
class Stops(Exception):
    told = False
    def __str__(self):
        if guard._ending.begun and not self.told:
            self.told = True
            suspend_all(5)
            work(0.5)
        return "out of luck"
if rank == 1: raise Stops()
all_gather("next")
"""


@world(Script(MEET + SUSPEND + PATIENCE))
def test_a_job_that_is_suspended_while_it_ends_still_says_why(end):
    """The reporting rank is stopped within its traceback, for longer than the others' patience."""
    assert (end.status, end.lines) == (1, ["zmpi: rank 1: Stops: out of luck"]), end.output


@world(Script(MEET + "guard.timeout = 2\nif rank == 0: time.sleep(100)\nall_gather('next')"))
def test_the_report_of_a_timeout_has_a_line_for_every_rank(end):
    assert (end.status, end.lines) == (
        1,
        ["zmpi: all_gather next did not complete within 2 s: rank 0 never arrived"],
    )
    assert "  rank 0: outside, after all_gather first (wait 1)\n" in end.output
    assert "  rank 1: in all_gather next (wait 2) for 2." in end.output
    assert "  rank 2: in all_gather next (wait 2) for 2." in end.output


FAULTS = (
    "raise ValueError('x')",
    "time.sleep(100)",
    "sys.exit(3)",
    "os.kill(os.getpid(), signal.SIGTERM)",
)
ALONE = [
    Script(f"{MEET}guard.timeout = 2\nif rank == 1: {fault}\nall_gather('next')")
    for fault in FAULTS
]


@world(
    *(Script(script.body, environment={"MPI4PY_RC_THREAD_LEVEL": "serialized"}) for script in ALONE)
)
def test_without_threads_in_mpi_nobody_hangs_either(end):
    """Ranks cannot ask each other then: who exits alone is not told from who sleeps."""
    assert end.status and len(end.lines) == 1, end.output


FORKED = """
warnings.simplefilter("ignore")  # from 3.12 on Python warns of a fork beside a thread
child = os.fork()
if child == 0:
    if rank == 1: os.kill(os.getpid(), signal.SIGTERM)
    if rank == 2: sys.excepthook(ValueError, ValueError("a child's own"), None)
    os._exit(5)
all_gather("next")
os.write(1, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\\n".encode())
"""


@world(Script(MEET + FORKED))
def test_a_forked_child_is_no_rank(end):
    assert (end.status, end.lines) == (0, []), end.output
    assert sorted(end.output.split("\n")) == ["", "-15", "5", "5", "ValueError: a child's own"]


FINISH = """
guard.finish_on_signal()
for _ in range(2):
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(1)
    # in one piece, since other ranks write too
    os.write(1, f"asked to stop by {guard.stop_requested}\\n".encode())
"""


@world(Script(MEET + FINISH, 1), Script(MEET + FINISH, 3))
def test_the_first_signal_may_be_kept_for_the_end_of_a_step(end):
    """With checkpoints a run saves before it ends; a second signal ends it without waiting."""
    assert (end.status, end.lines) == (128 + signal.SIGUSR1, ["zmpi: rank 0: ended by SIGUSR1"]), (
        end.output
    )
    assert end.output.count(f"asked to stop by {int(signal.SIGUSR1)}") == end.size


OWN = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('mine', flush=True))\n"
TERMINATE = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(1)\n"


@world(Script(MEET + OWN + TERMINATE), Script(MEET + TERMINATE, before=OWN))
def test_a_scripts_own_signal_handler_stays(end):
    assert (end.status, end.lines, end.output.count("mine")) == (0, [], 3), end.output


@world(
    Script(MEET + "guard.close(); MPI.Finalize()"), Script(MEET + "MPI.Finalize(); time.sleep(0.5)")
)
def test_a_script_may_finalize_mpi_itself(end):
    assert (end.status, end.lines) == (0, []), end.output


@world(Script(MEET + "assert threading.active_count() == 1\nraise ValueError('x')", 1))
def test_a_world_of_one_is_an_ordinary_python(end):
    assert (end.status, end.lines) == (1, []), end.output
    assert end.output.count("Traceback") == 1 and "ValueError: x\n" in end.output
