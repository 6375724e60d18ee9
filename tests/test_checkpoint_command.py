"""zmpi.train's checkpoints for a user: resumed, killed, damaged, contradicted, exported."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults.checkpoints import MODEL, bits, flips, kills, numbers, resumes, train
from mpirun import ROOT, assert_refused, run_world

from zmpi.cli.resume import saved_flags, take_settings
from zmpi.saving.folder import Folder, newest
from zmpi.saving.manifest import Manifest
from zmpi.train import parser

DRIVER = Path(__file__).parent / "faults" / "checkpoint_driver.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with steps 2 and 4 of 4, by 2 ranks at stage 3, and its log. Not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    flags = [
        *MODEL,
        "--steps",
        "4",
        "--decay-steps",
        "8",
        "--save-every",
        "2",
        "--log",
        folder / "log",
    ]
    run = train(2, *flags, "--checkpoint", folder / "dir")
    assert run.status == 0 and run.output.count("saved ") == 2 and " MB/s)" in run.output, (
        run.output
    )
    return folder / "dir"


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of it that may be changed."""
    for path in saved.rglob("*"):
        if path.is_file():
            target = tmp_path / "dir" / path.relative_to(saved)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return tmp_path / "dir"


def refused(run, *told):
    """One line, printed once, status 2, that says so."""
    lines = run.output.splitlines()
    assert run.status == 2 and len(lines) == 1 and lines[0].startswith("zmpi.") and not run.left, (
        run.output
    )
    assert all(text in lines[0] for text in told), run.output


# ---- resume --------------------------------------------------------------------------------------


def test_a_new_process_goes_on_to_the_same_bits():
    """B07, B11: two of the cases of `tests/faults/checkpoints.py resumes`."""
    assert sum(resumes([(3, "float16", 2), (1, "bfloat16", 1)]).values()) == 2


def test_another_number_of_ranks_sees_the_same_sequences_in_the_same_order(saved, tmp_path):
    """B11: with `ordered` and the same micro-batch, the bits of the run that never stopped."""
    flags = [*MODEL, "--decay-steps", "8", "--reduction", "ordered"]
    straight = train(4, *flags, "--steps", "8", "--log", tmp_path / "straight.log")
    first = train(4, *flags, "--steps", "4", "--checkpoint", tmp_path / "dir")
    assert straight.status == first.status == 0, first.output
    for size in (1, 2):
        path = tmp_path / f"{size}.log"
        run = train(
            size,
            "--resume",
            "--steps",
            "8",
            "--checkpoint",
            tmp_path / "dir",
            "--keep",
            "9",
            "--log",
            path,
        )
        assert run.status == 0, run.output
        losses = [
            [entry[1:3] for entry in numbers(log) if entry[1]]
            for log in (tmp_path / "straight.log", path)
        ]
        assert losses[0][4:] == losses[1]
        newest(tmp_path / "dir").rename(tmp_path / f"end-{size}")
        (tmp_path / "dir" / "latest").unlink()


def test_the_log_is_continued(saved, copy, tmp_path):
    """One header; steps that the killed run logged after its checkpoint are logged anew, once."""
    log = tmp_path / "log"
    lines = (saved.parent / "log").read_bytes()
    log.write_bytes(lines + b'{"step": 5, "loss": 9.0}\n{"step": 6, "lo')
    run = train(2, "--resume", "--steps", "6", "--checkpoint", copy, "--log", log)
    assert (
        run.status == 0 and "resumed from" in run.output and "4 of 6 steps are done" in run.output
    ), run.output
    assert log.read_bytes().startswith(lines)
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["step"] for entry in entries[1:] if "loss" in entry] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ] and "zmpi" in entries[0]
    again = train(1, "--resume", "--steps", "6", "--checkpoint", copy)
    assert again.status == 0 and "all 6 steps are done: nothing to train" in again.output, (
        again.output
    )


@pytest.mark.parametrize("text", ["precious\nlines\n", "[1]\n"])
def test_a_file_that_is_no_log_is_not_written_over(copy, tmp_path, text):
    (tmp_path / "notes").write_text(text)
    run = train(2, "--resume", "--steps", "6", "--checkpoint", copy, "--log", tmp_path / "notes")
    refused(run, "notes exists and is not a log of zmpi.train")
    assert (tmp_path / "notes").read_text() == text


