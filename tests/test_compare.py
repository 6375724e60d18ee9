"""zmpi.compare: two runs that differ in seed, in one flipped weight, in the reduction, or not."""

import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
from mpirun import run_lines

from zmpi.cli.logged import read_log
from zmpi.cli.settings import differing_settings
from zmpi.compare import main
from zmpi.numbers.gap import gap_between
from zmpi.saving import compared
from zmpi.saving.blocks import BlockWriter
from zmpi.saving.found import newest
from zmpi.saving.manifest import Manifest, manifest_digest

BASE = "--model mlp --layers 2 --width 6 --context 5 --micro-batch 2 --device cpu --steps 3"
RUNS = {  # name: (ranks, flags); a global batch of 24 sequences each
    "plain": (3, "--accumulate 4 --reduction ordered"),
    "again": (3, "--accumulate 4 --reduction ordered"),
    "seed": (3, "--accumulate 4 --reduction ordered --seed 1"),
    "mpi": (3, "--accumulate 4 --reduction mpi"),
    "elsewhere": (4, "--accumulate 3 --reduction ordered --stage 1 --prefetch 0"),
}
FLIPPED = "hidden.0.weight", (4, 2), 20  # a parameter, an index, and a bit of its float32


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of the RUNS: NAME.jsonl and NAME, its checkpoints; and two that continue them."""
    folder = tmp_path_factory.mktemp("runs")
    lines = {name: files(folder, name, f"{BASE} {flags}") for name, (_, flags) in RUNS.items()}
    trained(folder, 3, [lines[name] for name, (ranks, _) in RUNS.items() if ranks == 3])
    for name in ("whole", "flipped"):
        shutil.copytree(folder / "plain", folder / name)
        shutil.copy(folder / "plain.jsonl", folder / f"{name}.jsonl")
    flip(folder / "flipped", *FLIPPED)
    resumed = "--device cpu --resume --steps 5 --accumulate 3"
    goes_on = [files(folder, name, resumed) for name in ("whole", "flipped")]
    trained(folder, 4, [lines["elsewhere"], *goes_on])
    return folder


def files(folder, name, flags):
    outputs = ["--log", str(folder / f"{name}.jsonl"), "--checkpoint", str(folder / name)]
    return [*flags.split(), *outputs]


def trained(folder, size, lines):
    """Run command lines of zmpi.train one after the other, in one world."""
    ended = run_lines(size, folder, lines)
    assert [rank[:2] for line in ended for rank in line] == [[0, ""]] * len(ended) * size


def flip(folder, name, index, bit):
    """Flip a bit of a weight in the newest checkpoint, and make all checksums good again."""
    manifest = Manifest.read(newest(folder))
    flat = int(np.ravel_multi_index(index, manifest.shapes[name]))
    (piece,) = manifest.pieces(name, "master", flat, flat + 1)
    path = manifest.folder / manifest.files[piece.file].name
    content = np.frombuffer(path.read_bytes(), np.uint8).copy()
    content[piece.byte + bit // 8] ^= 1 << bit % 8
    path.unlink()
    writer = BlockWriter(path)
    writer.write(content)
    manifest.entries["files"][piece.file] = writer.finish().entry()
    manifest.write()
    (folder / "latest").write_text(f"{manifest.folder.name} {manifest_digest(manifest.folder)}\n")


def compare(capsys, *words):
    """(exit status, what was printed) of the command."""
    status = 0
    try:
        main([str(word) for word in words])
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr()
    return status, printed.err if status == 2 else printed.out


def report(capsys, runs, a, b):
    """(exit status, JSON) of two runs' logs and checkpoints."""
    logs = [runs / f"{name}.jsonl" for name in (a, b)]
    status, text = compare(capsys, *logs, "--checkpoints", runs / a, runs / b, "--json")
    return status, json.loads(text)


def names(settings, effect=None):
    return {s["name"] for s in settings if effect in (None, s.get("can_change"))}


