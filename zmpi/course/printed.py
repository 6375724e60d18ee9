"""How marks are written: for a reader, as JSON, and as the JUnit XML that graders read."""

import json
from xml.sax.saxutils import quoteattr

from zmpi.course.marks import PASSED
from zmpi.process.errors import one_line
from zmpi.process.table import in_columns


def marks_as_text(marked, with_points):
    """A line for each task, below it a sentence for each check that failed, and the total."""
    rows, below = [], []
    for each in marked:
        passed = sum(mark.state == PASSED for mark in each.marks)
        row = [label(each.task), each.task.title, f"{passed} of {len(each.marks)} checks"]
        rows.append([*row, f"{each.points} / {each.task.points} points"] if with_points else row)
        below.append([f"    {one_line(text)}" for text in each.sentences])
    lines = in_columns(rows, 2).splitlines()
    text = [part for line, more in zip(lines, below, strict=True) for part in (line, *more)]
    if with_points:
        text.append(f"total: {had(marked)} of {to_be_had(marked)} points")
    return "\n".join(text)


def label(task):
    """task 3, or the questions' name."""
    return f"task {task.number}" if isinstance(task.number, int) else str(task.number)


def had(marked):
    """All points."""
    return sum(each.points for each in marked)


def to_be_had(marked):
    """All points that could have been had."""
    return sum(each.task.points for each in marked)


def as_json(marked, seed):
    """One object: {"points", "of", "seed", "tasks": [...]}."""
    tasks = [
        {
            "task": each.task.number,
            "title": each.task.title,
            "points": each.points,
            "of": each.task.points,
            "fault": each.fault or None,
            "checks": [
                {
                    "idea": mark.idea,
                    "state": mark.state,
                    "points": mark.points,
                    "of": mark.of,
                    "sentence": mark.sentence or None,
                }
                for mark in each.marks
            ],
        }
        for each in marked
    ]
    whole = {"points": had(marked), "of": to_be_had(marked), "seed": seed, "tasks": tasks}
    return json.dumps(whole, indent=1) + "\n"


def as_junit(marked):
    """A test suite for each task, a test case for each idea."""
    suites = []
    for each in marked:
        name, cases = label(each.task), []
        for mark in each.marks:
            opening = f"    <testcase classname={quoteattr(name)} name={quoteattr(mark.idea)}"
            if mark.state == PASSED:
                cases.append(f"{opening}/>")
            else:
                text = one_line(mark.sentence or each.fault or mark.state)
                cases.append(f"{opening}><failure message={quoteattr(text)}/></testcase>")
        failures = sum(mark.state != PASSED for mark in each.marks)
        counts = f'tests="{len(each.marks)}" failures="{failures}"'
        suites.append(f"  <testsuite name={quoteattr(name)} {counts}>")
        suites += [*cases, "  </testsuite>"]
    return "\n".join(
        ['<?xml version="1.0" encoding="UTF-8"?>', "<testsuites>", *suites, "</testsuites>\n"]
    )
