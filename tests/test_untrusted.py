"""Checkpoints from anyone: reading any file ends in one line or in numbers, never in code."""

import hashlib
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from models import GPT, units
from zmpi import export, generate, train
from zmpi.cli import resume
from zmpi.core.layout import Layout
from zmpi.core.stages import STAGES
from zmpi.process.errors import UsageError
from zmpi.process.files import JSON_BYTES, read_file
from zmpi.saving import pretrained
from zmpi.saving.blocks import BlockWriter
from zmpi.saving.found import identify, newest, read_checkpoint
from zmpi.saving.manifest import DIGEST, JSON, Manifest, Readers, unit_entry

SIZES = {"layers": 2, "width": 6, "heads": 3, "context": 5, "vocab": 11}
MODEL, RANKS = GPT(**SIZES), 3
PARSER = train.parser()
HOSTILE = [
    None,
    True,
    -1,
    0,
    1 << 63,
    10**30,
    1e308,
    "../../etc/passwd",
    "/etc/passwd",
    "..",
    "two\nlines",
    "\x1b[2J",
    "x" * 5000,
    "O",
    [],
    {},
    [[[]]],
]


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint as the command saves it, whose weights are 0."""
    path = tmp_path / "step-00000004-save-2"
    path.mkdir()
    layouts = [Layout(name, spec.prefix, spec.shapes, RANKS) for name, spec in units(MODEL).items()]
    files = []
    for rank in range(RANKS):
        writer = BlockWriter(path / f"rank-{rank:04d}.bin")
        for layout in layouts:
            for _ in range(3):
                writer.write(np.zeros(layout.shard_length, np.float32))
        files.append(writer.finish().entry())
    args = PARSER.parse_args([f"--{flag}={size}" for flag, size in SIZES.items()])
    flags = {name: getattr(args, name) for name in resume.SAVED}
    data = {"tokens": 100, "kind": "uint8", "crc32": 7, "spread_crc32": 8, "python": "3.11.7"}
    data |= {"global_batch": 24, "next_step": 5, "sequences_seen": 96}
    entries = {
        "run_id": "ab" * 16,
        "save": 2,
        "step": 4,
        "updates": 4,
        "seed": 0,
        "size": RANKS,
        "stage": 3,
        "recipe": "float32",
        "master": "float32",
        "vectors": ["master", "m", "v"],
        "scaler": {"scale": 1.0, "good_steps": 0, "window": None},
        "optimizer": {"name": "AdamW", "lr": 0.003},
        "model": {
            "kind": "GPT",
            **{"depth" if n == "layers" else n: size for n, size in SIZES.items()},
        },
        "units": [unit_entry(layout) for layout in layouts],
        "files": files,
        "run": {"flags": flags, "code": {"comm": "Mine"}, "data": data},
    }
    Manifest(path, entries).write()
    return path


def use(path):
    """All that is made of a checkpoint's fields before its weights; the settings of a run."""
    identify(path)
    manifest = read_checkpoint(path)
    model = generate._build(manifest)
    for name, shape in manifest.shapes.items():
        for vector in manifest["vectors"]:
            manifest.pieces(name, vector, 0, int(np.prod(shape)))
    manifest.check(0, 1)
    args, given = PARSER.parse_args([]), {"comm": "zmpi"}
    saved = resume.saved_flags(manifest, PARSER)
    resume.take_settings(args, given, manifest, saved, RANKS)
    return model, args


def leaves(value, place=()):
    """The place of every field, of an array its first and last."""
    yield place
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*place, key))
    elif isinstance(value, list) and value:
        for number in {0, len(value) - 1}:
            yield from leaves(value[number], (*place, number))


def test_every_hostile_value_of_every_field_of_a_manifest_is_one_line_or_harmless(checkpoint):
    good = (checkpoint / JSON).read_text()
    untouched = vars(PARSER.parse_args([]))
    accepted = 0
    for place in list(leaves(json.loads(good)))[1:]:
        for value in HOSTILE:
            entries = json.loads(good)
            target = entries
            for key in place[:-1]:
                target = target[key]
            target[place[-1]] = value
            (checkpoint / JSON).write_text(json.dumps(entries))
            _renew(checkpoint)
            try:
                model, args = use(checkpoint)
            except (ValueError, UsageError) as error:
                line = str(error)
                assert len(line) < 600 and line.splitlines() == [line], (place, value)
                assert line.isprintable(), (place, value)
            else:
                accepted += 1
                assert len(model.layers) == 4 and model.width == 6, (place, value)
                for name, kept in vars(args).items():
                    assert name in resume.SAVED or kept == untouched[name], (place, value)
                assert args.comm is None or args.comm == "zmpi" or place[-1] == "comm"
    assert accepted  # such as another seed, or a number that is only told


def _renew(path):
    digest = hashlib.sha256((path / JSON).read_bytes()).hexdigest()
    (path / DIGEST).write_text(f"{digest}  {JSON}\n")


@pytest.mark.parametrize("name", ["trace", "log", "checkpoint", "init_from", "resume", "help", "x"])
def test_a_flag_that_is_not_a_runs_is_not_taken_from_a_manifest(checkpoint, name):
    entries = Manifest.read(checkpoint).entries
    entries["run"]["flags"][name] = "/tmp/victim.json"
    Manifest(checkpoint, entries).write()
    with pytest.raises(ValueError, match=rf"{JSON}: --{name.replace('_', '-')} is not a flag"):
        use(checkpoint)


