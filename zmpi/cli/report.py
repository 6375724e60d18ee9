"""What a run prints: its opening lines, and its summary of all ranks, next to the formulas."""

from zmpi import __version__
from zmpi.core.formulas import elements_moved, state_bytes
from zmpi.messages.ledger import OWNED


def opening(zero, args, text):
    """The run's settings in a few lines, including all that was chosen automatically."""
    world = zero.world
    parameters = sum(unit.layout.elements for unit in zero.units.values())
    evaluated = f"{text.evaluated} sequence{'s' * (text.evaluated > 1)}"
    held_out = (
        f"{len(text.held_out):,} held out (an evaluation uses the first {evaluated})"
        if len(text.held_out)
        else "none held out (too short)"
    )
    different = len(text.train) - text.context  # the windows that a step draws from
    few = different < args.micro_batch * args.accumulate * world.size
    repeated = f" (only {different} different sequence{'s' * (different > 1)})" if few else ""
    ranks = f"{world.size} rank{'s' if world.size > 1 else ''}"
    batch = f"{args.micro_batch} x {args.accumulate} x {world.size}"
    return (
        f"zmpi {__version__}: {args.model}, {parameters:,} parameters,"
        f" {_sharding(zero)} on {ranks}{_cut(world)},"
        f" {zero.policy.recipe.describe(len(zero.optimizer.moments))}\n"
        f"{_where(world)}, reduction {zero.comm.reduction},"
        f" {world.threads} thread(s) per rank, {world.library}\n"
        f"data {args.data}: {len(text.train):,} tokens for training{repeated}, {held_out};"
        f" a step is {batch} sequences (micro-batch x accumulate x ranks)"
    )


def _sharding(zero):
    """The stage, or one for each axis of the world."""
    inside, *outside = [f"stage {stage.number}" for stage in zero.stage.stages]
    return f"{inside} within groups and {outside[0]} between them" if outside else inside


def _cut(world):
    """How the ranks are cut into groups, if they are."""
    if len(world.axes) == 1:
        return ""
    inner, outer = (axis.size for axis in world.axes)
    across = " (some span nodes)" if world.straddles else ""
    return f" = {outer} group{'s' * (outer > 1)} of {inner}{across}"


def _where(world):
    """Device and transport, with the reason if they were chosen automatically."""
    device = f"device {world.device.name}" + (
        f" (auto: {world.device.why})" if world.device.why else ""
    )
    return f"{device}, transport {world.transport}" + (
        f" ({world.transport_why})" if world.transport == "staged" else ""
    )


def summary(zero, log, seconds):
    """A run's losses, speed, bytes and elements. `seconds`: the median step's."""
    last, evaluation = log.last, log.last_evaluation
    layouts = [unit.layout for unit in zero.units.values()]
    sizes = {layout.name: layout.elements for layout in layouts}
    padded, moments = sum(layout.padded for layout in layouts), len(zero.optimizer.moments)
    formula = state_bytes(zero.stage, padded, zero.comm.sizes, zero.policy.recipe, moments)
    moved = elements_moved(
        zero.stage, zero.schedule, sizes, zero.last.micro_batches, zero.comm.ordered
    )
    held_out = f"; validation {_loss(evaluation['val_loss'])}" if evaluation else ""
    lines = [
        f"loss    training {_loss(last['loss'])} at step {last['step']}{held_out} (nats per token)",
        *_skipped(zero),
        f"speed   {last['tokens'] / seconds:,.0f} tokens/s (median step {seconds * 1e3:.1f} ms)",
        f"{'bytes per rank':24}{'formula':>16}{'measured, lowest and highest rank':>36}",
    ]
    for kind in OWNED:
        lines.append(f"  {kind:22}{formula[kind]:>16,}{_range(last['memory'][kind]):>36}")
    for kind, name in (
        ("full_peak", "gathered, at peak"),
        ("work", "work buffers, at peak"),
        ("peak", "process, at peak"),
    ):
        lines.append(f"  {name:22}{'':>16}{_range(last['memory'][kind]):>36}")
    lines.append(f"{'elements per step':24}{'formula':>16}{'measured, rank 0':>36}")
    for kind, expected in moved.items():
        lines.append(f"  {kind:22}{expected:>16,}{last['comm'][kind]['elements']:>36,}")
    for outer in zero.stage.stages[1:]:
        between = elements_moved(
            outer, zero.schedule, sizes, zero.last.micro_batches, zero.comm.ordered
        )
        for kind, expected in between.items():
            name, here = f"{kind}, between", last["comm"][kind]["elements_between"]
            lines.append(f"  {name:22}{expected:>16,}{here:>36,}")
    return "\n".join(lines)


def _loss(value):
    return "not finite" if value is None else f"{value:.4f}"


def _skipped(zero):
    """A line for runs whose steps may be skipped; also counts those before a resume."""
    if zero.policy.precision != "float16":
        return []
    return [f"skipped {zero.step - zero.updates} of {zero.step} steps (gradients overflowed)"]


def _range(values):
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} - {high:,}"
