"""The planner: the paper's figures, dry runs of worlds that do not exist, and questions that have no answer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import GPT, MLP
from zmpi import plan
from zmpi.core.stages import STAGES, elements_moved, state_bytes
from zmpi.cost.estimate import HIGHEST, Setting, Speed, largest, ranks_that_pay
from zmpi.cost.paper import RANKS, SIZES, TABLE_1, TABLE_2, largest_model, state_gb
from zmpi.numbers.precision import Policy

ROOT = Path(__file__).resolve().parent.parent
TRILLION = (
    "--layers 128 --width 25600 --heads 160 --context 1024 --vocab 50257 --ranks 1024 --dry-run"
)
HUNDRED_BILLION = (
    "--layers 80 --width 10240 --heads 80 --context 1024 --vocab 50257 --ranks 400 --dry-run"
)
WITHOUT_MPI = """\
import resource, sys
sys.modules["mpi4py"] = None  # an import of it raises
from zmpi import plan
plan.main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
"""


def said(arguments, capsys):
    plan.main(arguments.split())
    return capsys.readouterr().out


def test_figure_1_of_the_paper(capsys):
    text = said("--params 7.5e9 --ranks 64", capsys)
    assert "2 + 2 + 12 bytes per parameter (float16)" in text
    assert [line.split()[-1] for line in text.splitlines()[2:]] == ["120", "31.4", "16.6", "1.9"]


def test_the_json_is_in_bytes(capsys):
    found = json.loads(said("--params 7.5e9 --ranks 64 --json", capsys))
    assert found["recipe"] == {"name": "float16", "parameters": 2, "gradients": 2, "optimizer": 12}
    assert (found["parameters"], found["ranks"]) == (7500000000, 64)
    assert [row["total"] for row in found["stages"]] == [120e9, 31.40625e9, 16.640625e9, 1.875e9]
    for row in found["stages"]:
        assert row["total"] == row["parameters"] + row["gradients"] + row["optimizer"]


@pytest.mark.parametrize("size", TABLE_1)
def test_every_cell_of_table_1_is_within_one_unit_of_its_last_digit(size):
    for ranks, row in zip(RANKS, TABLE_1[size], strict=True):
        for stage, cell in zip(STAGES[1:], row, strict=True):
            unit = 10.0 ** -len(cell.partition(".")[2])
            assert abs(state_gb(stage, SIZES[size], ranks) - float(cell)) <= unit, (
                ranks,
                stage.number,
            )


def test_table_2s_theory_and_the_share_that_was_measured(capsys):
    first = [largest_model(stage, 64, 32e9) / 1e9 for stage in STAGES]
    assert [float(cell) for cell in TABLE_2[1][:4]] == pytest.approx(first, abs=0.1)
    text = said("--paper", capsys)
    assert "only analysed" in text and "measured DP" in text
    assert "62%" in text and "82%" in text
    assert text.count(" | ") == 54 + 5 * 4 + 2


@pytest.mark.parametrize(
    "arguments", [HUNDRED_BILLION, TRILLION], ids=["100B on 400", "1T on 1,024"]
)
def test_a_large_world_is_walked_without_memory_or_mpi(arguments):
    """Under 1 GB, and soon (1.4 and 3.1 s when this was written): a walk over the elements themselves would not end."""
    command = [sys.executable, "-c", WITHOUT_MPI, *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert float(done.stderr) < 1e9  # bytes resident: nothing of the model's size was allocated
    assert "in backward h." in done.stdout and "all_gather" in done.stdout


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([GPT(3, 12, 3, 8, 31), MLP(2, 9, 4, 17)]),
    st.integers(1, 4096),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.integers(1, 3),
    st.sampled_from(["auto", "ordered"]),
)
def test_a_walk_has_the_formulas_state_and_elements(model, ranks, precision, accumulate, reduction):
    setting = Setting(lambda _: model, ranks, Policy(precision), 2, accumulate, reduction)
    for stage in STAGES:
        walk = setting.walk(stage.number)
        padded = sum(walk.padded.values())
        assert walk.state == state_bytes(stage, padded, ranks, setting.policy.recipe)
        expected = elements_moved(
            stage, walk.schedule, walk.unit_sizes, accumulate, walk.reduce_each
        )
        assert {kind: walk.comm[kind]["elements"] for kind in expected} == expected
        sent = elements_moved(stage, walk.schedule, walk.padded, accumulate, walk.reduce_each)
        itemsize = setting.policy.recipe.gradient.itemsize
        for kind, elements in sent.items():
            assert walk.comm[kind]["bytes_sent"] == elements // ranks * (ranks - 1) * itemsize
        assert walk.at_peak["total"] == walk.peak >= sum(walk.state.values())
        assert sum(walk.at_peak.values()) == 2 * walk.peak  # the kinds add up to it


def test_a_whole_recompute_saves_activations_and_adds_products():
    model = GPT(6, 32, 4, 16, 64)
    bare, again = (
        Setting(lambda _: model, 4, Policy(recompute=on), 4).walk(3) for on in (False, True)
    )
    assert again.activations < bare.activations / 2
    assert again.flops > bare.flops * 1.2


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**9))
def test_largest_is_the_last_that_fits(slope, start, memory):
    def needed(n):
        return start + slope * n + (n % 3)  # nearly a straight line, as memory is

    found = largest(needed, memory)
    assert found == 0 or needed(found) <= memory
    assert found == HIGHEST or needed(found + 1) > memory


def test_more_ranks_pay_until_messages_take_as_long_as_products():
    model = GPT(2, 16, 2, 8, 32)
    setting = Setting(lambda _: model, 8, Policy(), 1, 4)
    speed = Speed(1e9, 5e7)
    ranks, found = ranks_that_pay(setting, 0, speed)
    assert found and 1 < ranks <= 32
    for n, won in ((ranks - 1, False), (ranks, True)):
        walk = Setting(lambda _: model, n, Policy(), 1, max(1, 32 // n)).walk(0)
        assert (speed.comm_s(walk) >= speed.compute_s(walk)) == won


def test_memory_is_inverted(capsys):
    found = json.loads(
        said("--layers 2 --width 64 --ranks 4 --precision float32 --memory 20e6 --json", capsys)
    )
    for row in found["stages"]:
        assert row["largest_layers"] >= 1 and row["largest_micro_batch"] >= 1
    layers = [row["largest_layers"] for row in found["stages"]]
    assert layers == sorted(layers)
    text = f"--layers {layers[3]} --width 64 --ranks 4 --precision float32 --json"
    assert json.loads(said(text, capsys))["stages"][3]["peak"] <= 20e6
    text = text.replace(f"--layers {layers[3]}", f"--layers {layers[3] + 1}")
    assert json.loads(said(text, capsys))["stages"][3]["peak"] > 20e6


def test_times_of_the_flags_and_of_a_bench(capsys, tmp_path):
    model = "--layers 2 --width 64 --ranks 4 --precision float32 --json "
    rows = json.loads(said(model + "--flops 1e9 --bandwidth 1e8", capsys))["stages"]
    for row in rows:
        assert row["compute_s"] == row["flops"] / 1e9
        assert row["step_s"] == [
            max(row["compute_s"], row["comm_s"]),
            row["compute_s"] + row["comm_s"],
        ]
    bench = {
        "stages": [
            {"flops": 5e8, "step_s": 1.0, "blocked_s": 0.5, "bytes_sent": 5e7},
            {"stage": 1, "error": "no"},
        ]
    }
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    assert json.loads(said(model + f"--calibrate {tmp_path}/bench.json", capsys))["stages"] == rows


BAD = {
    "--ranks 64": "--params",
    "--params 1e9": "--ranks",
    "--params 1e9 --ranks 0": "--ranks",
    "--params 1e9 --layers 2 --ranks 4": "--params",
    "--params 1e9 --ranks 4 --flops 1e12": "--flops",
    "--layers 2 --width 10 --heads 3 --ranks 4": "--heads",
    "--layers 2 --width 10 --heads 2 --model mlp --ranks 4": "--heads",
    "--layers 2 --ranks 4 --memory 1000": "--width or --vocab, or --recompute",
    "--layers 2 --ranks 4 --flops 1e12": "--bandwidth",
    "--layers 2 --ranks 4 --calibrate nowhere.json": "nowhere.json",
    "--layers 2 --ranks 4 --calibrate setup.cfg": "setup.cfg",
    "--layers 2 --ranks 4 --calibrate setup.cfg --flops 1": "--calibrate: gives both speeds",
    "--layers 2 --ranks 4 --calibrate /dev/zero": "--calibrate: expected a file, got /dev/zero",
    "--layers 2 --rank 4": "--rank",
    "--params 1e9 --ranks 4 --width 64": "--width: needs a model",
    "--params 1e9 --ranks 4 --recompute": "--recompute: needs a model",
    "--paper --json": "--json: cannot be combined with --paper; leave one of them out",
    "--paper --ranks 3": "--ranks: cannot be combined with --paper",
    "--layers 2 --ranks 4 --context 2147483648": "--context: expected a whole number of at least 1 and below 2147483648",
}

NO_BENCH = {
    "nested": "[" * 100_000,
    "another type": '[{"stages": 3}]',
    "no stages": '{"stages": []}',
    "one rank": '{"stages": [{"flops": 1, "step_s": 2, "blocked_s": 0, "bytes_sent": 0}]}',
    "no time": '{"stages": [{"flops": 1, "step_s": 2, "blocked_s": 2, "bytes_sent": 1}]}',
    "not finite": '{"stages": [{"flops": NaN, "step_s": 2, "blocked_s": 1, "bytes_sent": 1}]}',
    "overflow": f'{{"stages": [{{"flops": 1{"0" * 400}, "step_s": 2.5, "blocked_s": 1, "bytes_sent": 1}}]}}',
}


@pytest.mark.parametrize("text", NO_BENCH.values(), ids=NO_BENCH)
def test_a_file_that_holds_no_bench_is_one_line(text, capsys, tmp_path):
    """Whatever is in it: plan reads only what zmpi.bench --json wrote."""
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        plan.main(f"--layers 1 --ranks 2 --calibrate {tmp_path}/x.json".split())
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(
        "zmpi.plan: error: --calibrate: expected what zmpi.bench --json FILE wrote"
    )


@pytest.mark.parametrize("arguments", BAD)
def test_a_plan_that_cannot_be_made_is_one_line(arguments, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        plan.main(arguments.split())
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    assert err.startswith("zmpi.plan: error: ") and BAD[arguments] in err and err.count("\n") == 1
