"""Two nodes of two ranks in the box of benchmarks/cluster.py: the network between them is TCP."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from faults.nodes import CLUSTER, ROOT, strike, wrong

SLEEP = "import time; time.sleep(600)"
SMALL = ["--device", "cpu", "--layers", "1", "--width", "8", "--heads", "2", "--context", "8"]
SMALL += ["--micro-batch", "1"]
BIGRAM = f"{ROOT}/tests/own/bigram.py:Bigram"  # of all models the quickest to verify


def box(*command, flags=("--rate", "1gbit"), **environment):
    """How a command on all ranks of a box ended."""
    python = [sys.executable, CLUSTER, *flags, "--", sys.executable, *command]
    return subprocess.run(
        list(map(str, python)),
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


def train(*flags, **how):
    """How a run of zmpi.train in a box ended."""
    return box("-m", "zmpi.train", "--reduction", "ordered", *flags, **how)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """(name -> the future of how a box ended, the folder of files). Boxes do not meet: all at once.

    Skips all where this machine permits no box, with the line that says why.
    """
    if (tried := box("-c", "")).returncode == 2:
        pytest.skip(tried.stderr.strip())
    folder = tmp_path_factory.mktemp("boxes")
    one_node = ("--nodes", "1", "--ppn", "4")
    with ThreadPoolExecutor() as pool:

        def trained(name, *flags, **how):
            files = ["--checkpoint", folder / name, "--log", folder / f"{name}.jsonl"]
            return pool.submit(train, *SMALL, *files, *flags, **how)

        yield (
            {
                "verify": pool.submit(
                    box, "-m", "zmpi.verify", "--device", "cpu", "--model", BIGRAM
                ),
                "doctor": pool.submit(box, "-m", "zmpi.doctor", "--json", folder / "doctor.json"),
                "two": trained("two", "--steps", "3", "--save-every", "3"),
                "one": trained("one", "--steps", "3", "--save-every", "3", flags=one_node),
                "cut": pool.submit(strike, "link", "gather"),
            },
            folder,
        )


def test_the_promises_are_kept_over_a_network(started):
    ended = started[0]["verify"].result()
    assert ended.returncode == 0 and "all promises kept" in ended.stdout, ended.stderr


def test_the_doctor_tells_nodes_apart(started):
    ended = started[0]["doctor"].result()
    assert ended.returncode == 0, ended.stderr
    report = json.loads((started[1] / "doctor.json").read_text())
    places = [(rank["node"], rank["host"]) for rank in report["ranks"]]
    assert places == [(0, "node0"), (0, "node0"), (1, "node1"), (1, "node1")]
    fastest = max(
        sent / seconds for sent, seconds in report["parts"]["within node 0"]["all_gather"]
    )
    # A link may send BURST at once: short messages can exceed the line rate, 16 MiB cannot.
    sent, seconds = report["parts"]["between nodes"]["all_gather"][-1]
    assert sent / seconds < 125e6 < fastest


def test_a_checkpoint_of_two_nodes_and_of_one_are_the_same_run(started):
    """The same losses on one node as on two, bit for bit. Two ranks apart go on from one node."""
    ended, folder = started
    steps = {}
    for name in ("two", "one"):
        assert ended[name].result().returncode == 0, ended[name].result().stderr
        rows = map(json.loads, (folder / f"{name}.jsonl").open())
        steps[name] = [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
    assert steps["two"] == steps["one"] and len(steps["two"]) == 3
    flags = ["--device", "cpu", "--resume", "--steps", "4", "--checkpoint", folder / "one"]
    resumed = box("-m", "zmpi.train", *flags, flags=("--nodes", "2", "--ppn", "1"))
    assert resumed.returncode == 0, resumed.stderr


def test_a_link_that_is_cut_ends_all_ranks_with_a_line_that_names_the_silent_ones(started):
    ended = started[0]["cut"].result()
    assert not wrong("link", ended), ended.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_box_that_is_ended_leaves_nothing_behind(started, number):
    mark = f"box-{os.getpid()}-{number}"
    command = [sys.executable, str(CLUSTER), "--", sys.executable, "-c", SLEEP, mark]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
        # This one, the first process of the box, mpirun, and four ranks.
        assert wait_for(lambda: len(processes_with(mark)) >= 7)
        running.send_signal(number)
        running.wait(timeout=30)
    assert wait_for(lambda: not processes_with(mark))


def wait_for(condition, seconds=20):
    """Whether the condition came true."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


def processes_with(mark):
    found = subprocess.run(["pgrep", "-f", mark], capture_output=True, text=True, check=False)
    return found.stdout.split()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--rate", "fast", "--", "true"], "--rate: expected a rate like 100mbit or 1gbit"),
        (["--rate", "1gbit"], "expected -- and a command"),
        (["--nodes", "0", "--", "true"], "--nodes: expected 1 to 100"),
    ],
)
def test_a_box_that_cannot_be_made_is_one_line(flags, line):
    ended = subprocess.run(
        [sys.executable, str(CLUSTER), *flags], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith(f"cluster.py: error: {line}")
