"""Trains the same models under Tessera's and Python's wrappers, in turn, and writes docs/benchmarks.md's tables.

    compare.py --build build/release [--quick] [--models deep gpt] [--ranks 2 4] [--rounds 5]

In a round every program runs once, one after the other, so that what else the machine does falls on all
alike; a ratio is that of two runs of one round, and the table has its median over rounds and its range.
Programs whose losses differ from the others' are not compared but listed, and so are those that fail.
Everything measured goes to <out>/results.json; --render writes the tables from there again.
"""
import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
OUT = os.path.join(ROOT, "out/bench")
MIB = 1 << 20

# name: (stage, what it is). Stages 1 and 2 compete: both split the optimizer's state.
PROGRAMS = {
    "tessera local": (None, "one process a rank, each by itself"),
    "local": (None, "the same in Python"),
    "tessera ddp": (0, "Tessera DistributedDataParallel"),
    "ddp": (0, "PyTorch DDP, bucket views"),
    "tessera oss": (1, "Tessera DDP + OSS"),
    "tessera sdp": (2, "Tessera OSS + ShardedDataParallel"),
    "zero1": (1, "PyTorch DDP + ZeroRedundancyOptimizer, bucket views"),
    "fairscale_sdp": (2, "FairScale OSS + ShardedDDP"),
    "deepspeed1": (1, "DeepSpeed ZeRO 1"),
    "deepspeed2": (2, "DeepSpeed ZeRO 2"),
    "tessera fsdp": (3, "Tessera FullyShardedDataParallel"),
    "fsdp1": (3, "PyTorch FSDP1"),
    "fsdp2": (3, "PyTorch FSDP2"),
    "fairscale_fsdp": (3, "FairScale FSDP"),
    "deepspeed3": (3, "DeepSpeed ZeRO 3"),
}
# Of --quick: ours, and whoever was the fastest of a stage in some long run.
QUICK = ["tessera ddp", "ddp", "tessera sdp", "zero1", "fairscale_sdp", "tessera fsdp", "fsdp1", "fsdp2", "deepspeed3"]
# Ours against the fastest peer of the stage: at most this.
TARGETS = {("tessera fsdp", "deep"): 0.5, ("tessera fsdp", "recipe"): 0.6, ("tessera fsdp", "gpt"): 0.85, ("tessera fsdp", "mlp"): 0.3,
           ("tessera sdp", "recipe"): 0.7, ("tessera sdp", "gpt"): 0.9, ("tessera fsdp", "llama"): 0.8, ("tessera sdp", "llama"): 0.9,
           ("tessera local", "llama"): 1.0}
