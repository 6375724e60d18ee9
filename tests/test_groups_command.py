"""The commands on ranks in groups: a run, its checkpoint and log, a bench, and wrong flags."""

import json
import re

from mpirun import ROOT, run_world

SMALL = [
    "--device",
    "cpu",
    "--layers",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--context",
    "16",
    "--micro-batch",
    "2",
]
EXACT = [*SMALL, "--reduction", "ordered", "--log"]


def train(ranks, *arguments):
    world = run_world(ranks, ["-m", "zmpi.train", *arguments], 100)
    assert world.status == 0, world.output
    return world.output


def steps(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_in_groups_says_so_and_goes_on_at_another_placement(tmp_path):
    """Saved at 3,1 by two groups of two, resumed at 3,3: the losses of a run not stopped."""
    folder, one, two, whole = (tmp_path / name for name in ("ck", "one", "two", "whole"))
    grouped = [*EXACT, one, "--group", "2", "--stage", "3,1", "--accumulate", "3", "--steps"]
    text = train(4, *grouped, "2", "--decay-steps", "99", "--checkpoint", folder)
    assert "stage 3 within groups and stage 1 between them on 4 ranks = 2 groups of 2" in text
    assert re.search(r"all_gather, between +(\S+) +\1$", text, re.M)
    header, first, *_ = steps(one)
    assert (header["stage"], header["group"]) == ("3,1", 2)
    assert first["comm"]["all_gather"]["elements_between"] == header["parameters"]
    flags = ["--resume", "--checkpoint", folder, "--device", "cpu", "--steps", "4"]
    train(4, *flags[:-1], "3", "--log", two)  # the groups and stages are the checkpoint's
    header = steps(two)[0]
    assert (header["stage"], header["group"]) == ("3,1", 2)
    train(4, *flags, "--log", two, "--group", "2", "--stage", "3,3")
    train(4, *[*grouped[:-1], "--steps", "4", "--decay-steps", "99"], "--log", whole)
    losses = [
        (entry["loss"], entry["grad_norm"])
        for path in (one, two, whole)
        for entry in steps(path)
        if "loss" in entry
    ]
    assert losses[:4] == losses[4:] and len(losses) == 8


def test_the_bench_and_the_dry_run_know_groups(tmp_path):
    """What is measured on 4 ranks is what was planned, to the byte, at every placement."""
    arguments = [*SMALL, "--steps", "5", "--group", "2", "--stages", "2,1 3,1 3,3"]
    world = run_world(4, ["-m", "zmpi.bench", *arguments, "--json", tmp_path / "x.json"], 200)
    assert world.status == 0 and "≠" not in world.output.replace("≠ not", ""), world.output
    found = json.loads((tmp_path / "x.json").read_text())
    assert [row["stage"] for row in found["stages"]] == ["2,1", "3,1", "3,3"]
    assert found["group"] == 2


def test_wrong_groups_and_stages_are_one_line(tmp_path):
    lines = {
        "--group 3": "--group: expected a number that divides the 4 ranks, got 3",
        "--group x": "--group: expected a whole number of at least 1, or node; got x",
        "--group 2 --stage 1,3": "--stage: expected a stage outside at most that inside, got 1,3",
        "--stage 3,1": "--stage: 3,1 needs a --group of 2 ranks or more",
        "--group 1 --stage 3,1": "--stage: 3,1 needs a --group of 2 ranks or more",
        "--stage 3,2,1": "--stage: expected 0, 1, 2 or 3, or INSIDE,OUTSIDE; got 3,2,1",
    }
    path = tmp_path / "lines.json"
    path.write_text(json.dumps([[*SMALL, *line.split()] for line in lines]))
    world = run_world(4, [ROOT / "tests/refusals.py", path, "train"], timeout=100)
    assert world.status == 0, world.output
    for ranks, expected in zip(json.loads(world.output), lines.values(), strict=True):
        assert ranks == [[2, expected, ""]] * 4


STUCK = """
import sys, time
sys.path.insert(0, "tests/world")
from training import adamw, gpt, share
from zmpi import World, ZeRO
world = World(device="cpu", group=2, timeout=2)
class Sleepy(ZeRO):
    def free(self, visit):
        super().free(visit)
        if world.rank == 3:
            time.sleep(60)
zero = Sleepy(gpt(), world, (3, 1), adamw())
zero.train_step(share(zero.model, 1, world, 1))
"""


def test_a_stuck_collective_names_its_axis_and_the_rank_that_is_furthest_behind(tmp_path):
    """Ranks 0 and 1 wait for the other group further on: they are not the ones that are missing."""
    (tmp_path / "stuck.py").write_text(STUCK)
    world = run_world(4, [tmp_path / "stuck.py"], timeout=60)
    lines = [line for line in world.output.splitlines() if line.startswith("zmpi:")]
    assert world.status == 1 and len(lines) == 1, world.output
    assert re.match(
        r"zmpi: (all_gather|reduce_scatter) h\.\d (within the group|between the groups)"
        r" did not complete within 2 s: rank 3 never arrived$",
        lines[0],
    )
