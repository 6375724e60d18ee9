"""Two nodes of two ranks in the box of benchmarks/cluster.py: the network between them is TCP."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from faults.nodes import CLUSTER, ROOT, strike, wrong

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


@pytest.fixture(scope="module", autouse=True)
def permitted():
    """Skip all where this machine permits no box, with the line that says why."""
    if (tried := box("-c", "")).returncode == 2:
        pytest.skip(tried.stderr.strip())


def test_the_promises_are_kept_over_a_network():
    ended = box("-m", "zmpi.verify", "--device", "cpu", "--model", BIGRAM)
    assert ended.returncode == 0 and "all promises kept" in ended.stdout, ended.stderr


def test_the_doctor_tells_nodes_apart(tmp_path):
    ended = box("-m", "zmpi.doctor", "--json", tmp_path / "doctor.json")
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert [(rank["node"], rank["host"]) for rank in report["ranks"]] == [
        (0, "node0"),
        (0, "node0"),
        (1, "node1"),
        (1, "node1"),
    ], ended.stderr
    fastest = {
        name: max(sent / seconds for sent, seconds in links["all_gather"])
        for name, links in report["parts"].items()
    }
    # What a node can take at once (BURST) lets short messages exceed the line rate; 16 MiB do not.
    sent, seconds = report["parts"]["between nodes"]["all_gather"][-1]
    assert sent / seconds < 125e6 < fastest["within node 0"]


def test_a_checkpoint_of_two_nodes_is_read_by_one_and_by_the_other(tmp_path):
    """Losses and weights over the network are those of one node, bit for bit."""
    logs = {}
    for name, flags in {"two": ("--rate", "1gbit"), "one": ("--nodes", "1", "--ppn", "4")}.items():
        run = [
            "-m",
            "zmpi.train",
            *SMALL,
            "--reduction",
            "ordered",
            "--checkpoint",
            tmp_path / name,
        ]
        logs[name] = tmp_path / f"{name}.jsonl"
        more = ["--steps", "3", "--save-every", "3", "--log", logs[name]]
        ended = box(*run, *more, flags=flags)
        assert ended.returncode == 0, ended.stderr
        crossed = tmp_path / ("one" if name == "two" else "two")
    steps = {
        name: [(row.get("loss"), row.get("grad_norm")) for row in map(json.loads, log.open())]
        for name, log in logs.items()
    }
    assert steps["two"] == steps["one"] and len(steps["two"]) >= 3
    crossed = ["-m", "zmpi.train", "--device", "cpu", "--checkpoint", tmp_path / "one", "--resume"]
    ended = box(*crossed, "--steps", "4")
    assert ended.returncode == 0, ended.stderr


def test_a_link_that_is_cut_ends_all_ranks_with_a_line_that_names_the_silent_ones():
    ended = strike("link", "gather")
    assert not wrong("link", ended), ended.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_box_that_is_ended_leaves_nothing_behind(number):
    mark = f"box-{os.getpid()}-{number}"
    sleeper = "import time; print('up', flush=True); time.sleep(600)"
    command = [sys.executable, CLUSTER, "--", sys.executable, "-c", sleeper, mark]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as running:
        assert "up" in running.stdout.readline()
        running.send_signal(number)
        running.wait(timeout=30)
    until = time.monotonic() + 5
    while (left := processes_with(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


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
