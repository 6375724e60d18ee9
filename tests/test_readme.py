"""The README says what is so: its line counts, its two commands, and the files that it names."""

import re

from mpirun import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_line_counts_are_true():
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", README, re.M)
    assert len(rows) == 7
    found = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name, _ in rows}
    assert {name: int(lines) for name, lines in rows} == found


def test_it_has_one_command_to_run_and_one_to_test():
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert "zmpi.train" in commands[0] and "pytest" in commands[1]


def test_every_file_that_it_names_exists():
    named = re.findall(
        r"`(?:python )?((?:zmpi|models|tests|examples|docs)/[\w/]+\.(?:py|md))", README
    )
    assert named and [name for name in named if not (ROOT / name).exists()] == []