def test_runs_that_differ_in_nothing_are_equal(capsys, runs):
    status, found = report(capsys, runs, "plain", "again")
    assert status == 0 and found["equal"] and found["logs"]["settings"] == []
    numbers = found["logs"]["numbers"]
    assert numbers["loss"]["compared"] == numbers["grad_norm"]["compared"] == 3
    vectors = found["checkpoints"]["vectors"]
    assert {*vectors} == {"master", "m", "v"}
    assert all(v["elements"] > 1000 and v["differ"] == 0 for v in vectors.values())
    logs = [runs / "plain.jsonl", runs / "again.jsonl"]
    status, text = compare(capsys, *logs, "--checkpoints", runs / "plain", runs / "again")
    assert (
        status == 0 and "settings: none differs" in text and text.splitlines()[-1][:6] == "equal:"
    )


def test_other_ranks_another_stage_and_prefetch_give_the_same_bits_and_say_so(capsys, runs):
    status, found = report(capsys, runs, "plain", "elsewhere")
    assert status == 0 and found["equal"]
    assert names(found["logs"]["settings"], "no bit") == names(found["logs"]["settings"])
    assert names(found["logs"]["settings"]) == {"size", "stage", "accumulate", "--prefetch"}
    assert names(found["checkpoints"]["settings"]) == {"size", "stage"}


def test_another_seed_differs_from_the_first_step_on(capsys, runs):
    status, found = report(capsys, runs, "plain", "seed")
    assert status == 1 and not found["equal"]
    (seed,) = found["logs"]["settings"]
    assert seed == {"name": "--seed", "a": 0, "b": 1, "can_change": "the training"}
    for name in ("loss", "grad_norm"):
        entry = found["logs"]["numbers"][name]
        first, values = (
            entry["first"],
            [read_log(runs / f"{run}.jsonl") for run in ("plain", "seed")],
        )
        a, b = (log.numbers[name][1] for log in values)
        assert (entry["differ"], first["step"], first["a"], first["b"]) == (3, 1, a, b)
        assert first["absolute"] == abs(a - b) and first["bits"] < 24
    logs = [runs / "plain.jsonl", runs / "seed.jsonl"]
    assert compare(capsys, *logs)[1].splitlines()[-1] == "different: --seed can change the training"


def test_another_order_of_sums_differs_by_rounding_alone(capsys, runs):
    status, found = report(capsys, runs, "plain", "mpi")
    assert status == 1
    assert found["logs"]["settings"] == [
        {"name": "reduction", "a": "ordered", "b": "mpi", "can_change": "rounding"}
    ]
    numbers = found["logs"]["numbers"]
    assert numbers["loss"]["first"] is None or numbers["loss"]["first"]["step"] > 1
    assert numbers["grad_norm"]["first"]["bits"] >= 18  # of float32's 24, after a few sums


def test_one_flipped_weight_is_found_by_name_and_index(capsys, runs):
    status, text = compare(capsys, "--checkpoints", runs / "plain", runs / "flipped", "--json")
    assert status == 1  # the newest in "flipped" is of step 5: the runs have gone different ways
    name, index, bit = FLIPPED
    before = [sorted((runs / run).glob("step-00000003-*"))[0] for run in ("plain", "flipped")]
    status, text = compare(capsys, "--checkpoints", *before, "--json")
    found = json.loads(text)["checkpoints"]
    assert status == 1 and found["settings"] == [] and found["vectors"]["m"]["differ"] == 0
    weights = found["vectors"]["master"]
    assert (weights["differ"], weights["parameters_differ"]) == (1, 1)
    assert weights["first"] == weights["largest"]
    assert (weights["first"]["name"], tuple(weights["first"]["index"])) == (name, index)
    assert weights["first"]["ulps"] == 1 << bit


