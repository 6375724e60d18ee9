"""Text tables, and readable units for bytes and seconds."""


def in_columns(rows, left=1):
    """Rows of strings as aligned lines: the first `left` columns to the left, the others right."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i < left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def unit_for(nbytes):
    """(divisor, name) of the best decimal unit for `nbytes`: 1 GB = 1e9 bytes, as in the paper."""
    for power, name in ((9, "GB"), (6, "MB"), (3, "kB")):
        if nbytes >= 10**power:
            return 10**power, name
    return 1, "bytes"


def short(value):
    """A number with one decimal, two digits below 1, and no ".0"."""
    text = f"{value:,.1f}" if value >= 1 or value == 0 else f"{value:.2g}"
    return text.removesuffix(".0")


def in_bytes(nbytes):
    """A number of bytes in the best unit."""
    divisor, name = unit_for(nbytes)
    return f"{short(nbytes / divisor)} {name}"


def seconds(value):
    """A duration in the best unit."""
    for factor, name in ((1, "s"), (1e3, "ms")):
        if value * factor >= 1:
            return f"{value * factor:,.1f} {name}"
    return f"{value * 1e6:,.1f} us" if value >= 1e-7 or not value else f"{value * 1e9:,.2g} ns"
