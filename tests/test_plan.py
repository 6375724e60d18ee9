"""The planner: the paper's figures, dry runs of large worlds, and questions without an answer."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import GPT, MLP
from zmpi import plan
from zmpi.core.formulas import elements_moved, state_bytes
from zmpi.core.stages import STAGES
from zmpi.cost.estimate import HIGHEST, Setting, largest_fitting
from zmpi.cost.paper import PAPER_MODELS, PAPER_RANKS, TABLE_1, TABLE_2, largest_model, state_gb
from zmpi.cost.speed import Speed, along, ranks_that_pay, speed_of
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
    for ranks, row in zip(PAPER_RANKS, TABLE_1[size], strict=True):
        for stage, cell in zip(STAGES[1:], row, strict=True):
            unit = 10.0 ** -len(cell.partition(".")[2])
            assert abs(state_gb(stage, PAPER_MODELS[size], ranks) - float(cell)) <= unit, (
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
    """Under 1 GB, and soon (1.4 and 3.1 s when written): a walk over elements would not end."""
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

    found = largest_fitting(needed, memory)
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


GROUPED = {
    "0,0": (120, 1.5e10, 1.5e10),
    "1,0": (41.25, 1.5e10, 1.5e10),
    "1,1": (31.40625, 1.5e10, 1.5e10),
    "2,0": (28.125, 3e10, 1.5e10),
    "2,1": (18.28125, 3e10, 1.5e10),
    "2,2": (16.640625, 3e10, 3e10),
    "3,0": (15, 6.75e10, 1.5e10),
    "3,1": (5.15625, 6.75e10, 1.5e10),
    "3,2": (3.515625, 6.75e10, 3e10),
    "3,3": (1.875, 6.75e10, 6.75e10),
}


def test_ten_placements_of_a_number_of_parameters(capsys):
    """7.5e9 of them on 64 ranks in groups of 8: GB per rank, and A and B times the parameters."""
    flags = "--params 7.5e9 --ranks 64 --group 8 --precision float32 --reduction mpi"
    rows = json.loads(said(f"{flags} --accumulate 3 --json", capsys))["stages"]
    found = {row["stage"]: (row["elements"], row["elements_between"]) for row in rows}
    assert found == {
        stage: moved for stage, (_, *rest) in GROUPED.items() for moved in [tuple(rest)]
    }
    rows = json.loads(said("--params 7.5e9 --ranks 64 --group 8 --json", capsys))["stages"]
    assert {row["stage"]: row["total"] / 1e9 for row in rows} == {
        stage: total for stage, (total, *_) in GROUPED.items()
    }
    text = said("--params 7.5e9 --ranks 64 --group 8 --memory 32e9", capsys)
    for figure in ("120", "41.2", "31.4", "28.1", "18.3", "16.6", "15", "5.2", "3.5", "1.9"):
        assert re.search(rf"  {re.escape(figure)} +\d", text), figure
    assert "stage 3,1  4.655e+10" in text and "every unit is gathered twice" in text


def test_one_group_of_all_ranks_has_ten_placements_and_groups_of_one_are_none(capsys):
    model = "--layers 2 --width 64 --ranks 4 --precision float32 --json "
    rows = json.loads(said(f"{model} --group 4", capsys))["stages"]
    assert len(rows) == 10
    assert all(row["comm"]["reduce_scatter"]["bytes_between"] == 0 for row in rows)
    assert said(f"{model} --group 1", capsys) == said(model, capsys)


def test_two_bandwidths_choose_the_placement_with_the_shortest_step_that_fits(capsys):
    model = "--layers 2 --ranks 4 --group 2 --precision float32 --accumulate 3 --flops 1e10"
    rows = json.loads(said(f"{model} --bandwidth 1e9,1e7 --json", capsys))["stages"]
    times = {row["stage"]: row["step_s"][1] for row in rows}
    assert max(times, key=times.get) == "3,3" and times["3,1"] < times["2,2"]
    for row in rows:
        names = "bytes_sent", "bytes_between"
        sent, between = (sum(kind[name] for kind in row["comm"].values()) for name in names)
        messages = (sent - between) / 1e9 + between / 1e7
        assert row["terms_s"]["messages"] == pytest.approx(messages)
    peaks = sorted(row["peak"] for row in rows)
    for memory in (peaks[0] * 1.01, peaks[5], peaks[-1]):
        text = said(f"{model} --bandwidth 1e9,1e7 --memory {memory}", capsys)
        fitting = [row["stage"] for row in rows if row["peak"] <= memory]
        best = min(fitting, key=times.get)
        assert re.search(rf"^shortest step that fits \S+ MB per rank: stage {best}\b", text, re.M)


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
        assert row["terms_s"].keys() == {"layers", *TERMS}
        assert [row["terms_s"][term] for term in TERMS if term != "messages"] == [0] * 4


TERMS = ("update", "ends", "Python", "messages", "skew")
WORK = {"flops": 5e8, "updated": 1000, "moved": 500, "visits": 10}
ROW = {
    "stage": 3,
    "counts": WORK,
    "step_s": 2.0,
    "blocked_s": 0.5,
    "bytes_sent": 5e7,
    "verbs_s": {
        "forward": [0.1, 0.1],
        "turn": [0.1, 0.1],
        "backward": [0.2, 0.4],
        "update": [0.25, 0.75],
        "wait": [0.0, 0.125],
        "reduce": [0.125, 0.0],
        "other": [0.25, 0.25],
        "blocked": [9.0, 9.0],
    },
    "skew_s": {"all_gather": [0.1, 0.2], "reduce_scatter": [0.175, 0.0]},
}


def test_every_term_of_a_steps_time_is_taken_from_a_bench():
    """From the mean over its ranks, and the median over its stages; failed stages have none."""
    slow = {**ROW, "verbs_s": {verb: [9.0, 9.0] for verb in ROW["verbs_s"]}}
    quick = {**ROW, "verbs_s": {verb: [0.01, 0.01] for verb in ROW["verbs_s"]}}
    speed = speed_of({"stages": [slow, ROW, {"stage": 1, "error": "no"}, quick]})
    assert speed.flops == 5e8 / 0.5 and speed.bandwidth == 5e7 / 0.5
    assert speed.update_s == 0.5 / 1000 and speed.ends_s == 0.125 / 500
    assert speed.visit_s == 0.25 / 10
    alone = speed_of({"stages": [ROW]})
    assert alone.skew == pytest.approx((0.15 + 0.0875) / (0.5 + 0.5 + 0.125 + 0.25))


def test_a_plan_prints_the_terms_of_a_bench_and_a_doctor(capsys, tmp_path):
    """Messages by call size: above the largest measured, twice the bytes take twice the time."""
    (tmp_path / "bench.json").write_text(json.dumps({"stages": [ROW]}))
    links = {"all_gather": [[1000, 1.0], [3000, 2.0]]}
    links |= {f"reduce_scatter_{how}": [[1000, 10.0], [3000, 20.0]] for how in ("mpi", "ordered")}
    (tmp_path / "doctor.json").write_text(json.dumps({"links": links}))
    model = "--layers 2 --width 64 --ranks 4 --precision float32 "
    model += f"--calibrate {tmp_path}/bench.json "
    bare = json.loads(said(model + "--json", capsys))["stages"]
    rows = json.loads(said(model + f"--doctor {tmp_path}/doctor.json --json", capsys))["stages"]
    for plain, row in zip(bare, rows, strict=True):
        terms = row["terms_s"]
        assert terms["layers"] == row["flops"] / 1e9
        assert sum(terms.values()) == pytest.approx(row["step_s"][1])
        sent = sum(kind["bytes_sent"] for kind in row["comm"].values())
        assert plain["terms_s"]["skew"] == 0 < terms["skew"]  # it is in what the bench was blocked
        assert plain["terms_s"]["messages"] == pytest.approx(sent / 1e8)
        gathers, reduces = row["comm"]["all_gather"], row["comm"]["reduce_scatter"]
        scalars = row["comm"]["all_reduce"]
        calls = gathers["calls"] + 10 * reduces["calls"] + scalars["calls"]
        moved = gathers["bytes_sent"] + 10 * reduces["bytes_sent"] + scalars["bytes_sent"]
        assert terms["messages"] == pytest.approx(0.5 * calls + moved / 2000)
    text = said(model + f"--doctor {tmp_path}/doctor.json", capsys)
    assert "1e+09 FLOPs/s" in text and "as measured by the doctor" in text
    assert "500.0 us per element that a rank updates" in text


def test_pairs_of_stages_take_a_doctors_figures_within_and_between_nodes(capsys, tmp_path):
    """Seconds per byte here: 1 within a node, 100 between nodes, whatever the size of a call."""
    names = "all_gather", "reduce_scatter_mpi", "reduce_scatter_ordered"
    slow, quick = ({name: [[1, each], [2, 2 * each]] for name in names} for each in (100, 1))
    parts = {"within node 0": quick, "between nodes": slow}
    (tmp_path / "bench.json").write_text(json.dumps({"stages": [ROW]}))
    (tmp_path / "doctor.json").write_text(json.dumps({"links": quick, "parts": parts}))
    flags = f"--calibrate {tmp_path}/bench.json --doctor {tmp_path}/doctor.json --json"
    model = "--layers 2 --width 64 --ranks 4 --group 2 --precision float32 "
    for row in json.loads(said(model + flags, capsys))["stages"]:
        gathers, reduces, scalars = row["comm"].values()
        between = gathers["bytes_between"] + reduces["bytes_between"]
        within = gathers["bytes_sent"] + reduces["bytes_sent"] - between
        expected = within + 100 * 2 * between + scalars["bytes_sent"]  # 2 ranks share a link
        assert row["terms_s"]["messages"] == pytest.approx(expected), row["stage"]


def test_times_lie_on_straight_lines_between_the_measured_sizes():
    points = [(10, 1.0), (20, 2.0), (40, 8.0)]
    assert [along(points, n) for n in (5, 10, 15, 30, 40, 60)] == [0.5, 1.0, 1.5, 5.0, 8.0, 14.0]
    assert along([(10, 1.0), (20, 3.0)], 1) == 0.0  # never negative
    assert along([(10, 1.0)], 20) == 2.0


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
    "--layers 2 --ranks 4 --doctor setup.cfg": "--doctor: gives only messages",
    "--layers 2 --ranks 4 --group node": "--group: expected a number",
    "--layers 2 --ranks 4 --group 3": "--group: expected a number that divides --ranks 4, got 3",
    "--layers 2 --ranks 4 --flops 1 --bandwidth 1,2,3": "--bandwidth: expected one or two numbers",
    "--params 1e9 --ranks 4 --accumulate 2": "--accumulate: needs a model",
    "--params 1e9 --ranks 4 --group 1 --accumulate 2": "--accumulate: needs a model",
    "--layers 2 --rank 4": "--rank",
    "--params 1e9 --ranks 4 --width 64": "--width: needs a model",
    "--params 1e9 --ranks 4 --recompute": "--recompute: needs a model",
    "--paper --json": "--json: cannot be combined with --paper; leave one out",
    "--paper --ranks 3": "--ranks: cannot be combined with --paper",
    "--layers 2 --ranks 4 --context 2147483648": "--context: expected a whole number of at least 1"
    " and below 2147483648",
}


def one_row(**changed):
    return json.dumps({"stages": [{**ROW, **changed}]})


NO_BENCH = {
    "nested": "[" * 100_000,
    "another type": '[{"stages": 3}]',
    "no stages": '{"stages": []}',
    "one rank": one_row(blocked_s=0, bytes_sent=0),
    "no time": one_row(verbs_s={verb: [0.0] for verb in ROW["verbs_s"]}),
    "no verbs": one_row(verbs_s=None),
    "not finite": one_row(counts={**WORK, "flops": float("nan")}),
    "overflow": one_row(bytes_sent=10**400, blocked_s=0.5),
}
NO_DOCTOR = {
    "a bench": one_row(),
    "another type": '{"links": 3}',
    "no points": '{"links": {"all_gather": []}}',
    "no time": '{"links": {"all_gather": [[1000, 0]]}}',
    "not finite": '{"links": {"all_gather": [[1000, NaN]]}}',
}


@pytest.mark.parametrize("text", NO_DOCTOR.values(), ids=NO_DOCTOR)
def test_a_file_that_holds_no_doctor_is_one_line(text, capsys, tmp_path):
    (tmp_path / "x.json").write_text(text)
    (tmp_path / "bench.json").write_text(json.dumps({"stages": [ROW]}))
    files = f"--calibrate {tmp_path}/bench.json --doctor {tmp_path}/x.json"
    with pytest.raises(SystemExit) as ended:
        plan.main(f"--layers 1 --ranks 2 {files}".split())
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("zmpi.plan: error: --doctor: expected the JSON of zmpi.doctor")


@pytest.mark.parametrize("text", NO_BENCH.values(), ids=NO_BENCH)
def test_a_file_that_holds_no_bench_is_one_line(text, capsys, tmp_path):
    """Whatever is in it: plan reads only what zmpi.bench --json wrote."""
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        plan.main(f"--layers 1 --ranks 2 --calibrate {tmp_path}/x.json".split())
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("zmpi.plan: error: --calibrate: expected the JSON of zmpi.bench")


@pytest.mark.parametrize("arguments", BAD)
def test_a_plan_that_cannot_be_made_is_one_line(arguments, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        plan.main(arguments.split())
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    assert err.startswith("zmpi.plan: error: ") and BAD[arguments] in err and err.count("\n") == 1
