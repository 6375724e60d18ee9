"""The report of zmpi.compare as text: how runs A and B differ, in tables."""

import json

import numpy as np

from zmpi.cli.settings import NO_BIT, ROUNDING, TRAINING
from zmpi.process.errors import one_line
from zmpi.process.table import in_columns

ALWAYS_SHOWN = ("loss", "grad_norm", "val_loss")  # other numbers are shown only if they differ
SHOWN_AS = {"master": "weights"}  # of a vector
CELL_CHARACTERS = 40  # characters shown of a setting
UNEXPLAINED = """no differing setting explains it: check for another type of CPU, another BLAS, a
change in your own files, or a fault"""


def comparison_text(report):
    """The command's output, without the last newline."""
    parts = []
    if "logs" in report:
        parts += _logs(report["logs"])
    if "checkpoints" in report:
        parts += _checkpoints(report["checkpoints"])
    return "\n\n".join([*parts, _verdict(report)])


def _verdict(report):
    if report["equal"]:
        return "equal: every number that was compared is the same, to the bit"
    settings = report.get("logs", {}).get("settings")
    if settings is None:
        return "different"
    for effect, words in (
        (TRAINING, "can change the training"),
        (ROUNDING, "can change how sums are rounded, and nothing else"),
    ):
        names = [one["name"] for one in settings if one["can_change"] == effect]
        if names:
            return f"different: {', '.join(map(one_line, names))} {words}"
    return f"different, and {one_line(UNEXPLAINED)}"


# -- logs ----------------------------------------------------------------------------------------


def _logs(logs):
    steps = logs["steps"]
    lines = [f"{name.upper()}  {_run(logs[name])}" for name in "ab"]
    for name in "ab":
        only = steps[f"only_{name}"]
        if only["count"]:
            lines.append(f"only {name.upper()} has {_span(only)}")
    if not steps["both"]["count"]:
        lines.append("the two have no step in common")
    yield "\n".join(lines)
    yield _settings(logs["settings"])
    shown = {
        name: found
        for name, found in logs["numbers"].items()
        if name in ALWAYS_SHOWN or found["differ"]
    }
    if steps["both"]["count"]:
        yield _columns(shown, _number_rows)


def _run(run):
    end = "no last entry: killed, or still running" if run["end"] is None else run["end"]
    return f"{one_line(run['path'])}: {_span(run['steps'])}; {one_line(end)}"


def _span(span):
    if span["count"] == 1:
        return f"step {span['first']}"
    if not span["count"]:
        return "no step"
    return f"{span['count']:,} steps, {span['first']} ... {span['last']}"


def _settings(settings):
    if settings is None:
        return "settings: not compared, as one of the logs has no header"
    if not settings:
        return "settings: none differs"
    rows = [("settings that differ", "A", "B", "can change")]
    order = (TRAINING, ROUNDING, NO_BIT)
    for one in sorted(settings, key=lambda one: order.index(one["can_change"])):
        rows.append((one_line(one["name"]), _cell(one["a"]), _cell(one["b"]), one["can_change"]))
    return in_columns(rows, left=4)


def _cell(value):
    """A setting's value in a few characters."""
    text = one_line(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= CELL_CHARACTERS else f"{text[: CELL_CHARACTERS - 3]}..."


def _number_rows(found):
    yield "steps compared", f"{found['compared']:,}"
    yield "steps that differ", f"{found['differ']:,}"
    if found["differ"]:
        yield "first step that differs", f"{found['first']['step']}"
        yield from _gap_rows(found["first"])
        yield "largest relative difference", _figure(found["largest"]["relative"])
        yield "  at step", f"{found['largest']['step']}"


# -- checkpoints ---------------------------------------------------------------------------------


def _checkpoints(found):
    yield "\n".join(f"{name.upper()}  {one_line(found[name]['path'])}" for name in "ab")
    if found["settings"]:
        rows = [("saved with the weights", "A", "B")]
        rows += [
            (one_line(one["name"]), _cell(one["a"]), _cell(one["b"])) for one in found["settings"]
        ]
        yield in_columns(rows, left=3)
    if found["shapes"]:
        yield one_line(found["shapes"])
        return
    vectors = [found[name]["vectors"] for name in "ab"]
    if vectors[0] != vectors[1]:
        yield "\n".join(
            f"vectors of {n}: {', '.join(v)}" for n, v in zip("AB", vectors, strict=True)
        )
    yield _columns(found["vectors"], _vector_rows)


def _vector_rows(found):
    yield "elements compared", f"{found['elements']:,}"
    yield "elements that differ", f"{found['differ']:,}"
    yield "parameters that differ", f"{found['parameters_differ']} of {found['parameters']}"
    if found["differ"]:
        yield "first that differs", _element(found["first"])
        yield from _gap_rows(found["first"])
        yield "largest difference", _figure(found["largest"]["absolute"])
        yield "  at", _element(found["largest"])


def _element(element):
    return f"{one_line(element['name'])}[{', '.join(map(str, element['index']))}]"


# -- both ----------------------------------------------------------------------------------------


def _columns(found, rows_of):
    """A table with a column per {name: finding}, and a row per figure."""
    columns = {name: dict(rows_of(of)) for name, of in found.items()}
    longest = max(columns.values(), key=len)
    rows = [("", *(SHOWN_AS.get(name, one_line(name)) for name in columns))]
    rows += [(label, *(of.get(label, "-") for of in columns.values())) for label in longest]
    return in_columns(rows)


def _gap_rows(found):
    for name in "ab":
        yield f"  {name.upper()}", _value(found[name], found.get("dtype"))
    yield "  absolute", _figure(found["absolute"])
    yield "  relative", _figure(found["relative"])
    yield "  ulps", _figure(found["ulps"])
    yield "  leading bits that agree", _figure(found["bits"])


def _value(value, dtype):
    """A number with enough digits to identify it in its type."""
    if value is None:
        return "not finite"
    return str(np.float32(value)) if dtype == "float32" else str(value)


def _figure(value):
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) and value < 1e6 else f"{value:.2e}"