def test_a_checkpoint_names_no_code_to_run(tmp_path):
    """Your own communicator's flag is given again, wherever the file is now; no old code is run."""
    ran, flags = tmp_path / "ran", ["--checkpoint", tmp_path / "dir"]
    code = "from pathlib import Path\nfrom zmpi.messages.comm import Communicator\n"
    code += f"Path({str(ran)!r}).touch()\n"
    (tmp_path / "mine.py").write_text(f"{code}\n\nclass Mine(Communicator):\n    pass\n")
    first = train(2, *MODEL, "--steps", "1", *flags, "--comm", f"{tmp_path}/mine.py:Mine")
    assert first.status == 0 and ran.exists(), first.output
    ran.unlink()
    told = "--comm: the run used your class Mine,", "give --comm FILE:Mine again"
    assert b"mine.py" not in (newest(tmp_path / "dir") / "manifest.json").read_bytes()
    refused(train(2, "--resume", "--steps", "2", *flags), *told)
    place = f"{tmp_path}/mine.py:Mine"
    changed(newest(tmp_path / "dir"), lambda entries: entries["run"]["flags"].update(comm=place))
    (tmp_path / "dir" / "latest").unlink()
    refused(train(2, "--resume", "--steps", "2", *flags), *told)
    assert not ran.exists()
    (tmp_path / "mine.py").rename(tmp_path / "moved.py")
    again = train(2, "--resume", "--steps", "2", *flags, "--comm", f"{tmp_path}/moved.py:Mine")
    assert again.status == 0 and ran.exists(), again.output
    third = train(2, "--resume", "--steps", "3", *flags, "--comm", "zmpi")
    assert third.status == 0, third.output
    fourth = train(2, "--resume", "--steps", "4", *flags)
    assert fourth.status == 0, fourth.output


def changed(checkpoint, change):
    """Change a manifest, and renew its checksum."""
    manifest = Manifest.read(checkpoint)
    change(manifest.entries)
    manifest.write()


def test_what_a_killed_save_left_is_replaced(copy):
    """B10: resumes from the last complete step, passes the step of the torn save, saves it."""
    half = copy / ".saving-step-00000006-save-3"
    half.mkdir()
    (half / "rank-0000.bin").write_bytes(b"half")
    run = train(
        4,
        "--resume",
        "--steps",
        "7",
        "--save-every",
        "2",
        "--micro-batch",
        "1",
        "--checkpoint",
        copy,
    )
    assert run.status == 0, run.output
    assert sorted(p.name for p in copy.iterdir()) == [
        ".flock", "latest", "step-00000004-save-2", "step-00000006-save-3", "step-00000007-save-4"
    ]  # fmt: skip
    assert bits(copy)[0][0] == 7


def test_a_strange_file_system_and_a_foreign_checkpoint_end_no_run(copy, tmp_path):
    """One line each: no locks, no fsync of folders, an old checkpoint that stays, another run's."""
    foreign = copy / "step-00000500-save-99"
    foreign.mkdir()
    for file in newest(copy).iterdir():
        (foreign / file.name).write_bytes(file.read_bytes())
    changed(foreign, lambda entries: entries.update(run_id="another", step=500, save=99))
    (copy / "step-00000002-save-1").rename(tmp_path / "away")
    (copy / "step-00000002-save-1").symlink_to(tmp_path / "away")
    flags = ["--resume", "--steps", "7", "--save-every", "1", "--keep", "2", "--checkpoint", copy]
    run = run_world(2, [DRIVER, "strange", 0, 1, *flags], 60)
    warnings = [line for line in run.output.splitlines() if "warning" in line]
    assert run.status == 0 and "4 of 7 steps are done" in run.output, run.output
    told = ("no locks", "cannot sync folders", "save-99: skipped", "save-2: cannot be removed")
    for text in told:
        assert len([line for line in warnings if text in line]) == 1, run.output
    assert all(line.startswith("zmpi: warning: ") for line in warnings), run.output
    assert bits(copy)[0][0] == 7 and len(list((tmp_path / "away").iterdir())) == 4