def test_the_logs_of_a_flipped_weight_differ_from_the_next_step_on(capsys, runs):
    status, found = report(capsys, runs, "whole", "flipped")
    assert status == 1 and found["logs"]["settings"] == []
    assert found["logs"]["numbers"]["loss"]["first"]["step"] == 4
    logs = [runs / "whole.jsonl", runs / "flipped.jsonl"]
    assert "no differing setting explains it" in compare(capsys, *logs)[1].splitlines()[-1]
    status, found = report(capsys, runs, "plain", "whole")
    assert status == 1 and found["logs"]["steps"]["only_b"] == {"count": 2, "first": 4, "last": 5}


def test_a_parameter_in_chunks_is_compared_to_its_last_element(capsys, runs, monkeypatch):
    monkeypatch.setattr(compared, "CHUNK_ELEMENTS", 7)
    before = [sorted((runs / run).glob("step-00000003-*"))[0] for run in ("plain", "flipped")]
    weights = json.loads(compare(capsys, "--checkpoints", *before, "--json")[1])["checkpoints"]
    first = weights["vectors"]["master"]["first"]
    assert (first["name"], tuple(first["index"])) == FLIPPED[:2]


def test_gaps_are_counted_in_steps_over_the_numbers_of_a_type():
    one = np.float32(1)
    after = np.nextafter(one, np.float32(2))
    assert (
        gap_between(one, after, "float32").ulps == 1
        and gap_between(one, after, "float32").bits == 23
    )
    assert gap_between(1.0, math.nextafter(1.0, 0.0)).ulps == 1
    tiny = np.nextafter(np.float32(0), one)
    assert (
        gap_between(tiny, -tiny, "float32").ulps == 2
        and gap_between(tiny, -tiny, "float32").bits == 0
    )
    assert gap_between(0.0, -0.0).ulps == 0 and gap_between(0.0, -0.0).bits == 53
    assert gap_between(3.0, 4.0).absolute == 1 and gap_between(3.0, 4.0).relative == 0.25
    assert (
        gap_between(1.0, math.inf) == gap_between(math.nan, 1.0)
        and gap_between(1.0, math.inf).ulps is None
    )


def header(size=1, argv="", **changed):
    sizes = {"micro_batch": 2, "accumulate": 1, "stage": 3, "reduction": "mpi"}
    return {"size": size, "argv": ["train.py", *argv.split()], **sizes, **changed}


def test_what_a_setting_can_change_follows_from_the_promises():
    def effects(a, b):
        return {one.name: one.can_change for one in differing_settings(a, b)}

    several = {"accumulate": 2, "micro_batch": 1}
    assert effects(header(), header(stage=1)) == {"stage": "no bit"}
    assert effects(header(**several), header(**several, stage=1)) == {"stage": "rounding"}
    assert effects(header(2), header(3)) == {"size": "the training"}
    four = {"size": 4, "micro_batch": 1, "reduction": "ordered"}
    assert effects(header(2, reduction="ordered"), header(**four)) == dict.fromkeys(
        ("size", "micro_batch"), "rounding"
    )
    ordered = {"micro_batch": 2, "reduction": "ordered"}
    five, ten = header(5, accumulate=2, **ordered), header(10, accumulate=1, **ordered)
    assert effects(five, ten) == {"size": "rounding", "accumulate": "rounding"}  # 5 divides no 192
    assert effects(header(argv="--steps 9"), header(argv="--steps 50")) == {
        "--steps": "no bit",
        "--decay-steps": "the training",
    }
    assert effects(header(argv="--heads 4 --clip 1"), header()) == {}  # the defaults
    resumed = header(argv="--resume --checkpoint d --lr 1e-3")
    assert effects(header(), resumed) == {"--resume": "no bit", "--lr": "the training"}
    assert effects(header(argv="--no-such 3"), header(argv="--seed 3")) == {"argv": "the training"}
    units = [{"outer": 4, "h.0": 1, "h.1": n} for n in (2, 3)]
    assert [*effects(*(header(unit_sizes=u) for u in units))] == ["unit_sizes.h.1"]


