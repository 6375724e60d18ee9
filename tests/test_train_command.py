"""`zmpi.train`: its flags, log and errors. Names and outputs are a contract (DESIGN, section 7)."""

import json
import os
import re
import subprocess
import sys

import pytest
from mpirun import ROOT, assert_refused, run_lines, run_world

from zmpi import __version__
from zmpi.text.data import described, load_text
from zmpi.train import parser

words = str.split

SMALL = words("--layers 1 --width 12 --heads 3 --context 8 --micro-batch 2 --device cpu")
MLP = words("--model mlp --layers 1 --width 8 --context 5 --micro-batch 2 --device cpu")

FLAGS = words("""
--model --layers --width --heads --context --vocab --data --stage --precision --micro-batch
--accumulate --steps --seed --optimizer --lr --warmup --schedule --decay-steps --weight-decay
--beta1 --beta2 --eps --momentum --clip --loss-scale --loss-scale-window --device --transport
--reduction --prefetch --recompute --eval-every --log --checkpoint --save-every --keep --resume
--init-from --trace --timeout --group --comm --help --version
""")

HEADER = words("""
zmpi argv size stage parameters unit_sizes padded_unit_sizes recipe micro_batch accumulate threads
device mpi transport reduction data group
""")
STEP = words(
    "step loss grad_norm lr tokens step_s tokens_per_s optimizer_t loss_scale skipped comm memory"
)
COMM = ["all_gather", "reduce_scatter", "all_reduce", "other"]
MOVED = ["calls", "elements", "bytes_sent", "padding_bytes", "blocked_s"]
MOVED += ["elements_between", "bytes_between", "padding_between"]
MEMORY = ["parameters", "gradients", "optimizer", "full_peak", "work", "peak"]


def train(size, *flags, timeout=100, **environment):
    """The Ended of `mpirun -n size python -m zmpi.train FLAGS`."""
    return run_world(size, ["-m", "zmpi.train", *map(str, flags)], timeout, **environment)


def alone(*flags):
    """The same without a launcher, with stdout and stderr apart."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "zmpi.train", *map(str, flags)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment, check=False
    )


def log_of(path):
    """(header, steps, evaluations). JSON has no NaN: one would raise here."""

    def refuse(name):
        raise AssertionError(f"{name} in {path}")

    entries = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    steps = [entry for entry in entries[1:] if "loss" in entry]
    return entries[0], steps, [entry for entry in entries[1:] if "val_loss" in entry]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run on three ranks and its log: stage 3, two micro-batches, three steps, evaluations."""
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    flags = [
        *SMALL,
        "--steps",
        3,
        "--accumulate",
        2,
        "--eval-every",
        2,
        "--log",
        path,
        "--clip",
        0.5,
        "--reduction",
        "ordered",
    ]
    ended = train(3, *flags)
    assert ended.status == 0, ended.output
    return ended, *log_of(path)