CONTRADICTIONS = {
    "--width 25": "--width: 25 contradicts 24",
    "--vocab 300": "--vocab: 300 contradicts 256",
    "--model mlp": "--model: mlp contradicts transformer",
    "--seed 1": "--seed: 1 contradicts 0",
    "--lr 0.1": "--lr: 0.1 contradicts 0.003",
    "--decay-steps 9": "--decay-steps: 9 contradicts 8",
    "--schedule constant": "--schedule: constant contradicts cosine",
    "--optimizer sgd": "--optimizer: sgd contradicts adamw",
    "--weight-decay 0": "--weight-decay: 0.0 contradicts 0.1",
    "--micro-batch 3": "3 x 1 x 2 is not the checkpoint's 4 sequences; --micro-batch 2 would",
    "--micro-batch 3 --accumulate 2": "4 sequences; --micro-batch 2 --accumulate 1 would fit",
    "--accumulate 3": "4 sequences; --accumulate 2 would fit",
    "--steps 3": "--steps: expected at least the 4 steps already done, got 3",
    "--init-from /tmp": "--init-from:",
    "--data {self}": "is not the checkpoint's text: tokens",
    "--data /nowhere": "/nowhere",
}


def test_a_flag_that_contradicts_the_checkpoint_is_an_error(copy):
    before = sorted(copy.rglob("*"))
    lines = [text.format(self=__file__) for text in CONTRADICTIONS]
    run = run_world(2, [DRIVER, "all", 0, 0, "--resume", "--checkpoint", copy, *lines], 60)
    assert run.status == 0 and len(run.output.splitlines()) == len(lines), run.output
    for line, told in zip(run.output.splitlines(), CONTRADICTIONS.values(), strict=True):
        assert told in line
    assert sorted(copy.rglob("*")) == before
    refused(
        train(2, "--resume", "--checkpoint", copy, "--width", "25"), "--width: 25 contradicts 24"
    )


def test_where_no_batch_fits_the_ranks_the_numbers_of_ranks_that_would_are_named(saved):
    """The checkpoint's 4 sequences on 3 and 5 ranks: no process is needed to see it."""
    manifest = Manifest.read(newest(saved))
    for size, fitting in ((3, "2 or 4"), (5, "4")):
        with pytest.raises(ValueError, match=f"none fits {size} ranks; {fitting} ranks would fit"):
            saved_settings = saved_flags(manifest, parser())
            take_settings(parser().parse_args([]), {}, manifest, saved_settings, size)


def test_flags_that_agree_or_are_free_are_none(copy, tmp_path):
    text = "--width 24 --lr 3e-3 --weight-decay 0.1 --heads 2 --seed 0 --stage 1"
    text += " --precision bfloat16 --reduction ordered"
    text += " --prefetch 0 --recompute --micro-batch 1 --accumulate 2 --steps 5"
    text += " --eval-every 1 --keep 1 --data builtin"
    run = train(2, "--resume", "--checkpoint", copy, *text.split())
    assert run.status == 0 and "stage 1 on 2 ranks" in run.output and "(bfloat16)" in run.output, (
        run.output
    )
    assert Manifest.read(newest(copy))["recipe"] == "bfloat16"
    assert len(list(copy.glob("step-*"))) == 1


