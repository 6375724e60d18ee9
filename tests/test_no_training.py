"""A run that trained nothing says so, saves nothing and ends with status 1."""

import json
import re
from types import SimpleNamespace

import pytest
from test_train_command import MLP, SMALL, alone, train, words

from zmpi.cli.progress import GIVE_UP, NothingTrained, Progress

HIGH = words("--precision float16 --loss-scale 16777216")  # 2^24: every step overflows


class Engine:
    """What Progress sees of an engine: its last step, and the loss scale."""

    def __init__(self, window=None):
        self.step = self.updates = 0
        self.scaler = SimpleNamespace(scale=2.0**24, window=window)
        self.policy = SimpleNamespace(precision="float16")

    def take(self, skipped, grad_norm=1.0):
        self.step += 1
        self.updates += not skipped
        self.last = SimpleNamespace(skipped=skipped, grad_norm=grad_norm)


def counted(engine, steps):
    """Warnings of steps, each "s" (skipped), "0" (gradient 0) or "." (trained), and the fault."""
    progress, warnings = Progress(engine), []
    for step in steps:
        engine.take(step == "s", 0.0 if step == "0" else 1.0)
        warnings.append(progress.step())
    return [text for text in warnings if text], progress.fault()


def test_a_fifth_of_the_last_50_steps_skipped_is_one_warning():
    warnings, fault = counted(Engine(), "." * 40 + "s" * 20)
    assert fault is None and len(warnings) == 1
    assert warnings[0].startswith("step 50: 10 of the last 50 steps were skipped: gradients overf")
    assert counted(Engine(), ("." * 41 + "s" * 9) * 4) == ([], None)
    assert len(counted(Engine(), ("s" * 10 + "." * 50) * 3)[0]) == 3


def test_a_hundred_steps_skipped_in_a_row_end_the_run():
    assert counted(Engine(), "." + "s" * (GIVE_UP - 1) + "." + "s" * (GIVE_UP - 1))[1] is None
    with pytest.raises(NothingTrained, match=f"step {GIVE_UP + 1}: the last {GIVE_UP} steps were"):
        counted(Engine(), "." + "s" * GIVE_UP)


def test_a_shorter_run_without_a_step_that_trains_is_at_fault():
    assert "all 3 steps were skipped" in counted(Engine(), "sss")[1]
    assert "the gradient was 0 in all 3 steps" in counted(Engine(), "000")[1]
    assert counted(Engine(), "s0.")[1] is None
    dynamic = Engine(window=2000)
    assert "it is still falling" in counted(dynamic, "sss")[1]
    dynamic.updates = 7  # resumed: the scale doubled too far, and comes down again
    assert counted(dynamic, "sss")[1] is None


def test_a_run_whose_steps_were_all_skipped_says_so_on_every_rank(tmp_path):
    """The reported case: all 50 steps were skipped, a checkpoint was saved, the status was 0."""
    keep = ["--checkpoint", tmp_path / "dir", "--save-every", 2, "--log", tmp_path / "log"]
    ended = train(3, *MLP, *HIGH, "--steps", 12, *keep)
    assert ended.status == 1 and "Traceback" not in ended.output, ended.output
    lines = ended.output.splitlines()
    warnings = [line for line in lines if "warning: step 10: 10 of the last 10 steps were" in line]
    errors = [line for line in lines if line.startswith("zmpi.train: error: ")]
    assert len(warnings) == len(errors) == 1
    fault = errors[0].removeprefix("zmpi.train: error: ")
    assert fault.startswith("nothing was trained: all 12 steps were skipped: gradients overflow")
    assert "skipped 12 of 12 steps (gradients overflowed)" in lines
    assert "saved" not in ended.output and not list((tmp_path / "dir").glob("step-*"))
    end = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert end == {"step": 12, "end": fault, "skipped_steps": 12}


def test_skipped_steps_push_no_checkpoint_out_and_a_resume_repairs_the_scale(tmp_path):
    """A resume may set another loss scale, or one that never fits would be used for ever."""
    folder = ["--device", "cpu", "--checkpoint", tmp_path / "dir", "--keep", 1]
    fresh = alone(*MLP, "--precision", "float16", "--loss-scale", 8, "--steps", 2, *folder)
    assert fresh.returncode == 0 and "skipped 0 of 2 steps" in fresh.stdout, fresh.stderr
    resumed = [*folder, "--resume", "--save-every", 1]
    before = sorted(path.name for path in (tmp_path / "dir").glob("step-*"))
    too_high = alone(*resumed, "--loss-scale", 16777216, "--steps", 300)
    fault = "zmpi.train: error: step 102: the last 100 steps were skipped: gradients overflow"
    assert too_high.returncode == 1 and fault in too_high.stderr, too_high.stderr
    assert sorted(path.name for path in (tmp_path / "dir").glob("step-*")) == before
    repaired = alone(*resumed, "--loss-scale", "auto", "--steps", 6)
    assert repaired.returncode == 0, repaired.stderr
    assert int(re.search(r"skipped (\d) of 6 steps", repaired.stdout)[1]) < 4


def test_evaluations_of_nothing_are_refused(tmp_path):
    (tmp_path / "text").write_bytes(b"a" * 30)
    ended = alone(*SMALL, "--data", tmp_path / "text", "--eval-every", 1)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("zmpi.train: error: --eval-every: none of the 30 tokens of ")
