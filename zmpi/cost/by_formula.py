"""The plan of a number of parameters, by the paper's formulas: one row per stage or pair."""

from zmpi.core.formulas import elements_per_axis, placements, state_bytes
from zmpi.cost.paper import largest_model
from zmpi.cost.plan_tables import name_of
from zmpi.process.table import in_bytes, in_columns, short, unit_for

KINDS = ("parameters", "gradients", "optimizer", "total")
MOVED_KEYS = {"elements": "elements within", "elements_between": "between"}


def formula_rows(parameters, sizes, recipe, step, memory):
    """A plan's rows, as JSON: bytes of state, and with groups the elements moved along each axis.

    `step`: (micro-batches, whether each is reduced); `memory`: bytes per rank, or None.
    """
    rows = []
    for placed in placements(len(sizes)):
        state = state_bytes(placed, parameters, sizes, recipe)
        row = {"stage": placed.number, **state, "total": sum(state.values())}
        if memory:
            row["largest_parameters"] = largest_model(placed, sizes, memory, recipe)
        if len(sizes) > 1:
            row |= zip(MOVED_KEYS, elements_per_axis(placed, parameters, *step), strict=True)
        rows.append(row)
    return rows


def formula_table(rows, sizes):
    """The rows as text."""
    divisor, name = unit_for(rows[0]["total"])
    grouped = len(sizes) > 1
    heads = ("known as", *KINDS, *MOVED_KEYS.values()) if grouped else ("sharded", *KINDS)
    lines = [("stage", *heads)]
    for row, placed in zip(rows, placements(len(sizes)), strict=True):
        figures = [short(row[kind] / divisor) for kind in KINDS]
        figures += [f"{row[kind]:.4g}" for kind in MOVED_KEYS if grouped]
        lines.append((f"  {row['stage']}", name_of(placed), *figures))
    unit = f"{name} per rank (1 {name} = {divisor:,} bytes), state alone"
    return f"{unit}\n{in_columns(lines, 2)}"


def moved_note(micro_batches):
    """What the columns of elements count."""
    step = f"{micro_batches} micro-batch{'es' * (micro_batches > 1)}"
    return (
        f"elements moved per step of {step}, if every unit is gathered twice;\n"
        "along an axis of n ranks each rank sends (n-1)/n of its share"
    )


def largest_table(rows, memory):
    """The answers to --memory."""
    lines = [f"most parameters whose state alone fits {in_bytes(memory)} per rank"]
    lines += [f"  stage {row['stage']}  {row['largest_parameters']:.4g}" for row in rows]
    return "\n".join(lines)