def test_a_folder_that_cannot_be_used_is_an_error(saved, copy, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    none = tmp_path / "none"
    wrong = {
        (*MODEL, "--checkpoint", tmp_path / "file", "--log", tmp_path / "no-log"): [
            "file: not a folder"
        ],
        (*MODEL, "--checkpoint", none / "dir"): [
            "--checkpoint: ",
            "none/dir: its parent folder must exist (mkdir -p ",
        ],
        ("--resume", "--checkpoint", none): ["none: no such folder"],
        ("--resume", "--checkpoint", tmp_path / "empty"): ["empty: no complete checkpoint in it"],
        (*MODEL, "--checkpoint", copy): [
            "--checkpoint:",
            "already exists; continue it with --resume",
        ],
    } | {
        tuple(flags.split()): [flags.split()[0], "needs --checkpoint DIR"]
        for flags in ("--resume", "--keep 2", "--save-every 3")
    }
    assert_refused(2, tmp_path, wrong)
    held = Folder(copy, keep=3)
    refused(train(2, "--resume", "--checkpoint", copy), "dir: in use by another job")
    held.close()
    assert not (tmp_path / "none").exists() and not (tmp_path / "no-log").exists()


def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(copy):
    """By a limit on the size of files, on one rank."""
    before = bits(copy)
    run = run_world(
        4,
        [
            DRIVER,
            "limit",
            2,
            20_000,
            "--resume",
            "--steps",
            "5",
            "--micro-batch",
            "1",
            *arguments(copy),
        ],
        60,
    )
    lines = [line for line in run.output.splitlines() if "error" in line]
    assert (
        run.status == 2
        and len(lines) == 1
        and "rank-0002.bin: File too large (on rank 2)" in lines[0]
    ), run.output
    assert bits(copy) == before and not list(copy.glob(".saving*"))
    assert train(1, "--resume", "--steps", "5", "--micro-batch", "4", *arguments(copy)).status == 0


def arguments(folder):
    return ["--checkpoint", folder]


# ---- under fire: parts of `tests/faults/checkpoints.py` ------------------------------------------


def test_killed_around_saving_it_goes_on_to_the_same_bits():
    assert sum(kills(3, seed=5).values()) == 3


def test_damage_is_found_and_named_by_the_command():
    assert sum(flips(6, seed=5).values()) == 6


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 0)], ids=["SIGTERM", "SIGUSR1"]
)
def test_the_first_signal_saves_and_ends(tmp_path, number, status):
    """Sent by one rank to itself before its third step; a second one ends it without a save."""
    flags = [*MODEL, "--steps", "500", "--checkpoint", tmp_path / "dir"]
    run = run_world(3, [DRIVER, "signal", 1, int(number), *flags], 60)
    assert run.status == status and not run.left, run.output
    assert (
        f"stopped by {number.name} after step 2 of 500" in run.output
        and bits(tmp_path / "dir")[0][0] == 2
    )
    twice = run_world(
        3, [DRIVER, "signals", 1, int(number), *MODEL, "--checkpoint", tmp_path / "other"], 60
    )
    assert twice.status == 128 + number and f"rank 1: ended by {number.name}" in twice.output, (
        twice.output
    )
    assert not list((tmp_path / "other").glob("step-*"))


def test_without_a_folder_a_signal_ends_the_run_at_once():
    run = run_world(3, [DRIVER, "signal", 1, int(signal.SIGTERM), *MODEL, "--steps", "500"], 60)
    assert run.status == 143 and "rank 1: ended by SIGTERM" in run.output, run.output


# ---- weights for other tools ---------------------------------------------------------------------


def export(checkpoint, to, *without):
    """zmpi.export in a Python that has no mpi4py (and lacks what else is named)."""
    block = "".join(f"sys.modules[{name!r}] = None; " for name in ("mpi4py", *without))
    code = (
        f"import sys; {block}sys.argv[1:] = {['--checkpoint', str(checkpoint), '--to', str(to)]}\n"
    )
    code += "import runpy; runpy.run_module('zmpi.export', run_name='__main__')"
    return run_python(code)


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
        timeout=60,
    )


def test_the_round_trip_through_an_export_is_exact(saved, tmp_path):
    """B12: trained at stage 3, exported without MPI, loaded at another stage: same weights.

    A rate of 1e-60 is 0 in float32.
    """
    done = export(saved, tmp_path / "gpt2")
    assert done.returncode == 0 and "exported step 4" in done.stdout, done.stderr
    run = train(
        3,
        "--init-from",
        tmp_path / "gpt2",
        "--steps",
        "1",
        "--lr",
        "1e-60",
        "--stage",
        "1",
        *arguments(tmp_path / "dir"),
    )
    assert run.status == 0, run.output
    again = export(tmp_path / "dir", tmp_path / "again")
    assert again.returncode == 0, again.stderr
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "gpt2" / name).read_bytes()
    refused(
        train(2, "--init-from", tmp_path / "gpt2", "--width", "48"), "--width: 48 contradicts 24"
    )
    refused(train(2, "--init-from", tmp_path / "none"), "none (missing)")


