"""Measures the growth of a step's cost with units, parameters and ranks: runs train_step, draws docs/benchmarks/growth.svg.

    growth.py --build build/release

Layers are so narrow that the overhead dominates computing and sending.
Prints a table for docs/benchmarks.md.
"""
import argparse
import json
import os
import statistics
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
UNITS = [10, 30, 100, 300, 1000]
PARAMETERS = [100, 300, 1000, 3000, 10000]  # two a layer
RANKS = [1, 2, 4, 8]


def run(build, **flags):
    command = [os.path.join(build, "bench/train_step"), "--model", "deep", "--batch", "1", "--json"]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure(args):
    cases = {"units under FSDP, 2 ranks": ("units", UNITS, lambda n: dict(wrapper="fsdp", count=n, width=8, ranks=2)),
             "parameters under SDP, 2 ranks": ("parameters", PARAMETERS, lambda n: dict(wrapper="sdp", count=n // 2, width=4, ranks=2)),
             "ranks under FSDP, 30 units": ("ranks", RANKS, lambda n: dict(wrapper="fsdp", count=30, width=64, ranks=n))}
    results = {}
    for title, (label, values, flags) in cases.items():
        rows = []
        for value in values:
            lines = [run(args.build, steps=3, warmup=1, **flags(value)) for _ in range(args.rounds)]
            rows.append((value, statistics.median(line["step_s_median"] for line in lines), statistics.median(line["cpu_s"] for line in lines)))
            print(f"{title}: {value}: {rows[-1][1] * 1e3:.2f} ms a step, processor {rows[-1][2] * 1e3:.2f} ms a rank", flush=True)
        results[title] = (label, rows)
    return results


def draw(results, path):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tessera"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(4 * len(results), 3.2))
    for axis, (title, (label, rows)) in zip(axes, results.items()):
        x = [row[0] for row in rows]
        axis.loglog(x, [row[1] * 1e3 for row in rows], "o-", color="#c2571a", label="step")
        axis.loglog(x, [row[2] * 1e3 for row in rows], "s-", color="#8a97a6", label="processor, a rank")
        last = rows[-1][1] * 1e3
        axis.loglog([x[0], x[-1]], [last * x[0] / x[-1], last], ":", color="#333333", label="linear")
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(label, fontsize=8)
        axis.set_ylabel("ms", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.set_xticks(x, [str(value) for value in x])
        axis.minorticks_off()
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    results = measure(args)
    os.makedirs(os.path.join(ROOT, "docs/benchmarks"), exist_ok=True)
    draw(results, os.path.join(ROOT, "docs/benchmarks/growth.svg"))
    for title, (label, rows) in results.items():
        print(f"\n{title}\n\n| {label} | ms a step | processor, ms a rank | processor per {label.rstrip('s')}, us |\n| --- | --- | --- | --- |")
        for value, step, cpu in rows:
            print(f"| {value} | {step * 1e3:.2f} | {cpu * 1e3:.2f} | {cpu / value * 1e6:.1f} |")


if __name__ == "__main__":
    main()
