"""python benchmarks/peers.py: zmpi, PyTorch and DeepSpeed in the same training, in one table.

The same model, initial weights, batches and AdamW with clipping; one thread per rank; gloo for
PyTorch. The contenders of a group are alive together and take turns of a few steps; the first
turn is a warm-up. A ratio is zmpi's median step / the peer's of the same round, then the median.
Memory is a rank's peak resident memory (VmHWM: shared memory counts in each rank that touched it)
minus that of a bare Python; the table also gives it after the imports. CPU is a step's processor
time, all threads of the slowest rank: on a busy machine it says more than the clock.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from statistics import median

from shapes import shape_of
from turns import Contender, bare_bytes, end_in_order

HERE = Path(__file__).resolve().parent
# FSDP2's best memory: large freed blocks go back to the system instead of staying with glibc.
LEAN = (("MALLOC_MMAP_THRESHOLD_", "1000000"), ("MALLOC_TRIM_THRESHOLD_", "1000000"))
# Each group has zmpi's stages first; ratios are against every other contender of the group.
GROUPS = (
    (("zmpi 3",), ("fsdp2+reshard", "fsdp2+reshard lean", "deepspeed3")),
    (("zmpi 1", "zmpi 2"), ("ddp+zero", "fsdp2", "deepspeed1", "deepspeed2")),
    (("zmpi 0",), ("ddp", "deepspeed0")),
)
AGREE = 1e-4  # relative: float32 sums in another order, over 20 steps


def start(name, shape, size):
    """The Contender of that name."""
    if name.startswith("zmpi"):
        return Contender(name, [HERE / "zmpi_worker.py", shape, name[-1]], size, launched=True)
    kind, lean = name.removesuffix(" lean"), name.endswith(" lean")
    return Contender(
        name, [HERE / "torch_worker.py", shape, kind], size, environment=LEAN if lean else ()
    )


def missing():
    """Why some peers cannot run here: {prefix of their names: one line}."""
    found = {}
    for module, prefixes in (
        ("torch", ("ddp", "fsdp2", "deepspeed")),
        ("deepspeed", ("deepspeed",)),
    ):
        if importlib.util.find_spec(module) is None:
            found |= dict.fromkeys(prefixes, f"{module} is not installed")
    return found


def run_group(names, args):
    """Run a group in turns. Returns the contenders, with their measurements, by name."""
    shape, alive = shape_of(args.shape), {}
    try:
        for name in names:
            try:
                alive[name] = start(name, args.shape, args.ranks)
            except RuntimeError as error:
                print(f"left out: {error}", file=sys.stderr)
        for round_ in range(1 + (args.rounds or shape.rounds)):
            for contender in alive.values():
                seconds = contender.turn(shape.turn)
                print(f"{contender.name}, round {round_}: {median(seconds):.4f} s", file=sys.stderr)
    finally:
        for contender in alive.values():
            contender.close()
    return alive


def figures(contender, shape, bare):
    """What a row of the table says of it, as numbers."""
    turns = [
        contender.seconds[i : i + shape.turn] for i in range(0, len(contender.seconds), shape.turn)
    ][1:]
    return {
        "name": contender.name,
        "rounds_s": [median(turn) for turn in turns],
        "step_s": median(step for turn in turns for step in turn),
        "cpu_s": median(contender.cpu[shape.turn :]),
        "tokens_per_s": shape.tokens
        * contender.size
        / median(step for turn in turns for step in turn),
        "peak_bytes": max(contender.peaks) - bare,
        "import_bytes": max(contender.imports) - bare,
        "losses": contender.losses,
    }


def ratios(ours, peers):
    """{peer: (time ratio, memory ratio)} of one stage of zmpi and the peers of its group."""
    found = {}
    for peer in peers:
        if peer["name"].startswith("deepspeed") and peer["name"][-1] != ours["name"][-1]:
            continue  # another stage
        pairs = zip(ours["rounds_s"], peer["rounds_s"], strict=True)
        found[peer["name"]] = (
            median(a / b for a, b in pairs),
            ours["peak_bytes"] / peer["peak_bytes"],
        )
    return found


def apart(losses, reference):
    """The largest relative difference of two runs' losses, step by step."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def measure(args):
    """All groups: rows for the table, and the lines of ratios."""
    bare, shape = bare_bytes(), shape_of(args.shape)
    rows, lines, absent = [], [], missing()
    for prefix, why in absent.items():
        print(f"without {prefix}: {why}", file=sys.stderr)
    for stages, peers in GROUPS:
        names = [n for n in stages + peers if not args.only or n in args.only]
        names = [n for n in names if not any(n.startswith(prefix) for prefix in absent)]
        group = [figures(c, shape, bare) for c in run_group(names, args).values()]
        for ours in group:
            if ours["name"] in stages:
                lines += [
                    (ours["name"], *line)
                    for line in ratios(ours, [r for r in group if r["name"] in peers]).items()
                ]
        rows += group
    return rows, lines


