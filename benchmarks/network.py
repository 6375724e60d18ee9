"""python benchmarks/network.py: what each stage costs over a network of two nodes in a box.

For each bandwidth a box (cluster.py) is made, in which zmpi.doctor measures the messages and then
zmpi.bench the stages, in turns. The kernel's counters of the nodes' interfaces are read around the
steps of each stage, beside the ledger's bytes. The planner's terms of computing come from one more
bench without a limit, its messages from the doctor at the same bandwidth.

Prints a table and one sentence: from which bandwidth stage 3 costs at most --percent more than
stage 0. `--out DIR` holds network.json and network.png (time against bandwidth, one line a stage,
the prediction dashed).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent))
from shapes import shape_of

HERE = Path(__file__).resolve().parent
STAGES = (0, 1, 2, 3)
RATES = "unshaped,1gbit,100mbit"


def parser():
    flags = argparse.ArgumentParser(prog="network.py", description=__doc__.split("\n")[0])
    flags.add_argument("--shape", default="S", help="S, M or L, or S,micro_batch=2; default: S")
    flags.add_argument("--rates", default=RATES, help=f"default: {RATES}")
    flags.add_argument("--delays", default="", help="each way, as tc writes it; needs netem")
    flags.add_argument("--nodes", type=int, default=2)
    flags.add_argument("--ppn", type=int, default=2, help="ranks per node; default: 2")
    flags.add_argument("--pairs", default="", help="of stages within and between nodes: '3,1 3,3'")
    flags.add_argument("--steps", type=int, default=7, help="timed steps per stage; default: 7")
    flags.add_argument("--percent", type=float, default=20, help="default: 20")
    flags.add_argument("--out", type=Path, default=Path("network"), help="default: network")
    return flags


def main():
    options = parser().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    points = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        flags = [*model_flags(options), "--steps", str(options.steps)]
        bench = ["-m", "zmpi.bench", *flags, "--json", str(folder / "calibrate.json")]
        in_box(options, "unshaped", bench)
        for rate in options.rates.split(","):
            points.append(measured(options, folder, rate))
            points[-1]["predicted"] = predicted(options, folder, rate)
    for delay in filter(None, options.delays.split(",")):
        done = box(options, "1gbit", ["true"], "--delay", delay)
        print(f"delay {delay}: {done.stderr.strip().rpartition('error: ')[2] or 'possible'}")
    report = {"shape": options.shape, "nodes": options.nodes, "ppn": options.ppn, "points": points}
    (options.out / "network.json").write_text(json.dumps(report, indent=1))
    print(table(points), sentence(points, options.percent), sep="\n\n")
    picture(points, options.out / "network.png")


def box(options, rate, command, *more):
    """Run a command on all ranks of a box."""
    shaped = [] if rate == "unshaped" else ["--rate", rate]
    size = ["--nodes", str(options.nodes), "--ppn", str(options.ppn)]
    start = [sys.executable, str(HERE / "cluster.py"), *size, *shaped, *more, "--", *command]
    return subprocess.run(start, capture_output=True, text=True, check=False)


def in_box(options, rate, command):
    """Run Python with these arguments on all ranks of a box; end if that fails."""
    done = box(options, rate, ["python", *command])
    if done.returncode:
        said = f"{' '.join(command[:2])} at {rate}: {done.stderr.strip()}"
        print(f"network.py: error: {said}", file=sys.stderr)
        sys.exit(done.returncode)


def measured(options, folder, rate):
    """One bandwidth: {"rate", "mbit" (that the doctor saw between nodes), "stages": [row, ...]}."""
    doctor, bench, rows = (folder / f"{what}-{rate}.json" for what in ("doctor", "bench", "rows"))
    worker = [str(HERE / "network_worker.py"), options.shape, str(options.steps), str(rows)]
    worker += [str(options.ppn), *options.pairs.split()]
    flags = [*model_flags(options), "--steps", str(options.steps), "--json", str(bench)]
    for command in (
        ["-m", "zmpi.doctor", "--json", str(doctor)],
        ["-m", "zmpi.bench", *flags],
        worker,
    ):
        in_box(options, rate, command)
    found = json.loads(bench.read_text())["stages"]
    if options.pairs:
        grouped = ["--group", str(options.ppn), "--stages", options.pairs]
        in_box(options, rate, ["-m", "zmpi.bench", *flags, *grouped])
        found += json.loads(bench.read_text())["stages"]
    links = json.loads(doctor.read_text())
    between = links["parts"].get("between nodes", links["links"])["all_gather"]
    counted = {row["stage"]: row for row in json.loads(rows.read_text())}
    stages = [
        {
            "stage": row["stage"],
            "step_s": row["step_s"],
            "quartiles_s": row.get("step_s_quartiles"),
            "blocked_share": mean(row["blocked_share"]),
            "peak_bytes": max(row["resident_peak"]),
            **counted[row["stage"]],
        }
        for row in found
    ]
    fastest = max(sent / seconds for sent, seconds in between)
    return {"rate": rate, "mbit": fastest * 8 / 1e6, "stages": stages}


def model_flags(options):
    """The shape, as zmpi.bench and zmpi.plan take it."""
    shape = shape_of(options.shape)
    sizes = ("layers", "width", "heads", "context", "vocab", "micro_batch")
    return [
        word
        for name in sizes
        for word in (f"--{name.replace('_', '-')}", str(getattr(shape, name)))
    ]


def predicted(options, folder, rate):
    """{stage: seconds of a step} by zmpi.plan, from another bench and the doctor at this rate.

    With nothing hidden: a CPU without a progress thread moves messages only inside MPI's calls.
    """
    ranks = ["--ranks", str(options.nodes * options.ppn), "--precision", "float32"]
    files = ["--calibrate", folder / "calibrate.json", "--doctor", folder / f"doctor-{rate}.json"]
    guesses = {}
    for grouped in ([], ["--group", options.ppn])[: 2 if options.pairs else 1]:
        command = ["zmpi.plan", *model_flags(options), *ranks, *grouped, *files, "--json"]
        done = subprocess.run(
            [sys.executable, "-m", *map(str, command)], capture_output=True, text=True, check=True
        )
        rows = json.loads(done.stdout)["stages"]
        guesses |= {row["stage"]: row["step_s"][1] for row in rows}
    return guesses


def table(points):
    """The figures, a row for each stage at each bandwidth."""
    head = "network    stage  step ms  predicted   off  blocked  peak MB"
    lines = [f"{head}  on the wire MB  of least  of ledger"]
    for point in points:
        for row in point["stages"]:
            guess, step, wire = point["predicted"][row["stage"]], row["step_s"], row["wire_bytes"]
            lines.append(
                f"{point['rate']:10} {row['stage']!s:>5}  {step * 1e3:7.0f}  {guess * 1e3:9.0f}"
                f"  {guess / step - 1:+4.0%}  {row['blocked_share']:7.0%}"
                f"  {row['peak_bytes'] / 1e6:7.0f}  {wire / 1e6:14.2f}"
                f"  {wire / row['least_bytes']:8.2f}  {wire / row['ledger_bytes']:9.2f}"
            )
    seen = ", ".join(f"{point['rate']} {point['mbit']:,.0f} Mbit/s" for point in points)
    return "\n".join([*lines, f"between nodes the doctor measured: {seen}"])


def sentence(points, percent):
    """From which bandwidth stage 3 costs at most so much more than stage 0.

    Between two points the extra cost is taken as linear in seconds per bit.
    """
    costs = []
    for point in points:
        steps = {row["stage"]: row["step_s"] for row in point["stages"]}
        costs.append((point["mbit"], (steps[3] / steps[0] - 1) * 100))
    costs.sort(reverse=True)
    told = ", ".join(f"{cost:+.0f} % at {mbit:,.0f} Mbit/s" for mbit, cost in costs)
    if costs[0][1] > percent:
        return f"Stage 3 costs over {percent:g} % more than stage 0 at all of these: {told}."
    where = f"down to {costs[-1][0]:,.0f} Mbit/s"
    for (fast, cheap), (slow, dear) in pairwise(costs):
        if dear > percent:
            part = (percent - cheap) / (dear - cheap)
            where = f"from {1 / (1 / fast + part * (1 / slow - 1 / fast)):,.0f} Mbit/s on"
            break
    return f"Stage 3 costs at most {percent:g} % more than stage 0 {where} ({told})."


def picture(points, path):
    """Step time against bandwidth, both on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    points = sorted(points, key=lambda point: point["mbit"])
    for number, stage in enumerate(STAGES):
        mbit, colour = [point["mbit"] for point in points], f"C{number}"
        steps = [point["stages"][number]["step_s"] * 1e3 for point in points]
        guesses = [point["predicted"][stage] * 1e3 for point in points]
        axes.plot(mbit, steps, "o-", color=colour, label=f"stage {stage}")
        axes.plot(mbit, guesses, "--", color=colour)
    axes.set(xscale="log", yscale="log", xlabel="Mbit/s between nodes", ylabel="step, ms")
    axes.legend(title="dashed: predicted")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
