"""What a user can get wrong on the command line: one line, printed once, status 2, no files."""

import gzip
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident

import numpy as np
import pytest
from mpirun import ROOT, assert_refused, run_world

SMALL = [
    "--device",
    "cpu",
    "--layers",
    "1",
    "--width",
    "8",
    "--heads",
    "2",
    "--context",
    "8",
    "--steps",
    "1",
    "--micro-batch",
    "1",
]
PATHS = ("--data", "--log", "--checkpoint", "--init-from", "--trace")
FLAGS = {  # arguments (a string, or a tuple if they contain spaces) -> what the line must contain
    "--heads 7 --width 64": "--heads: 7 does not divide width 64",
    "--heads 0": "--heads: expected a whole number of at least 1, got 0",
    "--heads two": "--heads:",
    "--model mlp --heads 2": "--heads: 2",
    "--model rnn": "--model:",
    "--layers 0": "--layers:",
    "--layers 1.5": "--layers:",
    "--width -8": "--width:",
    "--context 0": "--context:",
    "--context 1000000": "1000001",
    "--vocab 255": "--vocab: text is read as bytes and needs at least 256, got 255",
    "--vocab 0": "--vocab:",
    "--stage 4": "--stage:",
    "--stage -1": "--stage:",
    "--stage --lr 3": "--stage: expected one argument",
    "--precision int8": "--precision:",
    "--micro-batch 0": "--micro-batch:",
    "--accumulate 0": "--accumulate:",
    "--steps 0": "--steps:",
    "--steps many": "--steps:",
    "--seed -1": "--seed:",
    "--lr nan": "--lr:",
    "--lr inf": "--lr:",
    "--lr -0.1": "--lr:",
    "--lr 0": "--lr: expected a finite number above 0, got 0",
    "--warmup 20 --decay-steps 10": "--decay-steps: expected more than --warmup 20, got 10",
    "--eps 0": "--eps: expected a finite number of at least 1e-30, got 0",
    "--momentum 1 --optimizer sgd": "--momentum:",
    "--weight-decay 400": "--weight-decay: expected at most 1/lr = 333.333, got 400",
    "--warmup -1": "--warmup:",
    "--schedule linear": "--schedule:",
    "--decay-steps 0": "--decay-steps:",
    "--weight-decay nan": "--weight-decay:",
    "--beta1 1": "--beta1:",
    "--beta2 1.5": "--beta2:",
    "--eps -1e-8": "--eps:",
    "--optimizer lion": "--optimizer:",
    "--momentum 0.9": "--momentum: does not apply to --optimizer adamw",
    "--optimizer sgd --beta1 0.9": "--beta1: does not apply to --optimizer sgd",
    "--clip -1": "--clip:",
    "--loss-scale 128": "--loss-scale: applies to precision float16 only",
    "--precision float16 --loss-scale 0.5": "--loss-scale:",
    "--loss-scale-window 0": "--loss-scale-window:",
    "--precision bfloat16 --reduction mpi": "--reduction: mpi cannot sum bfloat16",
    "--reduction ring": "--reduction:",
    "--transport wire": "--transport:",
    "--device tpu": "--device:",
    "--prefetch 2": "--prefetch:",
    "--eval-every -1": "--eval-every:",
    "--timeout 0": "--timeout:",
    "--timeout nan": "--timeout:",
    "--step 3": "--step: no such flag; see --help",
    "--colour": "--colour: no such flag",
    "--comm nowhere.py:Class": "--comm:",
    ("--comm", ""): "--comm: expected one of zmpi, FILE:CLASS; got ''",
    "--lr -1e-3": "--lr: expected one argument; write a value that starts with - as --lr=-1e-3",
    f"--seed {1 << 64}": "--seed: expected a whole number of at least 0 and below"
    " 18446744073709551616",
    f"--seed {10**400}": "--seed:",
    "--width 2147483648": "--width: expected a whole number of at least 1 and below 2147483648",
    "--width 99999999 --heads 1": "--width: the state of",
    "--micro-batch 2147483647 --context 512": "--micro-batch: a layer's input,"
    " 2147483647 sequences, would take",
    "--accumulate 2147483647 --micro-batch 9999": "--accumulate: the tokens of"
    " 2147483647 x 9999 sequences would take",
    "--loss-scale-window 7": "--loss-scale-window: applies to --precision float16 only",
    "--schedule constant --decay-steps 5": "--decay-steps: does not apply to --schedule constant",
    "--trace /proc/x.json": "--trace: /proc/x.json: ",
    "--log /proc/x": "--log: /proc/x: ",
    (" ",): "' ': no such flag",
    **{(flag, ""): f"{flag}: expected a path, got ''" for flag in PATHS},
}


