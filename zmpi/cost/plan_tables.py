"""The tables of a plan for a model: memory at the peak, what fits, a step's time, and what it moves."""

from zmpi.core.stages import STAGES, elements_moved
from zmpi.cost.estimate import HIGHEST
from zmpi.process.errors import UsageError
from zmpi.process.table import in_bytes, seconds, short, table, unit_for

SHARDED = ("nothing", "optimizer states", "+ gradients", "+ parameters")


def memory_table(walks):
    """Bytes per rank by kind, and where the step is at its peak."""
    divisor, name = unit_for(max(walk.peak for walk in walks))
    lines = [
        (
            "stage",
            "sharded",
            "parameters",
            "gradients",
            "optimizer",
            "full",
            "work",
            "activations",
            "temporaries",
            "peak",
        )
    ]
    for walk, sharded in zip(walks, SHARDED, strict=True):
        figures = [walk.at_peak[kind] for kind in (*lines[0][2:9], "total")]
        lines.append(
            (
                f"  {walk.stage.number}",
                sharded,
                *(short(figure / divisor) for figure in figures),
                f"in {walk.place}",
            )
        )
    return (
        f"{name} per rank (1 {name} = {divisor:,} bytes) at the peak of a step; the columns add up to it\n"
        + table(lines, 2)
    )


def fits_table(limits, nbytes):
    """What fits into so many bytes per rank. Raises UsageError where not even one layer fits at any stage."""
    if not any(limit["largest_layers"] for limit in limits):
        raise UsageError(
            f"--memory: not even 1 layer fits into {nbytes:,.15g} bytes per rank at any stage;"
            " use more --ranks, a smaller --width or --vocab, or --recompute"
        )
    lines = [
        ("stage", "parameters (state alone)", "layers (whole step)", "micro-batch (whole step)")
    ]
    for stage, limit in zip(STAGES, limits, strict=True):
        counts = [limit["largest_layers"], limit["largest_micro_batch"]]
        said = [
            "none" if not n else f"{n:,}" + (" or more" if n == HIGHEST else "") for n in counts
        ]
        lines.append((f"  {stage.number}", f"{limit['largest_parameters']:.4g}", *said))
    return f"largest that fits {in_bytes(nbytes)} per rank, all else as above\n{table(lines)}"


def times_table(walks, turning, speed, source):
    """What a step may take: the arithmetic and the messages, hidden behind each other or not at all."""
    lines = [
        (
            "stage",
            "compute",
            "messages",
            "share",
            "step, all hidden",
            "step, none hidden",
            "ranks that pay",
        )
    ]
    for walk, (ranks, found) in zip(walks, turning, strict=True):
        compute, comm = speed.compute_s(walk), speed.comm_s(walk)
        times = [
            seconds(compute),
            seconds(comm),
            f"{comm / (compute + comm):.1%}",
            seconds(max(compute, comm)),
        ]
        pays = f"{ranks:,}" if found else f"{ranks:,} and more"
        lines.append((f"  {walk.stage.number}", *times, seconds(compute + comm), pays))
    return (
        f"time of a step at {speed.flops:.3g} FLOPs/s and {speed.bandwidth:.3g} bytes/s per rank ({source}): matrix products\n"
        "and messages alone. Ranks that pay: at the same global batch, where messages come to take as long as the products\n"
        + table(lines)
    )


def moved_table(walks, accumulate):
    """The walk's collectives, beside the closed form (paper, section 7)."""
    lines = [
        ("stage", "collective", "calls", "elements", "formula", "bytes sent", "of which padding")
    ]
    for walk in walks:
        formula = elements_moved(
            walk.stage, walk.schedule, walk.unit_sizes, accumulate, walk.reduce_each
        )
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            moved = walk.comm[kind]
            amounts = [
                f"{moved[name]:,}" for name in ("calls", "elements", "bytes_sent", "padding_bytes")
            ]
            expected = f"{formula[kind]:,}" if kind in formula else "-"
            name = "scalars" if kind == "all_reduce" else kind
            lines.append((f"  {walk.stage.number}", name, *amounts[:2], expected, *amounts[2:]))
    flops = walks[0].flops
    return f"moved by rank 0 in a step; {flops:,} FLOPs of matrix products in it\n" + table(
        lines, 2
    )
