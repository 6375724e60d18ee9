"""A bench's report as text: a line per quantity, a column per stage, measurement below formula."""

from zmpi.process.table import in_bytes, in_columns, seconds

EQUAL, UNEQUAL, UNKNOWN = "✓", "≠", "unknown"


def heading(report):
    """The model, the recipe, the world and the machine, in a few lines."""
    model, machine, recipe = report["model"], report["machine"], report["recipe"]
    size, sequences = report["size"], report["micro_batch"] * report["accumulate"] * report["size"]
    words = {"depth": "{} layers", "width": "width {}", "heads": "{} heads"}
    words |= {"context": "context {}", "vocab": "vocab {}"}
    sizes = ", ".join(text.format(model[name]) for name, text in words.items() if name in model)
    count = f"{report['parameters']:,} parameters"
    state = f"{recipe['parameters']} + {recipe['gradients']} + {recipe['optimizer']}"
    batch = f"{report['micro_batch']} x {report['accumulate']} x {size} = {sequences} sequences"
    return "\n".join(
        [
            f"zmpi {report['zmpi']} bench: {model['kind']}, {sizes}: {count}",
            f"recipe {state} bytes per parameter ({recipe['name']}),"
            f" reduction {report['reduction']}, prefetch {report['prefetch']},"
            f" recompute {'on' if report['recompute'] else 'off'}",
            f"world of {size} rank{'s' if size > 1 else ''} on {machine['hosts']} host(s),"
            f" {machine['threads']} thread(s) per rank; a step is {batch}",
            f"machine {machine['cpu']}, {machine['cores']} core(s); {machine['system']},"
            f" Python {machine['python']}, NumPy {machine['numpy']},"
            f" device {machine['device']}; {machine['mpi']}",
            f"{report['steps']} rounds after {report['warm_up']} warm-up rounds, {_order(report)};"
            " times are medians (lower - upper quartile)",
            "bytes are per rank, lowest to highest rank if they differ; other figures are rank 0's",
        ]
    )


def _order(report):
    apart = report["one_after_the_other"]
    return "one stage after the other" if apart else "each with one step of every stage"


def stage_rows(report):
    """[(label, [cell per stage]), ...]; a label without cells is a heading."""
    lines = [("state, bytes", None)]
    for kind in ("parameters", "gradients", "optimizer"):
        lines += _pair(report, kind, lambda row, kind=kind: row["state"][kind], "formula")
    lines.append(("moved in a step", None))
    for kind, name in (("all_gather", "all-gather"), ("reduce_scatter", "reduce-scatter")):
        for what in ("elements", "bytes_sent"):
            label = f"{name} {what.replace('_', ' ')}"
            lines += _pair(
                report, label, lambda row, kind=kind, what=what: row["moved"][kind][what], "formula"
            )
    lines.append(("array memory, bytes", None))
    for kind, name in (
        ("full", "gathered vectors"),
        ("work", "work buffers"),
        ("activations", "saved activations"),
    ):
        lines += _pair(report, name, lambda row, kind=kind: row["arrays"][kind], "planned")
    lines += _pair(
        report, "peak of all arrays", lambda row: row["arrays"]["peak"], "planned", exact=False
    )
    lines.append(
        _line(
            report,
            "  of which temporaries",
            lambda row: figures(row["arrays"]["temporaries"]["measured"]),
        )
    )
    lines.append(_line(report, "  the peak falls in", lambda row: row["peak_at"]))
    lines.append(_line(report, "process, at peak", lambda row: figures(row["resident_peak"])))
    return lines + _speed_rows(report)


def _speed_rows(report):
    def of(label, cell):
        return _line(report, label, cell)

    lines = [
        ("speed", None),
        of("step", lambda row: seconds(row["step_s"])),
        of("", lambda row: quartiles(row["step_s_quartiles"], seconds)),
        of(f"step, relative to stage {_first(report)}", _ratio_to_first),
        of("tokens/s", lambda row: f"{row['tokens_per_s']:,.0f}"),
        of("blocked in communication", lambda row: percent(row["blocked_share"])),
        of("model FLOPs/s per rank", lambda row: _flops(row, lambda x: f"{x / 1e9:,.2f} G")),
    ]
    if report["peak_flops"]:
        peak = report["peak_flops"]
        lines.append(of("utilisation", lambda row: _flops(row, lambda x: f"{x / peak:.1%}")))
    for kind, name in (("all_gather", "all-gather"), ("reduce_scatter", "reduce-scatter")):
        lines.append(of(f"{name}: skew", lambda row, kind=kind: spread(row["skew_s"][kind])))
        lines.append(
            of(f"{name}: in flight", lambda row, kind=kind: spread(row["in_flight_s"][kind]))
        )
    lines.append(of("gathers during products", _under_way))
    lines.append(of("final loss", lambda row: f"{row['loss']:.6f}"))
    return lines


def _first(report):
    """The stage that other stages' steps are compared with."""
    return next((row["stage"] for row in report["stages"] if "error" not in row), "?")


