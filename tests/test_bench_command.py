"""The commands that measure, as they are run: zmpi.bench, zmpi.doctor, and zmpi.train --trace."""

import json
import re
from statistics import median

import pytest
from mpirun import assert_refused, run_world

from zmpi.cost.links import VECTOR_ELEMENTS
from zmpi.cost.speed import links_of

SHARD_ALIGNMENT = 1024  # bytes, at most, to which a shard is rounded up

TINY = [
    "--layers",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--context",
    "8",
    "--micro-batch",
    "2",
    "--steps",
    "5",
]


def output(size, *arguments):
    world = run_world(size, ["-m", *arguments], 300)
    assert world.status == 0, world.output
    return world.output


@pytest.mark.parametrize(("size", "precision"), [(2, "float32"), (3, "float16"), (4, "float32")])
def test_formula_and_measurement_agree_at_every_stage(size, precision, tmp_path):
    file = tmp_path / "bench.json"
    text = output(
        size, "zmpi.bench", *TINY, "--precision", precision, "--json", file, "--flops", "1e11"
    )
    assert (
        "≠" not in text.replace("≠ not", "") and text.count("✓") == 4 * (3 + 4 + 3) + 1
    )  # and the one that explains it
    found = json.loads(file.read_text())
    assert found["size"] == size and [row["stage"] for row in found["stages"]] == [0, 1, 2, 3]
    assert len({row["loss"] for row in found["stages"]}) == 1  # one micro-batch: to the last bit
    for row in found["stages"]:
        times = [seconds for seconds in row["all_step_s"] if seconds is not None]
        assert len(row["all_step_s"]) == 5 and row["step_s"] == median(times)
        low, high = row["step_s_quartiles"]
        assert min(times) <= low <= row["step_s"] <= high <= max(times)
        assert len(row["verbs_s"]["forward"]) == size
        for planned, measured in zip(
            row["arrays"]["peak"]["planned"], row["arrays"]["peak"]["measured"], strict=True
        ):
            assert planned == pytest.approx(measured, rel=0.1)
        assert len(row["resident_peak"]) == size
    assert found["stages"][0]["ratio_to_first"] == {"median": 1.0, "quartiles": [1.0, 1.0]}
    assert found["one_after_the_other"] is None and "ran one after the other" not in text
    plan = output(1, "zmpi.plan", *TINY[:-2], "--ranks", "64", "--calibrate", file)
    assert "ranks that pay" in plan


