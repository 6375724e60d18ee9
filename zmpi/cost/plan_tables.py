"""A plan's tables: memory at the peak, what fits, a step's time, and what it moves."""

from zmpi.core.formulas import elements_moved
from zmpi.cost.estimate import HIGHEST
from zmpi.process.errors import UsageError
from zmpi.process.table import in_bytes, in_columns, seconds, short, unit_for

SHARDED = ("nothing", "optimizer states", "+ gradients", "+ parameters")
KNOWN = {  # pairs of stages, inside and between groups, that have a name
    "0,0": "DDP",
    "1,1": "ZeRO-1",
    "2,0": "near FSDP1's hybrid ZeRO-2",
    "2,2": "ZeRO-2",
    "3,0": "HSDP, MiCS",
    "3,1": "HFSDP",
    "3,2": "hpZ as DeepSpeed runs it",
    "3,3": "ZeRO-3",
}


def name_of(placed):
    """What a stage shards; or, of a pair of stages, what it is known as."""
    return SHARDED[placed.number] if len(placed.stages) == 1 else KNOWN.get(placed.number, "")


def memory_table(walks):
    """Bytes per rank by kind at the step's peak, and where that is."""
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
    for walk in walks:
        figures = [walk.at_peak[kind] for kind in (*lines[0][2:9], "total")]
        lines.append(
            (
                f"  {walk.stage.number}",
                name_of(walk.stage),
                *(short(figure / divisor) for figure in figures),
                f"in {walk.place}",
            )
        )
    unit = f"{name} per rank (1 {name} = {divisor:,} bytes)"
    return f"{unit} at the peak of a step; the columns add up to it\n{in_columns(lines, 2)}"


def fits_table(limits, nbytes, placed):
    """What fits into `nbytes` per rank; UsageError if not even one layer fits at any stage."""
    if not any(limit["largest_layers"] for limit in limits):
        raise UsageError(
            f"--memory: not even 1 layer fits into {nbytes:,.15g} bytes per rank at any stage;"
            " use more --ranks, a smaller --width or --vocab, or --recompute"
        )
    lines = [
        ("stage", "parameters (state alone)", "layers (whole step)", "micro-batch (whole step)")
    ]
    for stage, limit in zip(placed, limits, strict=True):
        counts = [limit["largest_layers"], limit["largest_micro_batch"]]
        said = [
            "none" if not n else f"{n:,}" + (" or more" if n == HIGHEST else "") for n in counts
        ]
        lines.append((f"  {stage.number}", f"{limit['largest_parameters']:.4g}", *said))
    return f"largest that fits {in_bytes(nbytes)} per rank, all else equal\n{in_columns(lines)}"


def times_table(walks, turning, speed):
    """A step's time, term by term, with messages fully hidden and not hidden at all."""
    heads = ("step, all hidden", "step, none hidden", "ranks that pay")
    lines = [("stage", *speed.terms(walks[0]), *heads)]
    for walk, (ranks, found) in zip(walks, turning, strict=True):
        compute, comm = speed.compute_s(walk), speed.comm_s(walk)
        times = [*speed.terms(walk).values(), max(compute, comm), compute + comm]
        pays = "-" if ranks is None else f"{ranks:,}" if found else f"{ranks:,} or more"
        lines.append((f"  {walk.stage.number}", *map(seconds, times), pays))
    return f"time of a step of one rank\n{in_columns(lines)}\n{_sources(speed)}"


def _sources(speed):
    """The source of each term."""
    if speed.links:
        messages = "each call by its bytes, as measured by the doctor"
        skew = f"{speed.skew:.1%} of the four before messages"
    else:
        messages = f"{speed.bandwidth:.3g} bytes/s sent by a rank"
        skew = "already in messages, if a bench measured them"
    lines = [
        ("layers", f"{speed.flops:.3g} FLOPs/s of matrix products, including all else in layers"),
        ("update", _each(speed.update_s, "element that a rank updates")),
        ("ends", _each(speed.ends_s, "element moved (widening, adding up)")),
        ("Python", _each(speed.visit_s, "visit of a layer")),
        ("messages", messages),
        ("skew", skew),
        ("ranks that pay", "at the same global batch, the fewest at which messages and skew"),
        ("", "take as long as the rest"),
    ]
    return in_columns([(f"  {name}", text) for name, text in lines], left=2)


def _each(value, what):
    return f"{seconds(value)} per {what}" if value else "unknown, left out"


def moved_table(walks, accumulate):
    """The walk's collectives, next to the formula (paper, section 7), along each axis."""
    lines = [
        ("stage", "collective", "calls", "elements", "formula", "bytes sent", "of which padding")
    ]
    for walk in walks:
        for outer, stage in enumerate(walk.stage.stages):
            form = walk.schedule, walk.unit_sizes, accumulate, walk.reduce_each
            formula = elements_moved(stage, *form)
            for kind in ("all_gather", "reduce_scatter", *(() if outer else ("all_reduce",))):
                lines.append((f"  {walk.stage.number}", *_moved(walk, kind, formula, outer)))
    flops = f"{walks[0].flops:,} FLOPs of matrix products"
    return f"moved by rank 0 in a step of {flops}\n{in_columns(lines, 2)}"


def _moved(walk, kind, formula, outer):
    """A row of moved_table: along the inner axis what the outer does not send."""
    moved = walk.comm[kind]
    name = "scalars" if kind == "all_reduce" else kind
    expected = f"{formula[kind]:,}" if kind in formula else "-"
    sent, padding = moved["bytes_between"], moved["padding_between"]
    if outer:
        return (
            f"{name}, between",
            "",
            f"{moved['elements_between']:,}",
            expected,
            *_said(sent, padding),
        )
    rest = _said(moved["bytes_sent"] - sent, moved["padding_bytes"] - padding)
    return name, f"{moved['calls']:,}", f"{moved['elements']:,}", expected, *rest


def _said(*amounts):
    return [f"{amount:,}" for amount in amounts]