STEP = {"step": 1, "loss": 1.5, "grad_norm": 0.5}


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([], "expected a log of zmpi.train, got none of its entries"),
        (["{}"], "line 1: step is missing"),
        (["[1]"], "line 1: expected an object: not a log of zmpi.train"),
        (["hello"], "line 1: not JSON"),
        (
            [json.dumps(STEP | {"step": 2}), '{"step": NaN}'],
            "line 2: not JSON (NaN is not a number)",
        ),
        ([json.dumps(STEP | {"loss": "x"})], "line 1: loss: expected a finite number, or null"),
        ([json.dumps({"unit_sizes": {}, "argv": 3})], "line 1: argv: expected an array, got 3"),
        ([" " * 70_000 + "{}"], "line 1: expected at most 65,536 bytes"),
    ],
)
def test_what_is_no_log_is_one_line_of_error(capsys, tmp_path, monkeypatch, lines, fault):
    monkeypatch.setattr("zmpi.cli.logged.LINE_BYTES", 1 << 16)
    path = tmp_path / "log"
    path.write_text("".join(f"{line}\n" for line in lines))
    status, error = compare(capsys, path, path)
    assert status == 2 and error.count("\n") == 1
    assert error.startswith(f"zmpi.compare: error: {path}: {fault}"), error


def test_wrong_command_lines_are_one_line_of_error(capsys, tmp_path):
    (tmp_path / "log").write_text(json.dumps(STEP) + "\n")
    for words, fault in (
        ((), "LOG: expected two logs, got 0; see --help"),
        ((tmp_path / "log",), "LOG: expected two logs, got 1; see --help"),
        ((tmp_path / "log", tmp_path / "none"), f"{tmp_path}/none: No such file or directory"),
        ((tmp_path / "log", tmp_path), f"{tmp_path}: Is a directory"),
        (("--checkpoints", tmp_path), "--checkpoints: expected 2 arguments"),
        (("--checkpoints", tmp_path, tmp_path), f"{tmp_path}: no complete checkpoint in it"),
        (("--check", tmp_path, tmp_path), "--check: no such flag; see --help"),
    ):
        status, error = compare(capsys, *words)
        assert (status, error) == (2, f"zmpi.compare: error: {fault}\n")


def test_a_log_that_was_cut_short_or_rotated_is_compared_as_far_as_it_goes(capsys, tmp_path):
    steps = [STEP | {"step": n, "loss": 1 / n} for n in (3, 4, 5)]
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("".join(json.dumps(step) + "\n" for step in steps))
    b.write_text("".join(json.dumps(step) + "\n" for step in steps[:2]) + '{"step": 5, "lo')
    status, text = compare(capsys, a, b)
    assert status == 1 and "only A has step 5" in text and "settings: not compared" in text
    assert "killed, or still running" in text
    b.write_text("".join(json.dumps(step | {"loss": None}) + "\n" for step in steps))
    status, text = compare(capsys, a, b)
    assert status == 1 and "not finite" in text
    c = tmp_path / "c"
    c.write_text(json.dumps(STEP | {"step": 9}) + "\n")
    assert "no step in common" in compare(capsys, a, c)[1]


def test_another_model_is_named_by_its_first_parameter(capsys, runs):
    other = newest(runs / "plain").parent / "other"
    shutil.copytree(newest(runs / "plain"), other)
    manifest = Manifest.read(other)
    parameter = manifest.entries["units"][0]["parameters"][0]
    parameter["shape"] = parameter["shape"][::-1]
    manifest.write()
    status, text = compare(capsys, "--checkpoints", runs / "plain", other)
    assert status == 1 and f"{parameter['name']}: shape" in text
    shutil.rmtree(other)


def test_it_runs_where_there_is_no_mpi(runs):
    code = "import sys; sys.modules['mpi4py'] = None;"
    code += " from zmpi.compare import main; main(sys.argv[1:])"
    words = [
        runs / "plain.jsonl",
        runs / "again.jsonl",
        "--checkpoints",
        runs / "plain",
        runs / "again",
    ]
    command = [sys.executable, "-c", code, *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and ended.stderr == "" and "equal:" in ended.stdout