@pytest.mark.parametrize("name", resume.MAY_BE_OWN)
def test_a_class_of_ones_own_is_never_saved_and_never_taken(checkpoint, name):
    """Not from an older manifest either, which names the file."""
    entries = Manifest.read(checkpoint).entries
    entries["run"]["code"] = {}
    entries["run"]["flags"][name] = "/tmp/evil.py:Evil"
    Manifest(checkpoint, entries).write()
    manifest = Manifest.read(checkpoint)
    saved = resume.saved_flags(manifest, PARSER)
    assert name not in saved
    with pytest.raises(ValueError, match=f"--{name}: the run used your class Evil"):
        resume.take_settings(PARSER.parse_args([]), {}, manifest, saved, RANKS)
    args = PARSER.parse_args([])
    setattr(args, name, "/else/where.py:Good")
    zero = SimpleNamespace(model=MODEL, optimizer=train.build_optimizer(PARSER.parse_args([])),
                           world=SimpleNamespace(size=3), stage=STAGES[3], step=4)  # fmt: skip
    text = SimpleNamespace(fingerprint={"tokens": 1})
    described = json.dumps(resume.describe_run(args, zero, text))
    assert "where.py" not in described and f'"{name}": "Good"' in described


@pytest.mark.parametrize(
    "name", ["../rank-0000.bin", "/tmp/rank-0000.bin", "..", "sub/rank-0000.bin"]
)
def test_a_file_outside_of_the_checkpoint_is_not_opened(checkpoint, name):
    """Though its content is right."""
    entries = Manifest.read(checkpoint).entries
    if name.endswith("bin") and not name.startswith("/"):
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_bytes((checkpoint / "rank-0000.bin").read_bytes())
    entries["files"][0]["name"] = name
    Manifest(checkpoint, entries).write()
    with pytest.raises(ValueError, match="name: expected a file's name without a folder"):
        use(checkpoint)


def test_an_export_opens_as_many_files_as_it_may(checkpoint, tmp_path, monkeypatch):
    """Raises the soft limit; if the hard one is too low, closes and reopens files: same weights."""
    pytest.importorskip("safetensors")
    manifest, limits = Manifest.read(checkpoint), [(5, 4096), (66, 66)]
    raised, open_now = [], []
    monkeypatch.setattr(export.resource, "getrlimit", lambda _: limits[len(open_now)])
    monkeypatch.setattr(export.resource, "setrlimit", lambda _, limit: raised.append(limit))
    for folder in ("raised", "few"):
        export.export_weights(manifest, tmp_path / folder)
        open_now.append(folder)
    assert raised == [(RANKS + export.OTHER_FILES, 4096), (66, 66)]
    found = [(tmp_path / folder / pretrained.WEIGHTS).read_bytes() for folder in open_now]
    assert found[0] == found[1]
    before = len(os.listdir("/proc/self/fd"))
    with Readers(manifest, 2) as readers:
        for file in (0, 1, 2, 0, 2, 1):
            readers[file].read(0, np.empty(8, np.uint8))
            assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert len(os.listdir("/proc/self/fd")) == before


TEXTS = {
    "nested": "[" * 200_000,
    "nested objects": '{"a":' * 200_000,
    "NaN": '{"format": NaN}',
    "infinity": '{"format": 1e999}',
    "digits": '{"format": ' + "9" * 5000 + "}",
    "no object": "[1]",
    "no JSON": "{",
    "no Unicode": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("text", TEXTS)
def test_json_that_is_none_or_too_much_is_one_line(checkpoint, text):
    content = TEXTS[text] if isinstance(TEXTS[text], bytes) else TEXTS[text].encode()
    (checkpoint / JSON).write_bytes(content)
    _renew(checkpoint)
    with pytest.raises(ValueError, match=JSON) as error:
        Manifest.read(checkpoint)
    assert len(str(error.value).splitlines()) == 1
    config = checkpoint / "config.json"
    config.write_bytes(content)
    (checkpoint / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"config\.json"):
        pretrained.sizes_in(checkpoint)


def test_no_file_that_waits_or_never_ends_is_read(checkpoint, tmp_path):
    """A pipe, a device, a file beyond the bound, in the place of each file that is read."""
    for name in (JSON, DIGEST, "rank-0001.bin"):
        good = (checkpoint / name).read_bytes()
        for replace in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
            (checkpoint / name).unlink()
            replace(checkpoint / name)
            with pytest.raises(ValueError, match=f"{name}: not a regular file"):
                use(checkpoint)
        (checkpoint / name).unlink()
        (checkpoint / name).write_bytes(good)
    with open(checkpoint / JSON, "wb") as file:
        file.truncate(JSON_BYTES + 1)
    with pytest.raises(ValueError, match=f"{JSON}: expected at most"):
        Manifest.read(checkpoint)
    os.mkfifo(tmp_path / "latest")
    with pytest.raises(ValueError, match="latest: not a regular file"):
        newest(tmp_path)
    with pytest.raises(ValueError, match="latest: not a regular file"):
        read_file(tmp_path / "latest", JSON_BYTES)


@pytest.mark.parametrize("size", [1 << 40, 1 << 31, 10**9, True])
def test_sizes_beyond_the_weights_are_refused_before_a_model_is_made(tmp_path, size):
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file(
        {"wte.weight": np.zeros((11, 6), np.float32)}, tmp_path / "model.safetensors"
    )
    config = pretrained.config_for(SIZES)
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": size}))
    with pytest.raises(ValueError, match=r"n_layer|model.safetensors: .* bytes for the sizes in"):
        pretrained.sizes_in(tmp_path)