def test_what_cannot_be_exported_is_one_line(saved, copy, tmp_path):
    def told(done, *texts):
        lines = done.stderr.splitlines()
        assert (
            done.returncode == 2 and len(lines) == 1 and lines[0].startswith("zmpi.export: error: ")
        ), done.stderr
        assert all(text in lines[0] for text in texts), done.stderr

    told(export(tmp_path / "none", tmp_path / "to"), "none: no such folder")
    told(export(saved, tmp_path / "to", "safetensors"), "needs the package safetensors")
    file = newest(copy) / "rank-0001.bin"
    good = file.read_bytes()
    file.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    told(export(copy, tmp_path / "to"), "rank-0001.bin", "damaged")
    assert not list((tmp_path / "to").glob("*")) and not list((tmp_path / "to").glob(".*"))
    assert export(saved, tmp_path / "to").returncode == 0
    told(export(saved, tmp_path / "to"), "model.safetensors: already exists")


# ---- generate ------------------------------------------------------------------------------------


def generate(size, checkpoint, *flags):
    return run_world(size, ["-m", "zmpi.generate", "--checkpoint", checkpoint, *flags], timeout=60)


@pytest.mark.parametrize(
    "drawn", [[], ["--temperature", "0.9", "--top-k", "40", "--seed", "3"]], ids=["greedy", "drawn"]
)
def test_any_number_of_ranks_writes_the_same_text(saved, drawn):
    """Longer than the context of 16: the window slides."""
    alone = generate(1, saved, "--prompt-ids", "84,104,101", "--tokens", "30", *drawn)
    ids = [int(number) for number in alone.output.split(",")]
    assert alone.status == 0 and ids[:3] == [84, 104, 101] and len(ids) == 33, alone.output
    for size in (2, 3):
        assert (
            generate(size, saved, "--prompt-ids", "84,104,101", "--tokens", "30", *drawn).output
            == alone.output
        )
    end = ids[9]
    stopped = generate(2, saved, "--prompt-ids", "84,104,101", "--stop", str(end), *drawn)
    assert stopped.status == 0
    assert stopped.output == ",".join(map(str, ids[: ids.index(end, 3)])) + "\n"
    text = generate(1, saved, "--prompt", "The", "--tokens", "30", *drawn)
    assert text.status == 0 and text.output == bytes(ids).decode(errors="replace") + "\n"


def test_what_cannot_be_written_is_refused(saved, tmp_path):
    wrong = {
        (): "--prompt: give either --prompt or --prompt-ids",
        ("--prompt", ""): "--prompt: expected at least 1 token, got 0",
        ("--prompt-ids", "1,256"): "--prompt-ids: token 256 is not below",
        ("--prompt-ids", "1,x"): "--prompt-ids: expected a whole number",
        (
            "--prompt-ids",
            "1",
            "--tokenizer",
            "x.json",
        ): "--tokenizer: --prompt-ids are already tokens",
        ("--prompt", "a", "--tokenizer", "none.json"): "--tokenizer: expected a file, got none",
        ("--prompt-ids", "1", "--stop", "256"): "--stop: token 256 is not",
    }
    lines = {("--checkpoint", saved, *flags): [text] for flags, text in wrong.items()}
    assert_refused(2, tmp_path, lines, "generate")
    refused(generate(2, tmp_path, "--prompt", "a"), "no complete checkpoint in it")


def test_a_tokenizer_that_panics_is_one_line_on_all_ranks(saved, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="?"))
    made.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex("(a+)+$"), "")
    made.save(str(tmp_path / "tokenizer.json"))
    flags = "--tokenizer", tmp_path / "tokenizer.json", "--prompt", "a" * 40 + "!"
    refused(generate(3, saved, *flags), "tokenizer.json cannot encode the prompt: ")