def test_the_report_is_one_page_that_needs_nothing_else(tmp_path):
    output(2, "zmpi.bench", *TINY, "--stages", "0,3", "--report", tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.count("<img") == page.count("data:image/png;base64,") == 5
    assert not re.search(r'(src|href)="(?!data:)', page)
    pictures = {path.name for path in (tmp_path / "report").glob("*.png")}
    assert pictures == {
        f"{name}.png" for name in ("state", "memory", "throughput", "blocked", "lanes")
    }


def test_a_sweep_over_ranks_runs_smaller_worlds(tmp_path):
    file = tmp_path / "bench.json"
    text = output(3, "zmpi.bench", *TINY, "--stages", "3", "--sweep", "ranks", "--json", file)
    assert "≠" not in text.replace("≠ not", "")
    assert [point["size"] for point in json.loads(file.read_text())["sweep"]["points"]] == [1, 2, 3]


FAILING = """\
import sys
from zmpi import bench
from zmpi.cost import measure
free = int(sys.argv.pop(1))
measure.available_bytes = lambda: free
bench.main()
"""


def test_a_stage_that_does_not_fit_is_a_row_that_says_why(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    world = run_world(
        2,
        [
            tmp_path / "failing.py",
            40_000,
            *TINY,
            "--report",
            tmp_path / "report",
            "--json",
            tmp_path / "x.json",
        ],
        300,
    )
    assert world.status == 0, world.output
    assert "stage 0 failed: needs" in world.output and "40,000" in world.output
    assert all(
        "needs" in row["error"] for row in json.loads((tmp_path / "x.json").read_text())["stages"]
    )
    assert "stage 0 failed" in (tmp_path / "report" / "index.html").read_text()


def test_stages_that_do_not_fit_together_run_one_after_the_other(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    script = [tmp_path / "failing.py", 250_000, *TINY, "--json", tmp_path / "x.json"]
    world = run_world(3, script, 300)
    assert world.status == 0 and "failed" not in world.output, world.output
    assert (
        "stages ran one after the other, not in turns (all stages together: needs" in world.output
    )
    found = json.loads((tmp_path / "x.json").read_text())
    assert "rank 0 has 250,000" in found["one_after_the_other"]
    assert [len(row["all_step_s"]) for row in found["stages"]] == [5] * 4


BAD = {
    ("--stages", "0,4"): "--stages",
    ("--stages", "0,0"): "--stages",
    ("--steps", "4"): "--steps",
    ("--heads", "3"): "--heads",
    ("--json", "/nowhere/x.json"): "--json",
    ("--report", "/nowhere/x"): "--report",
    ("--json", "/proc/x.json"): "--json: /proc/x.json: ",
    ("--report", "/proc/x"): "--report: /proc/x: ",
    ("--sweep", "time"): "--sweep",
}


def test_a_bench_that_cannot_be_run_is_one_line(tmp_path):
    """All of them in one world, and one as a shell sees it."""
    assert_refused(2, tmp_path, {flags: [line] for flags, line in BAD.items()}, "bench")
    world = run_world(2, ["-m", "zmpi.bench", "--stages", "0,4"], 60)
    (line,) = [line for line in world.output.splitlines() if line.startswith("zmpi")]
    assert world.status == 2 and line.startswith("zmpi.bench: error: --stages")


def test_the_doctor_ends_in_a_verdict_and_writes_what_the_planner_reads(tmp_path):
    text = output(3, "zmpi.doctor", "--json", tmp_path / "x.json")
    assert text.splitlines()[-1].startswith("verdict: usable")
    assert "thread level" in text and "16,384 KiB" in text and "not aware" in text
    report = json.loads((tmp_path / "x.json").read_text())
    assert [rank["node"] for rank in report["ranks"]] == [0, 0, 0] and report["parts"] == {}
    assert links_of(report)["parts"] == ()  # one node
    for points in links_of(report)["links"].values():  # to two others a third each, rounded up
        for (sent, _), elements in zip(points, VECTOR_ELEMENTS, strict=True):
            assert 0 <= sent - 2 * 4 * elements / 3 < 2 * SHARD_ALIGNMENT


def test_train_writes_the_trace_it_was_asked_for(tmp_path):
    small = [*TINY[:-2], "--steps", "3", "--data", __file__]
    output(2, "zmpi.train", *small, "--trace", tmp_path / "x.json")
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    assert {event["args"].get("step") for event in events if event["ph"] == "X"} == {1, 2, 3}
    output(2, "zmpi.train", *small, "--trace", tmp_path / "x.txt")
    assert "rank 1  gather h.0" in (tmp_path / "x.txt").read_text()
    for path in (tmp_path / "x.csv", tmp_path / "missing" / "x.json"):
        world = run_world(2, ["-m", "zmpi.train", *small, "--trace", path], 60)
        assert world.status == 2 and world.output.startswith(
            "zmpi.train: error: --trace: expected a file"
        ), world.output


OVERFLOWING = """
import sys
from zmpi import bench
from zmpi.numbers.precision import LossScaler
LossScaler.START = 2.0 ** int(sys.argv[1])
bench.main(sys.argv[2:])
"""


def test_steps_that_overflow_are_not_timed(tmp_path):
    """In float16 they update nothing and gather less. A stage of only such steps has no row."""
    (tmp_path / "run.py").write_text(OVERFLOWING)
    flags = [*TINY, "--precision", "float16", "--stages", "3", "--json", tmp_path / "x.json"]
    rows = {}
    for start in (20, 40):  # the scale is halved by each; the warm-up takes two
        world = run_world(2, [tmp_path / "run.py", start, *flags], 100)
        assert world.status == 0, world.output
        (rows[start],) = json.loads((tmp_path / "x.json").read_text())["stages"]
    assert rows[20]["skipped"] == rows[20]["all_step_s"].count(None) in (1, 2, 3)
    assert rows[40]["error"].startswith("all 5 timed steps were skipped: gradients overflow")
