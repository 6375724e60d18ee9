"""The grader's whole matrix, by hand, some minutes: python tests/course/all.py

The reference at five seeds (100 % each), every planted mistake (rejected, the right idea named),
and solutions that misbehave (one line each, the rest graded).
"""

import sys
import tempfile
from pathlib import Path

from matrix import first_named, planted, reference
from misbehaving import MISBEHAVING, graded_with_the_rest
from wrong import ENDING, PLANTED

from zmpi.course.printed import had, to_be_had

SEEDS = (0, 1, 2, 3, 4)


def main():
    wrong = []
    for seed in SEEDS:
        marked = reference(seed)
        print(f"reference, seed {seed}: {had(marked)} of {to_be_had(marked)} points")
        wrong += [text for each in marked for text in each.sentences]
    with tempfile.TemporaryDirectory() as folder:
        for mistake, marked in planted(PLANTED, folder, seed=5):
            right = first_named(marked) == mistake.idea
            print(f"{'rejected' if right else 'WRONG   '}  task {mistake.task}: {mistake.name}")
            print(*(f"            {text}" for text in marked.sentences), sep="\n")
            wrong += [] if right else [mistake.name]
    with tempfile.TemporaryDirectory() as folder:
        for mistake, marked in planted(ENDING, folder, seed=6, limit=4):
            right = mistake.idea in marked.fault
            print(f"{'rejected' if right else 'WRONG   '}  task {mistake.task}: {mistake.name}")
            print(*(f"            {text}" for text in marked.sentences), sep="\n")
            wrong += [] if right else [mistake.name]
    for name, (_, points, words) in MISBEHAVING.items():
        with tempfile.TemporaryDirectory() as folder:
            marked, rest = graded_with_the_rest(name, Path(folder), limit=4)
        said = "; ".join(marked.sentences) or "nothing to say"
        print(f"{name}: {said} ({marked.points} points; the task after it: {rest.points})")
        if (marked.points, rest.points) != (points, 10) or words not in said:
            wrong.append(name)
    print("all as expected" if not wrong else f"not as expected: {wrong}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
