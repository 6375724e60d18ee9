"""Every example runs as its first lines say, and ends in the line that they promise."""

import re
import shlex
from pathlib import Path

import pytest
from mpirun import ROOT, run_world

EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


def promise(path):
    """(number of ranks, arguments, last line) from an example's docstring."""
    text = path.read_text(encoding="utf-8")
    command = re.search(r"^Run: +(.+)$", text, re.M)[1]
    ranks = re.search(r"-n (\d+)", command)
    return (
        int(ranks[1]) if ranks else 1,
        shlex.split(command.split("python ", 1)[1]),
        re.search(r"^Last line: +(.+)$", text, re.M)[1],
    )


def test_every_command_in_an_examples_first_lines_can_be_pasted():
    """No brackets around what is optional, no remark behind it: a shell has a meaning for both."""
    commands = re.compile(r"(?:^|[ :])((?:mpirun -n \d+ )?python (?:-m|examples/).*)$", re.M)
    found = {
        path.name: commands.findall(path.read_text(encoding="utf-8").split('"""')[1])
        for path in EXAMPLES
    }
    assert all(found.values()) and sum(map(len, found.values())) > len(found)
    special = re.compile(r"[^\w ./:=-]")
    assert [line for lines in found.values() for line in lines if special.search(line)] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_ends_in_its_line(path):
    ranks, arguments, last = promise(path)
    assert Path(arguments[0]).name == path.name
    world = run_world(
        ranks, [ROOT / arguments[0], *arguments[1:]], timeout=300, OMP_NUM_THREADS="1"
    )
    assert world.status == 0 and not world.left, world.output
    assert world.output.splitlines()[-1] == last, world.output