OWN_TARGETS = {("tessera fsdp", "tessera ddp", "gpt"): 1.1}  # among ourselves
# What is freed goes back to the system at once, instead of staying in glibc's heap: for one more run with this model.
RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4194304"}
MEMORY_MODEL = "recipe"
# How far a loss may be from ours, relatively. Early on it is rounding, of sums in another order; Adam divides by roots of
# squares near zero, so that in ten steps of a deep model this grows a million times.
EARLY_STEPS, EARLY_TOLERANCE, LATE_TOLERANCE = 4, 1e-5, 2e-2
STEPS = {"gpt": (8, 2), "llama": (8, 2), "deep": (10, 3), "recipe": (5, 2), "mlp": (60, 10), "gpt2": (18, 2)}  # timed, warm-up
# Models of transformers that ours trains from an archive (models.py writes it): the class of a layer, the vocabulary.
ARCHIVES = {"llama": ("LlamaDecoderLayer", 1000), "gpt2": ("GPT2Block", 50257)}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    parser.add_argument("--out", default=OUT, help="results.json, archives; anywhere but there the tables are written there too, not to docs/")
    parser.add_argument("--models", nargs="+", default=["mlp", "deep", "gpt", "llama", "recipe"], choices=list(STEPS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two rounds at 2 ranks, fewer steps, the faster programs alone")
    parser.add_argument("--more", action="store_true", help="add rounds to what earlier calls have measured")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--timeout", type=int, default=900, help="seconds for a run")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.ranks = min(args.rounds, 2), [2]
        args.programs = [program for program in args.programs if program in QUICK]
    return args


def command(args, program, model, ranks):
    steps, warmup = STEPS[model]
    if args.quick:
        steps, warmup = max(3, steps // 2), max(1, warmup // 2)
    common = ["--ranks", str(ranks), "--steps", str(steps), "--warmup", str(warmup), "--threads", "1"]
    if program.startswith("tessera "):
        ours = [os.path.join(args.build, "bench/train_step"), "--wrapper", program.split()[1], "--json", *common]
        return ours + (of_archive(args, model) if model in ARCHIVES else ["--model", model])
    return [sys.executable, os.path.join(HERE, "peer.py"), "--peer", program, "--model", model, *common]


def of_archive(args, model):
    path = os.path.join(args.out, model + ".pt2")
    source = os.path.join(HERE, "models.py")
    if not os.path.exists(path) or os.path.getmtime(path) < os.path.getmtime(source):
        os.makedirs(args.out, exist_ok=True)
        subprocess.run([sys.executable, source, model, path], check=True)
    unit, vocabulary = ARCHIVES[model]
    batch = {"gpt2": 1}.get(model, 4)
    return ["--model", "archive", "--archive", path, "--unit", unit, "--vocabulary", str(vocabulary), "--batch", str(batch)]


def run(args, program, model, ranks, environment=None):
    try:
        done = subprocess.run(command(args, program, model, ranks), capture_output=True, text=True, timeout=args.timeout, check=False,
                              env={**os.environ, **(environment or {})})
    except subprocess.TimeoutExpired:
        return {"error": f"no end within {args.timeout} s"}
    if done.returncode == 0:
        for line in reversed(done.stdout.splitlines()):
            if line.startswith("{"):
                return json.loads(line)
    errors = [line for line in done.stderr.splitlines() if re.search(r"(Error|Exception|error)\b.*:", line)] or done.stderr.splitlines()
    return {"error": errors[-1].strip()[:300] if errors else f"exit code {done.returncode}"}


def measure(args, results):
    for round_number in range(args.rounds):
        results["rounds"] += 1
        for ranks in args.ranks:
            for model in args.models:
                order = args.programs[round_number % len(args.programs):] + args.programs[: round_number % len(args.programs)]
                for program in order:
                    key = f"{model}/{ranks}/{program}"
                    runs = results["runs"].setdefault(key, [])
                    if runs and "error" in runs[-1]:
                        continue  # it cannot run
                    began = time.time()
                    line = run(args, program, model, ranks)
                    line["round"] = results["rounds"]
                    runs.append(line)
                    told = line.get("error") or f"{line['step_s_median'] * 1e3:.1f} ms a step, processor {line['cpu_s'] * 1e3:.1f} ms"
                    print(f"round {round_number + 1}, {model}, {ranks} ranks, {program}: {told} ({time.time() - began:.0f} s)", flush=True)
                    if model == MEMORY_MODEL and "error" not in line and key not in results.setdefault("returning", {}):
                        results["returning"][key] = run(args, program, model, ranks, RETURNS_MEMORY)
                    save(args, results)


def save(args, results):
    os.makedirs(args.out, exist_ok=True)
    with open(os.path.join(args.out, "results.json"), "w") as file:
        json.dump(results, file)


def machine():
    name = "unknown processor"
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                name = line.split(":")[1].strip()
                break
    with open("/proc/meminfo") as file:
        memory = int(file.readline().split()[1]) / (1 << 20)
    return f"{os.cpu_count()} cores of {name}, {memory:.0f} GiB, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"


# ---- tables ------------------------------------------------------------------------------------


def good_runs(results, model, ranks, program):
    return [run for run in results["runs"].get(f"{model}/{ranks}/{program}", []) if "error" not in run]


def loss_problem(results, model, ranks, program):
    """What is wrong with a program's losses, None if nothing: they are compared with our DDP's."""
    runs, reference = good_runs(results, model, ranks, program), good_runs(results, model, ranks, "tessera ddp")
    if not runs or not reference or PROGRAMS[program][0] is None:
        return None
    for step, (loss, expected) in enumerate(zip(runs[0]["losses"], reference[0]["losses"])):
        if abs(loss - expected) > (EARLY_TOLERANCE if step < EARLY_STEPS else LATE_TOLERANCE) * max(abs(expected), 1e-2):
            return f"trains otherwise: loss {loss:.6g} in step {step + 1}, expected {expected:.6g}"
    return None


def peers_of(results, model, ranks, ours):
    stages = {None: (None,), 0: (0,), 1: (1, 2), 2: (1, 2), 3: (3,)}[PROGRAMS[ours][0]]
    found = []
    for program, (stage, _) in PROGRAMS.items():
        if stage in stages and not program.startswith("tessera") and good_runs(results, model, ranks, program):
            if loss_problem(results, model, ranks, program) is None:
                found.append(program)
    return found


def ratios(results, model, ranks, ours, peer, field):
    """Of ours to the peer's, a number for each round in which both ran."""
    theirs = {run["round"]: run[field] for run in good_runs(results, model, ranks, peer)}
    return [run[field] / theirs[run["round"]] for run in good_runs(results, model, ranks, ours) if run["round"] in theirs]


def median_of(results, model, ranks, program, field):
    values = [run[field] for run in good_runs(results, model, ranks, program)]
    return statistics.median(values) if values else None


def growth_mib(run):
    return (run["rss_peak_bytes"] - run["rss_before_bytes"]) / MIB


def spread(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def cases(results):
    keys = sorted({tuple(key.split("/")[:2]) for key in results["runs"]}, key=lambda k: (int(k[1]), list(STEPS).index(k[0])))
    return [(model, int(ranks)) for model, ranks in keys]


def fastest_peer(results, model, ranks, ours):
    peers = peers_of(results, model, ranks, ours)
    return min(peers, key=lambda peer: median_of(results, model, ranks, peer, "step_s_median")) if peers else None


def least_growth(results, model, ranks, programs):
    grown = [statistics.median(growth_mib(run) for run in runs) for program in programs if (runs := good_runs(results, model, ranks, program))]
    return min(grown) if grown else None


def glance_table(results):
    """Ours over the fastest peer of the stage, and over the one with the least memory, and whether that is the goal."""
    columns = {"tessera fsdp": "FSDP", "tessera sdp": "OSS + SDP", "tessera ddp": "DDP", "tessera local": "one process"}
    lines = ["| step time, ours / the fastest peer's | " + " | ".join(columns.values()) + " | FSDP's memory |",
             "| --- " * (len(columns) + 2) + "|"]
    for model, ranks in cases(results):
        cells = []
        for ours in columns:
            peer = fastest_peer(results, model, ranks, ours)
            values = ratios(results, model, ranks, ours, peer, "step_s_median") if peer else []
            if not values:
                cells.append("")
                continue
            goal = TARGETS.get((ours, model))
            met = "" if goal is None else f" (goal {goal}: {'met' if statistics.median(values) <= goal else '**missed**'})"
            cells.append(f"{statistics.median(values):.2f}{met}")
        own = least_growth(results, model, ranks, ["tessera fsdp"])
        theirs = least_growth(results, model, ranks, peers_of(results, model, ranks, "tessera fsdp"))
        cells.append(f"{own / theirs:.2f}" if own and theirs else "")
        lines.append(f"| {model}, {ranks} ranks | " + " | ".join(cells) + " |")
    return lines


def ratio_line(results, model, ranks, ours, other, target):
    time_ratios = ratios(results, model, ranks, ours, other, "step_s_median")
    if not time_ratios:
        return []
    cpu_ratios = ratios(results, model, ranks, ours, other, "cpu_s")
    verdict = "" if target is None else f"{target}: {'met' if statistics.median(time_ratios) <= target else 'missed'}"
    return [f"| {model} | {ranks} | {PROGRAMS[ours][1]} | {PROGRAMS[other][1]} | {spread(time_ratios)} | {spread(cpu_ratios)} | {verdict} |"]


def ratio_table(results):
    lines = ["| model | ranks | ours | fastest peer of the stage | step time, ours / theirs | processor time, ours / theirs | target |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    for model, ranks in cases(results):
        for ours in ("tessera fsdp", "tessera sdp", "tessera oss", "tessera ddp", "tessera local"):
            if fastest := fastest_peer(results, model, ranks, ours):
                lines += ratio_line(results, model, ranks, ours, fastest, TARGETS.get((ours, model)))
        for (ours, other, of_model), target in OWN_TARGETS.items():
            if model == of_model:
                lines += ratio_line(results, model, ranks, ours, other, target)
    return lines


def full_table(results):
    lines = ["| model | ranks | program | step, ms (range over runs) | processor, ms | RSS growth, MiB | with `MALLOC_MMAP_THRESHOLD_` | held, MiB | sent / parameters |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for model, ranks in cases(results):
        for program in PROGRAMS:
            runs = good_runs(results, model, ranks, program)
            if not runs:
                continue
            times = [run["step_s_median"] * 1e3 for run in runs]
            growth = statistics.median(growth_mib(run) for run in runs)
            returning = results.get("returning", {}).get(f"{model}/{ranks}/{program}", {"error": ""})
            least = f"{growth_mib(returning):.0f}" if "error" not in returning else ""
            held, sent = "", ""
            if "param_bytes" in runs[0]:
                held = f"{sum(runs[0][field] for field in ('param_bytes', 'grad_bytes', 'optimizer_bytes', 'peak_gathered_bytes', 'peak_bucket_bytes')) / MIB:.0f}"
                sent = f"{runs[0]['sent_bytes'] / runs[0]['model_bytes']:.2f}"
            lines.append(f"| {model} | {ranks} | {PROGRAMS[program][1]} | {statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f}) | "
                         f"{statistics.median(run['cpu_s'] for run in runs) * 1e3:.1f} | {growth:.0f} | {least} | {held} | {sent} |")
    return lines


def problems(results):
    lines = []
    for model, ranks in cases(results):
        for program in PROGRAMS:
            runs = results["runs"].get(f"{model}/{ranks}/{program}", [])
            failed = [run["error"] for run in runs if "error" in run]
            error = f"{failed[-1]} (in {len(failed)} of {len(runs)} runs)" if failed else loss_problem(results, model, ranks, program)
            if error:
                lines.append(f"* {PROGRAMS[program][1]}, {model}, {ranks} ranks: {error}")
    return lines or ["None: every program ran each time, and all losses agreed."]


def draw(results, folder):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tessera"
    import matplotlib.pyplot as plt

    ranks_shown = min(ranks for _, ranks in cases(results))
    models = [model for model, ranks in cases(results) if ranks == ranks_shown]
    programs = [p for p in PROGRAMS if PROGRAMS[p][0] is not None and any(good_runs(results, m, ranks_shown, p) for m in models)]
    plots = [("step_time", "ms a step", lambda run: run["step_s_median"] * 1e3),
             ("memory", "growth of resident memory, MiB", growth_mib)]
    for name, label, value in plots:
        figure, axes = plt.subplots(1, len(models), figsize=(4.2 * len(models), 4.6), sharey=True, squeeze=False)
        for axis, model in zip(axes[0], models):
            shown = [p for p in programs if good_runs(results, model, ranks_shown, p)]
            for row, program in enumerate(programs):
                if program not in shown:
                    continue
                values = [value(run) for run in good_runs(results, model, ranks_shown, program)]
                middle = statistics.median(values)
                axis.barh(row, middle, color="#c2571a" if program.startswith("tessera") else "#8a97a6",
                          xerr=[[middle - min(values)], [max(values) - middle]], ecolor="#333333", capsize=2)
                axis.text(max(values), row, f" {middle:.0f}" if middle >= 100 else f" {middle:.3g}", va="center", fontsize=7)
            axis.set_yticks(range(len(programs)), [PROGRAMS[p][1].replace(", bucket views", "") for p in programs], fontsize=8)
            axis.invert_yaxis() if axis is axes[0][0] else None
            axis.margins(x=0.18)
            axis.set_title(f"{model}, {ranks_shown} ranks", fontsize=10)
            axis.set_xlabel(label, fontsize=8)
            axis.tick_params(axis="x", labelsize=7)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
        figure.tight_layout()
        figure.savefig(os.path.join(folder, name + ".svg"), metadata={"Date": None})
        plt.close(figure)


def render(results, out):
    document, folder = (os.path.join(ROOT if out == OUT else out, name) for name in ("docs/benchmarks.md", "docs/benchmarks"))
    os.makedirs(folder, exist_ok=True)
    draw(results, folder)
    most = max(len(runs) for runs in results["runs"].values())
    text = "\n".join([f"Measured on {results['machine']}, in at most {most} rounds.", "", *glance_table(results), "", *ratio_table(results), "",
                      "![Step time of every program](benchmarks/step_time.svg)", "", "![Memory of every program](benchmarks/memory.svg)", "",
                      "### Every program", "", *full_table(results), "", "### Programs that failed, or train otherwise", "", *problems(results)])
    begin, end = "<!-- begin: written by `make bench` -->", "<!-- end: written by `make bench` -->"
    before, after = "", ""
    if os.path.exists(document):
        with open(document) as file:
            before, _, rest = file.read().partition(begin)
        after = rest.partition(end)[2]
    with open(document, "w") as file:
        file.write(f"{before}{begin}\n\n{text}\n\n{end}{after}")
    print("\n".join(ratio_table(results)))
    print()
    print("\n".join(glance_table(results)))
    print("\n".join(problems(results)))


def main():
    args = parse()
    path = os.path.join(args.out, "results.json")
    results = {"machine": machine(), "rounds": 0, "runs": {}}
    if args.render or args.more:
        with open(path) as file:
            results = json.load(file)
    if not args.render:
        measure(args, results)
    render(results, os.path.abspath(args.out))


if __name__ == "__main__":
    main()
