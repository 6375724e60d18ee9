"""FILE:CLASS: a model, an optimizer and a communicator of your own: one class and one flag each."""

import json
import re

import pytest
from mpirun import ROOT, run_world

from zmpi.cli.model_flags import DEFAULT_SIZES, build_model
from zmpi.cli.optimizer_flags import HYPERPARAMETERS, build_optimizer
from zmpi.cli.own import leave_defaults
from zmpi.cli.start import engine_of
from zmpi.cli.train_flags import check_outputs
from zmpi.train import parser

words = str.split
OWN = ROOT / "tests/own"
MINE = {
    "model": f"--model {OWN}/bigram.py:Bigram",
    "optimizer": f"--optimizer {OWN}/lion.py:Lion",
    "comm": f"--comm {OWN}/half.py:Half",
}
TINY = words("--device cpu --micro-batch 2")
CLASSES = '''
import numpy as np
from models import GPT, MLP

class Sized(GPT):
    """Its sizes are its own; all but the width have no default."""
    def __init__(self, layers, heads, context, vocab, width=12):
        self.given = dict(layers=layers, heads=heads, context=context, vocab=vocab, width=width)
        super().__init__(layers, width, heads, context, vocab)

class Even(MLP):
    def __init__(self, width=8):
        if width % 2:
            raise ValueError(f"width: expected an even number, got {width}")
        super().__init__(1, width, 4, 256)

class Needs:
    def __init__(self, depth): pass

class Broken:
    def __init__(self):
        self.layers = {}["nothing"]

class Empty:
    layers = []

class Strange(GPT):
    """Its loss uses what arrays that are only counted cannot do."""
    def __init__(self):
        super().__init__(1, 8, 2, 8, 256)
    def loss(self, y, targets, divisor):
        np.nan_to_num(y, copy=False)
        return super().loss(y, targets, divisor)'''


def train(size, *flags, timeout=100):
    return run_world(size, ["-m", "zmpi.train", *map(str, flags)], timeout)


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "classes.py"
    path.write_text(CLASSES)
    return path


def test_three_classes_are_three_flags(tmp_path):
    """All at once, with the flags that were given and no others; the log says what was trained."""
    log = tmp_path / "log"
    flags = words(" ".join(MINE.values())) + words("--width 8 --lr 0.01 --beta2 0.9 --steps 40")
    ended = train(3, *TINY, *flags, "--log", log)
    assert ended.status == 0, ended.output
    header, *steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert header["parameters"] == 256 * 8 + 8 * 256 + 256
    assert header["recipe"]["optimizer"] == 4  # Lion's one moment
    losses = [entry["loss"] for entry in steps if "loss" in entry]
    assert losses[-1] < losses[0] - 0.2
    assert {entry["lr"] for entry in steps if "lr" in entry} == {
        0.01
    }  # Lion's own course: constant
    moved = steps[0]["comm"]["all_gather"]
    padded = sum(header["padded_unit_sizes"].values())
    assert moved["bytes_sent"] == 2 * padded // 3 * 2  # 2 others, 2 bytes an element


def test_a_run_of_ones_own_classes_is_resumed_with_the_same_flags(tmp_path):
    """The flags that were not given stay the class's own; the classes must be given again."""
    folder = ["--checkpoint", tmp_path / "ck"]
    mine = words(" ".join(MINE.values()))
    first = train(2, *TINY, *folder, *mine, *words("--width 8 --schedule constant --steps 1"))
    assert first.status == 0, first.output
    alone = train(2, "--device", "cpu", *folder, "--resume", "--steps", 2)
    assert alone.status == 2 and "give --model FILE:Bigram again" in alone.output, alone.output
    again = train(2, "--device", "cpu", *folder, "--resume", "--steps", 2, *mine)
    assert again.status == 0 and "1 of 2 steps are done" in again.output, again.output