def _ratio_to_first(row):
    found = row["ratio_to_first"]
    if not found:
        return UNKNOWN
    return f"{found['median']:.2f} {quartiles(found['quartiles'], '{:.2f}'.format)}"


def _under_way(row):
    found = row["under_way"]
    return f"{found['during_products']} of {found['gathers']}, {in_bytes(found['bytes'])}"


def _flops(row, write):
    return UNKNOWN if row["flops_per_s"] is None else write(row["flops_per_s"])


def stage_table(report):
    """The table, followed by the meaning of its signs, and why stages failed."""
    rows = [("", *(f"stage {row['stage']}" for row in report["stages"]))]
    for label, cells in stage_rows(report):
        rows.append(
            (label, *(cells or [""] * len(report["stages"])))
            if cells is None
            else (f"  {label}", *cells)
        )
    notes = [in_columns(rows), NOTES]
    notes += [
        f"stage {row['stage']} failed: {row['error']}" for row in report["stages"] if "error" in row
    ]
    notes += _remarks(report)
    reasons = {row["unplanned"] for row in report["stages"] if "unplanned" in row}
    notes += [f"not planned: the dry run cannot walk this model ({reason})" for reason in reasons]
    if report.get("comm"):
        notes.append(f"formula and plan are for zmpi's own communicator, not for {report['comm']}")
    return "\n".join(notes)


def _remarks(report):
    """Notes on how far the times can be trusted."""
    found = []
    if report["one_after_the_other"]:
        found.append(
            f"stages ran one after the other, not in turns ({report['one_after_the_other']}):"
            " other load on the machine may have affected only some of them"
        )
    if report["too_close"]:
        pairs = ", ".join(f"{a} and {b}" for a, b in report["too_close"])
        found.append(
            f"too close or too noisy to rank in {report['steps']} rounds: stages {pairs}"
            " (their ratio's quartiles span 1)"
        )
    return found


NOTES = """\
✓ the measurement equals the formula (for arrays, the planner's dry run) to the byte; ≠ not equal.
The peak shows measured / planned. Skew (waiting for the slowest rank) and time in flight were
measured with a barrier before each collective, which costs time: they need not add up to the time
blocked without it."""


def _line(report, label, cell):
    return label, ["failed" if "error" in row else cell(row) for row in report["stages"]]


def _pair(report, label, pick, expected, exact=True):
    """Two lines: the expected and the measured values, with a sign."""

    blank = "  " if exact else " " * 7

    def measured(row):
        both = pick(row)
        if both[expected] is None:
            return figures(both["measured"]) + blank
        if not exact:
            return f"{figures(both['measured'])} x{_ratio(both, expected):.3f}"
        return f"{figures(both['measured'])} {EQUAL if is_equal(both, expected) else UNEQUAL}"

    return [
        _line(report, f"{label}, {expected}", lambda row: figures(pick(row)[expected]) + blank),
        _line(report, " " * len(label) + "  measured", measured),
    ]


def _ratio(both, expected):
    """Measured / planned on the rank where they differ most."""
    ratios = [m / e for m, e in zip(both["measured"], both[expected], strict=True)]
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def is_equal(both, expected):
    """Whether every rank measured exactly the expected value."""
    measured, wanted = both["measured"], both[expected]
    measured = measured if isinstance(measured, list) else [measured]
    wanted = wanted if isinstance(wanted, list) else [wanted] * len(measured)
    return measured == wanted


def figures(values):
    """A number, or the lowest and highest over ranks."""
    if values is None:
        return UNKNOWN
    if not isinstance(values, list):
        return f"{values:,}"
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} - {high:,}"


def percent(values):
    """Shares of the ranks."""
    low, high = min(values), max(values)
    return f"{low:.0%} - {high:.0%}" if f"{low:.0%}" != f"{high:.0%}" else f"{low:.0%}"


def quartiles(both, write):
    low, high = map(write, both)
    return f"({low} - {high})"


def spread(values):
    """Seconds of the ranks."""
    low, high = (seconds(value) for value in (min(values), max(values)))
    return low if low == high else f"{low} - {high}"


def sweep_table(axis, reports):
    """Tokens/s, blocked share and array peak of each stage at each point of the axis."""
    stages = [row["stage"] for row in reports[0]["stages"]]
    rows = [(axis, *(f"stage {stage}" for stage in stages))]
    for title, cell in (
        ("tokens/s", lambda row: f"{row['tokens_per_s']:,.0f}"),
        ("blocked", lambda row: percent(row["blocked_share"])),
        ("peak of arrays", lambda row: in_bytes(max(row["arrays"]["peak"]["measured"]))),
    ):
        rows.append((title, *("" for _ in stages)))
        for report in reports:
            cells = ["failed" if "error" in row else cell(row) for row in report["stages"]]
            rows.append((f"  {point_of(axis, report)}", *cells))
    return in_columns(rows)


def point_of(axis, report):
    """The report's point on the axis, as text."""
    place = {"ranks": "size", "batch": "micro_batch"}.get(axis)
    return f"{axis} {report[place] if place else report['point']['width']}"
