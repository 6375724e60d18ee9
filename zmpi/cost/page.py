"""A bench's report: pictures, and one self-contained HTML page with them and the tables."""

import re
from base64 import b64encode
from contextlib import closing, suppress
from html import escape
from io import BytesIO
from pathlib import Path

from zmpi.cost.bench_table import NOTES, heading, point_of, stage_rows, sweep_table
from zmpi.process.files import named
from zmpi.process.output import Output
from zmpi.process.table import seconds

START = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>zmpi bench</title>"""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222;
       max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { margin-top: 2em; border-bottom: 1px solid #ccc; }
pre { background: #f5f5f5; padding: 0.8em; overflow-x: auto; font-size: 13px; line-height: 1.4; }
figure { margin: 1.5em 0; } figure img { width: 100%; max-width: 1000px; }
figcaption { color: #555; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2em 0.9em; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid #222; }
tr.headline td { font-weight: bold; padding-top: 0.9em; }
tr.below td:first-child { padding-left: 2.5em; color: #555; }
.scroll { overflow-x: auto; } .failed { color: #b00; }
"""


def open_page(folder, held):
    """The Output of a report's index.html, closed by `held`; creates the folder if missing.

    Raises ValueError if the folder cannot be written, or holds another page or pictures.
    """
    folder = Path(folder)
    if folder.is_file() or not folder.absolute().parent.is_dir():
        fault = "a file" if folder.is_file() else f"its folder {folder.parent} is missing"
        raise ValueError(f"--report: expected a directory, got {folder} ({fault})")
    if not folder.is_dir():
        with named(f"--report: {folder}"):
            folder.mkdir()
        held.callback(_remove_if_empty, folder)
    path = folder / "index.html"
    if not path.exists() and any(folder.glob("*.png")):
        raise ValueError(f"--report: {folder} has other pictures in it; choose another folder")
    own = re.compile(START.encode())
    return held.enter_context(closing(Output("--report", path, own.match, "a bench's report")))


def _remove_if_empty(folder):
    with suppress(OSError):
        folder.rmdir()


def write_report(page, axis, reports):
    """Write index.html to its Output, and the pictures (PNG) next to it."""
    from zmpi.cost.pictures import draw_pictures, sweep_picture

    folder = Path(page.path).parent
    parts = []
    if axis:
        caption = f"How cost grows over {axis}."
        parts.append(f"<h2>Sweep over {axis}</h2>\n<pre>{escape(sweep_table(axis, reports))}</pre>")
        parts.append(_figure(folder, "sweep", caption, sweep_picture(axis, reports)))
    for i, report in enumerate(reports):
        place = f"{point_of(axis, report)}" if axis else "Stages"
        parts.append(f"<h2>{escape(place)}</h2>\n<pre>{escape(heading(report))}</pre>")
        parts += [
            f'<p class="failed">stage {r["stage"]} failed: {escape(r["error"])}</p>'
            for r in report["stages"]
            if "error" in r
        ]
        suffix = f"-{i}" if axis else ""
        parts += [
            _figure(folder, name + suffix, caption, figure)
            for name, caption, figure in draw_pictures(report)
        ]
        parts += [_stages(report), f"<p>{escape(NOTES)}</p>", _units(report)]
    body = "\n".join(parts)
    text = f"{START}<style>{STYLE}</style></head>\n"
    text += f"<body><h1>The cost of each ZeRO stage</h1>\n{body}\n</body></html>\n"
    page.replace(text)


def _figure(folder, name, caption, figure):
    """Save the picture, and return it as HTML."""
    import matplotlib.pyplot as plt

    data = BytesIO()
    figure.savefig(data, dpi=150)
    plt.close(figure)
    path = folder / f"{name}.png"
    with named(f"--report: {path}"):
        path.write_bytes(data.getvalue())
    source = f"data:image/png;base64,{b64encode(data.getvalue()).decode('ascii')}"
    image = f'<img alt="{name}" src="{source}">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def _stages(report):
    """The table of stage_rows."""
    head = [f"stage {row['stage']}" for row in report["stages"]]
    rows = []
    for label, cells in stage_rows(report):
        if cells is None:
            rows.append(
                f'<tr class="headline"><td colspan="{len(head) + 1}">{escape(label)}</td></tr>'
            )
        else:
            rows.append(_row([label, *cells], "below" if label.startswith(" ") else ""))
    return _table(["", *head], rows)


def _units(report):
    """Messages of each unit, at each stage."""
    rows = []
    for row in report["stages"]:
        for entry in row.get("units", []):
            amounts = [
                f"{entry[name]:,}" for name in ("calls", "elements", "bytes_sent", "padding_bytes")
            ]
            rows.append(
                _row(
                    [
                        f"stage {row['stage']}",
                        entry["collective"],
                        entry["unit"],
                        *amounts,
                        seconds(entry["blocked_s"]),
                    ]
                )
            )
    head = [
        "",
        "collective",
        "unit",
        "calls",
        "elements",
        "bytes sent",
        "of which padding",
        "blocked",
    ]
    return "<h3>Messages of each unit in the last step, rank 0</h3>\n" + _table(head, rows)


def _table(head, rows):
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return (
        f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>\n'
        + "\n".join(rows)
        + "\n</tbody></table></div>"
    )


def _row(cells, kind=""):
    return f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