def files(folder):
    """arguments -> what the line must name, for what can be wrong with files."""
    (folder / "empty").write_bytes(b"")
    (folder / "short").write_bytes(b"12345678")
    (folder / "odd.bin").write_bytes(b"123")
    (folder / "text.gz").write_bytes(gzip.compress(bytes(100)))
    os.mkfifo(folder / "pipe")
    (folder / "large.bin").write_bytes(np.full(100, 300, "<u2").tobytes())
    (folder / "text.json").write_bytes(bytes(100))
    (folder / "link.json").symlink_to(folder / "text.json")
    (folder / "exits.py").write_text("import sys; sys.exit(3)")
    (folder / "long.py").write_text("raise RuntimeError('one\\ntwo')")
    data = f"--data {folder}/text.json"
    return {
        f"{data} --log {folder}/text.json": "text.json is also the file of --data",
        f"{data} --log {folder}/link.json": "--log: ",
        f"{data} --trace {folder}/link.json": "link.json is also the file of --data",
        f"--log {folder}/new.json --trace {folder}/new.json": "--trace: ",
        f"--log {folder}/new --checkpoint {folder}/new": "--log: ",
        f"--log {folder}/exits.py --comm {folder}/exits.py:X": "exits.py is also the file of"
        " --comm",
        f"--comm {folder}/exits.py:X": "exits.py cannot be imported: SystemExit: 3",
        f"--comm {folder}/long.py:X": "long.py cannot be imported: RuntimeError: one two",
        f"--data {folder}/missing": f"{folder}/missing",
        f"--data {folder}": f"{folder}",
        f"--data {folder}/empty": f"{folder}/empty: 0 tokens",
        f"--data {folder}/short": f"{folder}/short: 8 tokens; a window needs --context + 1 = 9:"
        " use a longer text or --context 7",
        f"--data {folder}/odd.bin": f"{folder}/odd.bin",
        f"--data {folder}/text.gz": f"--data: {folder}/text.gz: expected text, got gzip",
        f"--data {folder}/pipe": f"--data: expected a file, got {folder}/pipe (a pipe)",
        f"--data {folder}/large.bin": f"{folder}/large.bin: token 300 is not below --vocab 256;"
        " use --vocab 301",
        f"--log {folder}": "--log:",
        f"--log {folder}/none/log": "--log:",
        "--log /dev/null/log": "--log:",
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what files() makes in it."""
    return tmp_path_factory.mktemp("bad") / "given"


@pytest.fixture(scope="module")
def cases(folder):
    folder.mkdir()
    return FLAGS | files(folder)


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def arguments(text, log):
    """The command line of a case, with a log that must not be made."""
    mine = text.split() if isinstance(text, str) else list(text)
    return [*SMALL, *([] if "--log" in text else ["--log", log]), *mine]


def test_each_is_one_error_on_all_ranks_and_writes_nothing(cases, folder, tmp_path):
    """All of them in one world; the next test sees some as a shell does."""
    before, log = contents(folder.parent), str(folder.parent / "log")
    lines = {tuple(arguments(text, log)): [expected] for text, expected in cases.items()}
    assert_refused(3, tmp_path, lines)
    assert contents(folder.parent) == before, "something was written"


def test_each_gets_one_line_and_status_2(cases, folder):
    before, log = contents(folder.parent), str(folder.parent / "log")
    # an error of the model, of the flags, of the engine and of the data, and some more
    kinds = ["--heads 7 --width 64", "--stage 4", "--precision bfloat16 --reduction mpi"]
    sample = [*kinds, f"--data {folder}/missing", *list(cases)[4::18]]

    def run(text):
        command = ["-m", "zmpi.train", *arguments(text, f"{log}-{get_ident()}")]  # of one job
        return run_world(3, command, timeout=60, PYTHONDONTWRITEBYTECODE="1")

    with ThreadPoolExecutor(2) as pool:
        ended = dict(zip(sample, pool.map(run, sample), strict=True))
    wrong = []
    for text, world in ended.items():
        lines = world.output.splitlines()
        good = len(lines) == 1 and lines[0].startswith("zmpi.train: error: ")
        if not good or cases[text] not in lines[0] or world.status != 2 or world.left:
            wrong.append(f"{text}: status {world.status}\n{world.output}")
    assert not wrong, "\n".join(wrong)
    assert contents(folder.parent) == before, "something was written"


def test_a_file_that_one_rank_cannot_read_is_an_error_on_all(tmp_path):
    (tmp_path / "text").write_bytes(bytes(100))
    world = run_world(
        3, [ROOT / "tests/faults/unreadable.py", *SMALL, "--data", tmp_path / "text"], timeout=60
    )
    lines = world.output.splitlines()
    assert world.status == 2 and len(lines) == 1, world.output
    assert "rank 1" in lines[0] and "Permission denied" in lines[0]


def test_a_command_whose_text_does_not_fit_on_the_disk_fails():
    """What it prints is all that it makes. zmpi.train's is not: see test_log_file.py."""
    for command in ("plan --params 1e6 --ranks 2", "plan --help", "bench --help", "doctor"):
        with open("/dev/full", "w") as full:
            ended = subprocess.run(
                [sys.executable, "-m", *f"zmpi.{command}".split()],
                cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=100,
            )  # fmt: skip
        name = f"zmpi.{command.split()[0]}"
        assert ended.returncode == 2, command
        assert ended.stderr == f"{name}: error: stdout: No space left on device\n"


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_are_printed_once(flag):
    world = run_world(3, ["-m", "zmpi.train", flag], timeout=60)
    assert world.status == 0
    assert world.output.count("zmpi 0" if flag == "--version" else "usage:") == 1


@pytest.mark.parametrize("command", ["plan", "export"])
def test_a_command_without_mpi_runs_once_under_a_launcher(command, tmp_path):
    wrong = {
        "plan": ["--ranks", "0"],
        "export": ["--checkpoint", tmp_path / "none", "--to", tmp_path / "to"],
    }
    world = run_world(3, ["-m", f"zmpi.{command}", *wrong[command]], timeout=60)
    assert world.status == 2 and len(world.output.splitlines()) == 1, world.output
    assert world.output.startswith(f"zmpi.{command}: error: ")


def into_closed_pipe(command, *flags):
    """(status, stderr) of a command whose reader ends before it prints, as with `| head -0`."""
    reader, writer = os.pipe()
    os.close(reader)
    # A rank's number that another job left behind is none of this one's.
    settings = os.environ | {"OMP_NUM_THREADS": "1", "SLURM_PROCID": "1"}
    words = [sys.executable, "-m", f"zmpi.{command}", *map(str, flags)]
    ended = subprocess.run(
        words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, env=settings, cwd=ROOT
    )
    os.close(writer)
    return ended.returncode, ended.stderr


def test_a_reader_that_is_gone_ends_no_command_and_needs_no_word(tmp_path):
    """Each does what it does beside printing: train saves, export and bench write their files."""
    saved, plan = tmp_path / "saved", ("--params", "7.5e9", "--ranks", "64")
    status, text = into_closed_pipe("train", *SMALL, "--checkpoint", saved)
    assert status == 0 and "Traceback" not in text and "error" not in text, text  # the bar is there
    commands = {
        "plan": plan,
        "plan --help": (),
        "doctor": ("--device", "cpu"),
        "doctor --version": (),
        "generate": ("--device", "cpu", "--checkpoint", saved, "--prompt", "a"),
        "export": ("--checkpoint", saved, "--to", tmp_path / "exported"),
        "bench": (*SMALL[:-4], "--stages", "0", "--steps", "5", "--json", tmp_path / "json"),
    }
    with ThreadPoolExecutor(2) as pool:
        runs = {
            name: pool.submit(into_closed_pipe, *name.split(), *flags)
            for name, flags in commands.items()
        }
    assert {name: run.result() for name, run in runs.items()} == dict.fromkeys(commands, (0, ""))
    assert (tmp_path / "exported" / "model.safetensors").exists() and (tmp_path / "json").exists()


def test_a_number_left_behind_by_another_job_is_no_rank():
    """SLURM_PROCID=1 alone: the command speaks. As one of two ranks it leaves that to rank 0."""
    command = [sys.executable, "-m", "zmpi.plan", "--params", "7.5e9", "--ranks", "64"]
    printed = []
    for launched in ({}, {"SLURM_STEP_NUM_TASKS": "2"}):
        settings = os.environ | {"SLURM_PROCID": "1"} | launched
        ended = subprocess.run(
            command, env=settings, cwd=ROOT, text=True, capture_output=True, timeout=60
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        printed.append("120" in ended.stdout)
    assert printed == [True, False]


def test_a_package_models_of_ones_own_is_one_line(tmp_path, monkeypatch):
    """Found first where a command is started in a folder that holds one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    world = run_world(3, ["-m", "zmpi.train", "--steps", "1"], timeout=60)
    assert world.status == 2 and not world.left
    assert re.fullmatch(
        rf"zmpi\.train: error: package models: expected .*, found {tmp_path}.*\n", world.output
    ), world.output


def test_without_mpi_it_is_said_so():
    code = "import sys; sys.modules['mpi4py'] = None; from zmpi import doctor; doctor.main([])"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 2 and ended.stdout == "" and len(ended.stderr.splitlines()) == 1, (
        ended.stderr
    )
    assert "error: mpi4py cannot load an MPI library: " in ended.stderr
    assert ended.stderr.endswith("install one into this environment (pip install mpich)\n")
