"""python -m zmpi: what commands there are."""

import subprocess
import sys

from mpirun import ROOT, run_world


def zmpi(*words):
    return subprocess.run(
        [sys.executable, "-m", "zmpi", *words],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )


def test_it_lists_every_command_once():
    commands = {
        path.stem
        for path in (ROOT / "zmpi").glob("*.py")
        if path.stem != "__main__" and 'if __name__ == "__main__"' in path.read_text()
    }
    ended = zmpi()
    assert ended.returncode == 0 and ended.stderr == ""
    lines = ended.stdout.splitlines()[1:]
    assert len(lines) == len(commands) >= 7
    for command in commands:
        assert sum(f"python -m zmpi.{command} " in line for line in lines) == 1, command


def test_a_commands_name_is_answered_with_how_to_run_it():
    ended = zmpi("train")
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr == "zmpi: error: train: run it as python -m zmpi.train\n"
    assert zmpi("trian").stderr.startswith("zmpi: error: trian: expected one of train, verify,")


def test_under_a_launcher_one_process_lists_them():
    world = run_world(2, ["-m", "zmpi"], timeout=60)
    assert world.status == 0 and world.output.count("zmpi.verify") == 1
