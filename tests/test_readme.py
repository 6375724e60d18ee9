"""What the README and the docs say is so: line counts, commands, links, width."""

import ast
import inspect
import os
import re
import subprocess
import sys
import textwrap
from importlib import import_module

import pytest
from mpirun import ROOT

from models.layer import forward_backward
from zmpi import ZeRO

PAGES = {
    page: page.read_text(encoding="utf-8")
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")))
}
README = PAGES[ROOT / "README.md"]


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


def test_every_file_that_a_page_names_exists():
    folders = "zmpi|models|tests|examples|docs|benchmarks"
    for page, text in PAGES.items():
        named = re.findall(rf"(?<![\w/.])((?:{folders})/[\w/-]+\.(?:py|md|svg|sh|cu))", text)
        assert named and [name for name in named if not (ROOT / name).exists()] == [], page.name


def test_every_relative_link_of_a_page_leads_to_a_file():
    for page, text in PAGES.items():
        links = re.findall(r"\]\(([^):#]+)\)|(?:src|srcset)=\"([^\":]+)\"", text)
        targets = [page.parent / (link or picture) for link, picture in links]
        assert [target for target in targets if not target.exists()] == []
    assert PAGES[ROOT / "README.md"].count("](docs/") > 2


def test_every_command_that_a_page_runs_takes_the_flags_that_it_gives():
    runs = [
        run
        for text in PAGES.values()
        for run in re.findall(r"python -m (zmpi\.\w+)([^`\n]*)", text)
    ]
    assert len(runs) > 10
    for name, words in runs:
        if flags := re.findall(r"(?<!\S)--[a-z][\w-]+", words):
            known = import_module(name).parser()._actions
            assert {*flags} <= {option for action in known for option in action.option_strings}


def test_no_line_of_a_page_is_longer_than_100_columns():
    """But one: a command that has to be pasted as one line."""
    for page, text in PAGES.items():
        long = [line for line in text.splitlines() if len(line) > 100]
        assert [line for line in long if not line.startswith("python3 -m venv")] == [], page.name


def test_a_script_next_to_a_checkout_called_zmpi_finds_the_installed_package(tmp_path):
    """To Python the checkout is an empty package, which could hide the installed one."""
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
