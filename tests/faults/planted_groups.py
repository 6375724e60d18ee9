"""Mistakes that only show where ranks are cut into groups: zmpi.verify --group must find each.

By hand (two minutes): mpirun -n 4 python tests/faults/planted_groups.py
Each is planted with the one check that must find it, in groups of 2; the axes of one rank in groups
of 4 (one group). tests/world/test_mesh.py runs them too.
"""

import sys
from copy import copy
from pathlib import Path
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from faults.planted import Mistake, _around

import zmpi.verify
from zmpi import World, ZeRO
from zmpi.core.mesh import Climb, Mesh
from zmpi.core.unit import Unit
from zmpi.proof.trial import Trial
from zmpi.text.data import Batches

GROUPED = {}  # name -> (Mistake, ranks of a group)


def mistake(name, found_by, *places, group=2):
    """Enter what is decorated, a function (real, ...) -> result, in each (object, attribute)."""

    def enter(wrong):
        patches = [(of, name, _around(getattr(of, name), wrong)) for of, name in places]
        GROUPED[name] = Mistake(found_by, patches), group
        return wrong

    return enter


@mistake("the owner is n * G + l", "messages_arrive", (Mesh, "_owner"))
def _(real, mesh, rank):
    return rank


@mistake("the norm's pieces are added in rank order", "updates_are_right", (ZeRO, "_agree"))
def _(real, zero, losses, counted):
    with patch.object(zero.comm, "owners", list(range(zero.comm.size))):
        return real(zero, losses, counted)


@mistake("coming down skips an axis of one rank", "order_is_kept", (Mesh, "come_down"), group=4)
def _(real, mesh, cut, vector, rung, to, out, fresh):
    if to == mesh.top and mesh.axes[-1].shards == 1 and rung < to - 1:
        return real(mesh, cut, vector, rung, to - 1, out, fresh)
    return real(mesh, cut, vector, rung, to, out, fresh)


@mistake("climbing skips an inner axis", "stages_agree", (Mesh, "climb"))
def _(real, mesh, cut, source, rung, target, to=0):
    if not to and rung > 1:
        return real(mesh, cut, source, rung, target[cut.slices[1]], 1)
    return real(mesh, cut, source, rung, target, to)


@mistake("data by the launcher's rank", "data_is_shared_out", (Batches, "on"))
def _(real, world, *rest):
    launched = copy(world)
    launched.rank = world.launched[world.rank]
    return real(launched, *rest)


@mistake("a slice held twice counts twice in the norm", "stages_agree", (Unit, "squares"))
def _(real, unit):
    held = unit.shared.rung("gradients") < unit.shared.comm.top
    return real(unit) * (2 if held else 1)


@mistake("the outer reduction is left out", "order_is_kept", (Mesh, "come_down"))
def _(real, mesh, cut, vector, rung, to, out, fresh):
    if to == mesh.top and rung < to - 1:
        part = np.array(vector[cut.slices[1]])
        real(mesh, cut, vector, rung, 1, part, True)
        mine = part[cut.within(2, 1)]
        out[...] = mine if fresh else out + mine
        return
    real(mesh, cut, vector, rung, to, out, fresh)


@mistake("the next rung is not waited for", "stages_agree", (Climb, "wait"))
def _(real, climb):
    climb._gather.wait()
    climb._gather = climb._start()
    climb._mesh.in_flight -= 1


def shuffled_worlds():
    """{ranks of a group: World} of 4 ranks, on two nodes in turns: the launcher's 0 2 1 3."""
    node = "ab"[World(device="cpu").rank % 2]
    return {group: World(device="cpu", group=group, node=node) for group in (2, 4)}


def together():
    """Plant each mistake in turn in this world, and print the first red row of its check."""
    worlds = shuffled_worlds()
    missed = []
    for name, (planted, group) in GROUPED.items():
        with planted.planted():
            check = getattr(zmpi.verify, planted.found_by)
            trial = Trial(worlds[group])
            rows = [row for row in zmpi.verify.promises(trial, (check,)) if not row.passed]
        missed += [] if rows else [name]
        for row in rows[:1] if worlds[2].rank == 0 else ():
            print(f"{name}\n    {row.promise:4}  {row.compared}: {row.figure}\n       {row.where}")
    if worlds[2].rank == 0:
        print(f"missed: {', '.join(missed)}" if missed else "all were found")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    together()