def text(rows, lines, args):
    """The table."""
    shape = shape_of(args.shape)
    out = [f"{args.shape}: {shape}", f"{args.ranks} ranks, one thread each; {machine()}", ""]
    out.append(
        f"{'':20} {'step':>9} {'CPU':>9} {'tokens/s':>9} {'peak':>9} {'imports':>9}"
        f"   {'loss':>7} -> {'loss':>7}   apart"
    )
    reference = rows[0]["losses"]
    for r in rows:
        step = f"{r['step_s'] * 1e3:6.1f} ms {r['cpu_s'] * 1e3:6.1f} ms {r['tokens_per_s']:9,.0f}"
        memory = f"{r['peak_bytes'] >> 20:5,} MiB {r['import_bytes'] >> 20:5,} MiB"
        loss = f"{r['losses'][0]:7.4f} -> {r['losses'][-1]:7.4f}"
        off = apart(r["losses"], reference)
        verdict = "" if off <= AGREE else " NOT THE SAME TRAINING"
        out.append(f"{r['name']:20} {step} {memory}   {loss}   {off:.0e}{verdict}")
    out += ["", f"{'ratio':32} {'time':>6} {'memory':>7}"]
    out += [
        f"{ours + ' / ' + peer:32} {time:6.2f} {memory:7.2f}"
        for ours, peer, (time, memory) in lines
    ]
    steps = len(reference)
    return "\n".join(
        [
            *out,
            "",
            f"losses over {steps} steps, relative to the first row; memory above a bare Python",
        ]
    )


def machine():
    """What the figures depend on."""
    names = ("numpy", "mpi4py", "mpich", "torch", "deepspeed")
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    cpu = next(
        (
            ln.split(": ")[1]
            for ln in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in ln
        ),
        "",
    )
    python = f"Python {platform.python_version()}"
    return ", ".join([f"{os.cpu_count()} cores ({cpu.strip()})", python, *versions])


def picture(rows, path, title):
    """Bars of step time and memory, one pair a contender."""
    import matplotlib

    matplotlib.use("svg" if path.endswith(".svg") else "agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, 2, figsize=(11, 0.6 + 0.35 * len(rows)), sharey=True, layout="constrained"
    )
    names = [r["name"] for r in rows]
    colours = ["#1f6fb4" if name.startswith("zmpi") else "#b9b9b9" for name in names]
    values = ([r["step_s"] * 1e3 for r in rows], [r["peak_bytes"] / 2**20 for r in rows])
    for axis, numbers, label in zip(
        axes, values, ("step, ms", "peak memory per rank above a bare Python, MiB"), strict=True
    ):
        axis.bar_label(axis.barh(names, numbers, color=colours), fmt="{:,.0f}", padding=3)
        axis.set_xlabel(label)
        axis.margins(x=0.15)
    axes[0].invert_yaxis()
    figure.suptitle(title)
    figure.savefig(path)


def main():
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--shape", default="S", help="one of X, or such as S,width=512 (default: S)")
    flags.add_argument(
        "--ranks", type=int, default=2, help="processes of each contender (default: 2)"
    )
    flags.add_argument("--rounds", type=int, help="turns that are counted (default: the shape's)")
    flags.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="these contenders only, such as 'zmpi 3' fsdp2+reshard",
    )
    flags.add_argument("--json", metavar="FILE", help="all numbers")
    flags.add_argument("--picture", metavar="FILE", help="bars, as .png or .svg (needs matplotlib)")
    args = flags.parse_args()
    if args.picture and importlib.util.find_spec("matplotlib") is None:
        flags.error("--picture: needs matplotlib, which is not installed (pip install matplotlib)")
    for flag, path in (("--json", args.json), ("--picture", args.picture)):
        if path and not Path(path).absolute().parent.is_dir():
            flags.error(f"{flag}: {path}: its folder is missing")
    end_in_order()
    rows, lines = measure(args)
    table = text(rows, lines, args)
    print(table)
    if args.json:
        Path(args.json).write_text(
            json.dumps({"machine": machine(), "rows": rows, "ratios": lines}, indent=1)
        )
    if args.picture:
        picture(rows, args.picture, f"shape {args.shape}, {args.ranks} ranks, one thread each")


if __name__ == "__main__":
    main()