def test_the_header_says_what_was_run(logged):
    _, header, _, _ = logged
    assert list(header) == HEADER
    assert header["zmpi"] == __version__
    assert header["argv"][1:] == [*SMALL, *header["argv"][len(SMALL) + 1 :]]
    assert (header["size"], header["stage"], header["micro_batch"], header["accumulate"]) == (
        3,
        3,
        2,
        2,
    )
    assert (header["device"], header["transport"], header["reduction"]) == (
        "cpu",
        "host",
        "ordered",
    )
    data = described(load_text("builtin", 8, 256), "builtin")
    assert header["data"] == {"source": "builtin", **data} and data["python"]
    assert header["recipe"] == {"name": "float32", "parameters": 4, "gradients": 4, "optimizer": 8}
    outer, block = 256 * 12 + 8 * 12 + 24, 12 * 12 * 12 + 13 * 12
    assert header["unit_sizes"] == {"outer": outer, "h.0": block}
    assert header["parameters"] == outer + block
    assert header["padded_unit_sizes"] == {
        unit: -(-size // 192) * 192 for unit, size in header["unit_sizes"].items()
    }


def test_every_step_has_exactly_the_fields_of_the_contract(logged):
    _, header, steps, _ = logged
    assert [entry["step"] for entry in steps] == [1, 2, 3]
    for entry in steps:
        assert list(entry) == STEP
        assert list(entry["comm"]) == COMM
        assert all(list(moved) == MOVED for moved in entry["comm"].values())
        assert list(entry["memory"]) == MEMORY
        assert all(len(per_rank) == header["size"] for per_rank in entry["memory"].values())
        assert entry["tokens"] == 2 * 2 * 3 * 8  # micro-batch x accumulate x ranks x context
        assert entry["tokens_per_s"] == pytest.approx(entry["tokens"] / entry["step_s"])
        assert (entry["optimizer_t"], entry["loss_scale"], entry["skipped"]) == (
            entry["step"],
            1.0,
            0,
        )


def test_comm_is_the_steps_alone(logged):
    _, header, steps, _ = logged
    total, padded = header["parameters"], sum(header["padded_unit_sizes"].values())
    for entry in steps:
        moved = entry["comm"]
        assert (
            moved["all_gather"]["elements"] == 2 * 2 * total
        )  # two micro-batches, every unit twice
        assert moved["reduce_scatter"]["elements"] == 2 * total
        assert moved["all_gather"]["bytes_sent"] == 4 * 2 * (padded // 3) * 4
        # after step 2: two micro-batches, of which each gathers a unit once, the tied one twice
        evaluated = entry["step"] == 3
        outer = header["unit_sizes"]["outer"]
        assert (
            (moved["other"]["elements"] > 2 * (total + outer))
            == evaluated
            == (moved["other"]["calls"] > 0)
        )


def test_memory_is_the_formulas(logged):
    _, header, steps, _ = logged
    padded = sum(header["padded_unit_sizes"].values())
    for entry in steps:
        memory = entry["memory"]
        assert memory["parameters"] == memory["gradients"] == [padded // 3 * 4] * 3
        assert memory["optimizer"] == [padded // 3 * 8] * 3
        assert (
            memory["full_peak"] == [padded * 4] * 3
        )  # this model has two units; prefetch + 1 of them are there
        assert all(
            0 < work < peak for work, peak in zip(memory["work"], memory["peak"], strict=True)
        )


def test_evaluations_are_logged_with_their_targets(logged):
    _, _, _, evaluations = logged
    assert [list(entry) for entry in evaluations] == [["step", "val_loss", "val_tokens"]] * 2
    assert [(entry["step"], entry["val_tokens"]) for entry in evaluations] == [
        (2, 128 * 8),
        (3, 128 * 8),
    ]
    assert all(
        4 < entry["val_loss"] < 6 for entry in evaluations
    )  # nearly untrained: log(256) is 5.5


def test_the_summary_sets_what_was_measured_beside_the_formula(logged):
    ended, _, steps, evaluations = logged
    assert (
        f"{steps[-1]['loss']:.4f} at step 3; validation {evaluations[-1]['val_loss']:.4f}"
        in ended.output
    )
    assert "train: 100%" in ended.output
    assert "held out (an evaluation uses the first 128 sequences)" in ended.output
    for kind in ("parameters", "gradients", "optimizer", "all_gather", "reduce_scatter"):
        (numbers,) = re.findall(rf"^  {kind} +([\d,]+) +([\d,]+)$", ended.output, re.MULTILINE)
        assert numbers[0] == numbers[1], kind


def test_a_run_prints_the_lines_of_the_readmes_sample(logged):
    """Figures, and what was cut at `...`, aside: the labels, in order."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    sample = re.search(r"^```\n(zmpi \d.*?)^```", readme, re.MULTILINE | re.DOTALL)[1]
    label = re.compile(r"^ *[a-z]+(?: [a-z]+)*", re.MULTILINE)
    _, printed = logged[0].output.split("zmpi ", 1)
    printed = [line for line in printed.splitlines() if not line.startswith("train:")]
    assert label.findall(sample) == label.findall("\n".join(["zmpi " + printed[0], *printed[1:]]))


def test_a_skipped_step_is_logged_without_nan(tmp_path):
    """A run whose steps were all skipped is an error: see test_no_training.py."""
    path = tmp_path / "log"
    flags = words("--precision float16 --steps 3 --loss-scale 16777216 --lr 0.01")
    ended = train(3, *MLP, *flags, "--log", path)
    assert ended.status == 1, ended.output
    _, steps, _ = log_of(path)
    assert [entry["skipped"] for entry in steps] == [1, 1, 1]
    assert [entry["optimizer_t"] for entry in steps] == [0, 0, 0]
    assert [entry["grad_norm"] for entry in steps] == [None] * 3


def test_a_loss_that_is_not_finite_ends_the_run_with_its_step(tmp_path):
    path = tmp_path / "log"
    flags = words("--optimizer sgd --lr 1e30 --warmup 0 --clip 0 --steps 9 --schedule constant")
    ended = train(3, *MLP, *flags, "--log", path)
    assert ended.status == 1, ended.output
    errors = [line for line in ended.output.splitlines() if "error" in line]
    assert len(errors) == 1 and re.match(
        r"zmpi\.train: error: step \d: .*nothing was updated$", errors[0]
    ), ended.output
    assert "Traceback" not in ended.output
    _, steps, _ = log_of(path)
    assert steps and all(entry["loss"] is not None for entry in steps)


def test_a_world_of_one_needs_no_launcher():
    ended = alone(*SMALL, "--steps", 2)
    assert ended.returncode == 0, ended.stderr
    assert "stage 3 on 1 rank," in ended.stdout


# ---- flags ---------------------------------------------------------------------------------------


def test_the_list_of_flags_is_frozen():
    """People script against it: add or change a flag here and in DESIGN.md too."""
    found = {option for action in parser()._actions for option in action.option_strings}
    assert found == {*FLAGS, "-h"}


def test_help_has_a_default_for_each_flag_and_is_printed_once():
    ended = train(3, "--help")
    assert ended.status == 0
    for flag in FLAGS:
        assert len(re.findall(rf"^  (?:-h, )?{flag}(?=[ \n])", ended.output, re.MULTILINE)) == 1, (
            flag
        )
    entries = re.split(r"\n  (?=-)", ended.output)[1:]
    assert len(entries) == len(FLAGS)
    for entry in entries:
        assert "default:" in entry or entry.startswith(("-h, --help", "--version")), entry


def test_version_is_printed_once():
    ended = train(2, "--version")
    assert (ended.status, ended.output) == (0, f"zmpi {__version__}\n")


WRONG = [
    ("--width 64 --heads 7", "--heads: 7 does not divide width 64"),
    ("--width 64 --heads 0", "--heads: expected a whole number of at least 1, got 0"),
    ("--width 64 --heads -2", "--heads: expected a whole number of at least 1, got -2"),
    ("--model mlp --heads 2", "--heads: 2 given, but --model mlp has no attention"),
    ("--stage 4", "--stage: expected 0, 1, 2 or 3, or INSIDE,OUTSIDE; got 4"),
    ("--stag 3", "--stag: no such flag"),
    ("--seed -1", "--seed: expected a whole number of at least 0, got -1"),
    ("--warmup -1", "--warmup: expected a whole number of at least 0, got -1"),
    ("--steps 0", "--steps: expected a whole number of at least 1, got 0"),
    ("--lr nan", "--lr: expected a finite number above 0, got nan"),
    ("--lr much", "--lr: expected a finite number above 0, got 'much'"),
    ("--vocab 255", "--vocab: text is read as bytes and needs at least 256, got 255"),
    ("--data missing.txt", "--data: expected a file, got missing.txt (missing)"),
    (
        "--log missing/log",
        "--log: expected a file, got missing/log (its folder missing is missing)",
    ),
    ("--precision float8", "--precision: invalid choice: 'float8'"),
    ("--precision float64", "--precision: invalid choice: 'float64'"),
    ("--precision float16 --reduction mpi", "--reduction: mpi cannot sum float16"),
    (
        "--precision bfloat16 --loss-scale 8",
        "--loss-scale: applies to precision float16 only, not to bfloat16",
    ),
    (
        "--precision float16 --loss-scale 0.5",
        "--loss-scale: expected auto, or a number from 1 to 2^24, got 0.5",
    ),
    ("--optimizer sgd --beta1 0.5", "--beta1: does not apply to --optimizer sgd"),
    ("--momentum 0.9", "--momentum: does not apply to --optimizer adamw"),
    ("--beta2 1", "--beta2: expected a finite number of at least 0 and below 1, got 1"),
    ("--timeout 0", "--timeout: expected a finite number above 0, got 0"),
    ("--device cuda", "--device: cuda"),
    ("surplus", "surplus: no such flag"),
]


def test_what_cannot_be_done_is_one_line_and_status_2(tmp_path):
    """B20: the flag, what was expected and what came. All in one process; one as from a shell."""
    found = run_lines(1, tmp_path, [flags.split() for flags, _ in WRONG])
    wrong = [
        f"{flags}: {ended}"
        for (flags, message), (ended,) in zip(WRONG, found, strict=True)
        if ended[::2] != [2, ""] or not ended[1].startswith(message)
    ]
    assert not wrong, "\n".join(wrong)
    ended = alone("--stage", 4)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(
        "zmpi.train: error: --stage: expected 0, 1, 2 or 3, or INSIDE,OUTSIDE; got 4"
    )


def test_a_text_shorter_than_the_context_is_one_error_and_nothing_is_written(tmp_path):
    """B19, on one rank and on four."""
    expected = {}
    for length in (0, 10, 64):
        text = tmp_path / f"text-{length}"
        text.write_bytes(b"a" * length)
        line = "--context", 64, "--data", text, "--log", tmp_path / "log", "--steps", 1
        expected[line] = [f"{length} tokens; a window needs --context + 1 = 65"]
    for size in (1, 4):
        assert_refused(size, tmp_path, expected)
        assert not (tmp_path / "log").exists()


def test_a_text_of_one_window_trains(tmp_path):
    (tmp_path / "text").write_bytes(b"a" * 65)
    ended = train(4, *SMALL[:6], "--context", 64, "--data", tmp_path / "text", "--steps", 1)
    assert ended.status == 0, ended.output
    assert "65 tokens for training (only 1 different sequence), none held out" in ended.output


# ---- threads (B18) -------------------------------------------------------------------------------

THREADS = """
import os, re, zmpi, numpy
numpy.ones((300, 300)) @ numpy.ones((300, 300))
threads = re.search(r"Threads:\\s+(\\d+)", open("/proc/self/status").read())[1]
# in one piece, since ranks write at the same time
os.write(1, f"threads {threads} {os.environ['OMP_NUM_THREADS']}\\n".encode())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")
def test_ranks_share_the_cores_between_their_blas_threads(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    cores = len(os.sched_getaffinity(0))
    ended = run_world(cores, ["-c", THREADS], 60)
    found = re.findall(r"threads (\d+) (\d+)", ended.output)
    assert len(found) == cores, ended.output
    assert {(int(threads) <= 2, chosen) for threads, chosen in found} == {
        (True, "1")
    }  # one for BLAS, one to spare


def test_a_number_of_threads_that_the_user_set_is_kept():
    ended = run_world(2, ["-c", THREADS], 60, OMP_NUM_THREADS="3")
    assert [chosen for _, chosen in re.findall(r"threads (\d+) (\d)", ended.output)] == [
        "3",
        "3",
    ], ended.output
