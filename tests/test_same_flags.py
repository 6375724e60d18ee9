"""Ranks with different flags end with one line that gives the flag and the ranks; none hangs."""

import sys
from importlib import import_module

import pytest
from mpirun import run_world

words = str.split

SMALL = words("--device cpu --layers 1 --width 8 --heads 2 --context 8 --micro-batch 1 --steps 2")
OPTIMIZER = """
from dataclasses import dataclass
from zmpi.numbers.optim import SGD

@dataclass(frozen=True, kw_only=True)
class Plain(SGD):
    lr: float = {lr}
"""


def train(two, one):
    """The Ended of three ranks, the last of which has flags of its own."""
    command = [sys.executable, "-m", "zmpi.train", *SMALL]
    return run_world(2, [*command[1:], *two, ":", "-n", "1", *command, *one], timeout=60)


DIFFERENT = {  # flags of ranks 0 and 1 | of rank 2 -> the line
    "--checkpoint CK --save-every 1 | --checkpoint CK --save-every 2": (
        "--save-every: expected the same on all ranks, got 1 on rank 0 and 2 on rank 2"
    ),
    "--checkpoint CK | ": (
        "--checkpoint: expected the same on all ranks, got a path on rank 0 and None on rank 2"
    ),
    " | --steps 0": "--steps: expected a whole number of at least 1, got 0 (on rank 2)",
    " | --help": (
        "--help: expected the same on all ranks, got not given on rank 0 and given on rank 2"
    ),
    "--optimizer A:Plain | --optimizer B:Plain": (
        "--optimizer: expected the same on all ranks, got Plain of a file with SHA-256 "
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_the_flag_and_the_ranks_are_named(case, tmp_path):
    for name, lr in (("A", 0.1), ("B", 0.2)):
        (tmp_path / f"{name}.py").write_text(OPTIMIZER.format(lr=lr))
    flags = case.replace("CK", f"{tmp_path}/ck")
    flags = flags.replace("A:", f"{tmp_path}/A.py:").replace("B:", f"{tmp_path}/B.py:")
    ended = train(*map(str.split, flags.split("|")))
    lines = ended.output.splitlines()
    assert ended.status == 2 and len(lines) == 1 and not ended.left, ended.output
    assert lines[0].startswith(f"zmpi.train: error: {DIFFERENT[case]}")
    assert not (tmp_path / "ck").exists()


def test_files_may_lie_elsewhere_on_each_rank(tmp_path):
    for name in ("A", "B"):
        (tmp_path / f"{name}.py").write_text(OPTIMIZER.format(lr=0.1))
        (tmp_path / name).write_bytes(bytes(range(100)))
    ended = train(
        *(
            ["--data", tmp_path / name, "--optimizer", f"{tmp_path / name}.py:Plain"]
            for name in ("A", "B")
        )
    )
    assert ended.status == 0, ended.output


# Flags that mean another thing in another command.
OWN = {
    "--seed",
    "--steps",
    "--checkpoint",
    "--json",
    "--model",
    "--optimizer",
    "--flops",
    "--memory",
    "-h",
}


def test_commands_that_share_a_flag_take_and_say_the_same():
    said = {}
    for name in ("train", "bench", "plan", "verify", "generate", "export", "compare", "doctor"):
        for action in import_module(f"zmpi.{name}").parser()._actions:
            says = action.help, action.choices, action.nargs, action.metavar, type(action)
            for option in {*action.option_strings} - OWN:
                first, expected = said.setdefault(option, (name, says))
                assert says == expected, f"{option}: {first}, {name}"
    assert len(said) > 50