REFUSED = {  # flags, where C is the file of CLASSES -> the line
    "--model C:Nothing": "--model: C has no class Nothing",
    "--model C:": "--model: expected FILE:CLASS, got C:",
    "--model missing.py:X": "--model: expected FILE:CLASS, got missing.py:X (missing.py is not",
    "--model C:Even --heads 2": "--heads: not accepted by --model C:Even",
    "--model C:Even --width 7": "--width: expected an even number, got 7 (--model C:Even)",
    "--model C:Needs": "--model: C:Needs needs depth, which is not a flag",
    "--model C:Empty": "--model: C:Empty needs `layers`, a list, and `loss`, a method",
    "--optimizer C:Even": "--optimizer: C: class Even is not a zmpi Optimizer",
    "--optimizer L:Lion --momentum 0.9": "--momentum: not accepted by --optimizer L:Lion",
    "--optimizer L:Lion --schedule cosine --warmup 9 --decay-steps 9": "--decay-steps: expected"
    " more",
    "--comm L:Lion": "--comm: L: class Lion is not a zmpi Communicator or ZeRO",
    "--log C --model C:Even": "--log: C is also the file of --model",
}


def parsed(flags):
    """The arguments of a command line, as zmpi.train settles them."""
    args = parser().parse_args(flags)
    leave_defaults(args, "model", DEFAULT_SIZES, parser().given(flags))
    leave_defaults(args, "optimizer", HYPERPARAMETERS, parser().given(flags))
    return args


@pytest.mark.parametrize("flags", REFUSED)
def test_what_a_class_does_not_accept_is_said(classes, flags):
    def there(text):
        for name, path in {"C": str(classes), "L": str(OWN / "lion.py")}.items():
            text = text.replace(f"{name}:", f"{path}:").replace(f"{name} ", f"{path} ")
        return text

    args = parsed(there(flags).split())
    with pytest.raises(ValueError, match=f"^{re.escape(there(REFUSED[flags]))}"):
        build(args)


def build(args):
    """All that a command line can be wrong about its classes."""
    check_outputs(args)
    return build_model(args), build_optimizer(args), engine_of(args.comm)


def test_one_file_may_hold_two_classes():
    args = parser().parse_args(["--model", "mine.py:Model", "--optimizer", "mine.py:Lion"])
    check_outputs(args)
    args.log = "mine.py"
    with pytest.raises(ValueError, match=r"--log: mine\.py is also the file of --model"):
        check_outputs(args)


def test_an_error_of_a_class_is_one_line_for_all_ranks(classes):
    ended = train(3, *TINY, "--model", f"{classes}:Broken")
    line = f"zmpi.train: error: --model: {classes}:Broken: KeyError: 'nothing' (line 22 of"
    assert ended.status == 2 and len(ended.output.splitlines()) == 1, ended.output
    assert ended.output.startswith(line)


def test_what_a_class_needs_and_was_not_given_is_the_flags_default(classes):
    args = parsed(["--model", f"{classes}:Sized", "--context", "16"])
    assert build_model(args).given == {**DEFAULT_SIZES, "context": 16, "width": 12}


def test_a_cosine_of_its_own_ends_after_the_last_step():
    flags = [*words(MINE["optimizer"]), *words("--schedule cosine --warmup 3 --steps 50")]
    assert build_optimizer(parsed(flags)).decay_steps == 50
    assert build_optimizer(parsed([*flags, "--decay-steps", "40"])).decay_steps == 40
    assert build_optimizer(parsed([*flags, "--steps", "2"])).decay_steps == 4


def test_bench_plans_and_measures_them(classes):
    flags = [*TINY, *words("--steps 5 --stages 3")]
    mine = words(" ".join(MINE.values()))
    ended = run_world(3, ["-m", "zmpi.bench", *flags, *mine], timeout=100)
    assert ended.status == 0, ended.output
    assert "optimizer, formula" in ended.output and "unknown" not in ended.output
    assert "formula and plan are for zmpi's own communicator" in ended.output
    strange = run_world(
        2, ["-m", "zmpi.bench", *flags, "--model", f"{classes}:Strange"], timeout=100
    )
    assert strange.status == 0, strange.output
    assert "not planned: the dry run cannot walk this model (TypeError" in strange.output
    assert "nan_to_num" in strange.output and "tokens/s" in strange.output
