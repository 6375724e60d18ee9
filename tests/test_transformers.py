"""transformers loads what zmpi exports, with the same loss; zmpi trains on what it saves.

Runs where torch and transformers are installed. Their float32 sums in other orders than ours: 1e-4
relative is the promise, 1e-6 is what it comes to.
"""

import subprocess
import sys

import numpy as np
import pytest
from mpirun import ROOT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXT = (ROOT / "tests" / "test_transformers.py").read_bytes()
DRIVER = """
import sys
import numpy as np
from models import GPT
from zmpi import AdamW, World, ZeRO
from zmpi.saving.checkpoint import find, load_weights
from zmpi.cli.resume import init_from
what, source = sys.argv[1], sys.argv[2]
sizes = dict(layers=3, width=48, heads=4, context=64, vocab=256)
tokens = np.frombuffer(open(sys.argv[3], "rb").read(), np.uint8).astype(np.int64)
windows = np.stack([tokens[start:start + 65] for start in range(0, len(tokens) - 65, 64)])
batch = [(windows[:, :-1], windows[:, 1:].copy())]
zero = ZeRO(GPT(**sizes), World(), stage=2, optimizer=AdamW(lr=3e-3))
if what == "train":
    for _ in range(20):
        zero.train_step(batch)
    zero.save(source)
else:
    init_from(zero, source)
print(repr(float(zero.evaluate(batch))))
"""


def ours(what, folder, text):
    run = subprocess.run(
        [sys.executable, "-c", DRIVER, what, folder, text],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return float(run.stdout)


def theirs(model):
    tokens = np.frombuffer(TEXT, np.uint8).astype(np.int64)
    windows = torch.tensor(
        np.stack([tokens[start : start + 65] for start in range(0, len(tokens) - 65, 64)])
    )
    with torch.no_grad():
        logits = model.eval()(windows[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").write_bytes(TEXT)
    return tmp_path / "text"


def test_an_export_has_the_same_loss_in_transformers(tmp_path, text):
    expected = ours("train", tmp_path / "dir", text)
    command = [
        sys.executable,
        "-m",
        "zmpi.export",
        "--checkpoint",
        tmp_path / "dir",
        "--to",
        tmp_path / "gpt2",
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    model, told = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "gpt2", output_loading_info=True
    )
    assert not any(told.values()), told
    assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()
    found = theirs(model)
    print(
        f"loss: zmpi {expected:.9f}, transformers {found:.9f},"
        f" relative difference {abs(found / expected - 1):.1e}"
    )
    assert expected < 4 and abs(found / expected - 1) < 1e-4


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_what_transformers_saved_has_the_same_loss_here(tmp_path, text, kind):
    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_embd": 48, "n_head": 4, "n_positions": 64, "vocab_size": 256}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).to(getattr(torch, kind))
    model.save_pretrained(tmp_path / "gpt2")
    expected, found = theirs(model.float()), ours("init", tmp_path / "gpt2", text)
    print(
        f"loss: transformers {expected:.9f}, zmpi {found:.9f},"
        f" relative difference {abs(found / expected - 1):.1e}"
    )
    assert abs(found / expected - 1) < 1e-4
