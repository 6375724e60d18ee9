"""The README says what is so: its line counts, its two commands, and the files that it names."""

import ast
import inspect
import os
import re
import subprocess
import sys
import textwrap

import pytest
from mpirun import ROOT

from models.layer import forward_backward
from zmpi import ZeRO

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_line_counts_are_true():
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", README, re.M)
    assert len(rows) == 7
    found = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name, _ in rows}
    assert {name: int(lines) for name, lines in rows} == found


def test_the_two_loops_are_those_of_the_code():
    """Without their docstrings; what ZeRO adds must be seen at a glance, so they stay short."""
    shown = re.findall(r"^```python\n(def forward_backward.*?)\n```", README, re.M | re.S)
    code = [without_docstring(forward_backward), without_docstring(ZeRO.forward_backward)]
    assert shown == code
    lines = [[line for line in loop.splitlines()[1:] if line.strip()] for loop in code]
    assert len(lines[0]) <= 14 and len(lines[1]) <= 20


def without_docstring(function):
    source = textwrap.dedent(inspect.getsource(function))
    docstring = ast.parse(source).body[0].body[0]
    lines = source.splitlines()
    return "\n".join(lines[: docstring.lineno - 1] + lines[docstring.end_lineno :])


def test_it_has_one_command_to_run_and_one_to_test():
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert "zmpi.train" in commands[0] and "pytest" in commands[1]


def test_every_file_that_it_names_exists():
    named = re.findall(
        r"`(?:python )?((?:zmpi|models|tests|examples|docs)/[\w/]+\.(?:py|md))", README
    )
    assert named and [name for name in named if not (ROOT / name).exists()] == []


def test_a_script_next_to_a_checkout_called_zmpi_finds_the_installed_package(tmp_path):
    """To Python the checkout is a package without code, which would hide one that an import hook finds later."""
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words):
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=60
        )

    if run("-c", "import zmpi").returncode:
        pytest.skip("zmpi is not installed for this Python")
    (tmp_path / "zmpi").mkdir()
    (tmp_path / "script.py").write_text("from zmpi import World\nprint(World.__name__)\n")
    ended = run("script.py")
    assert ended.stdout == "World\n", f"{ended.stderr}\nafter pip install -e . again?"
