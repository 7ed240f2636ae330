"""Trains the same models under Tessera's and Python's wrappers, in turn, and writes docs/benchmarks.md's tables.

    compare.py --build build/release [--quick] [--models deep gpt] [--ranks 2 4] [--rounds 5]

In a round every program runs once, one after the other, so that other load on the machine affects all alike. A ratio is
that of two runs of one round; the table has its median over rounds and its range. The limits of bench/limits, computing
and moving, are measured in the same round. After the first round (--rounds-of-all) only our programs and the two fastest
peers of each stage run again. Programs that fail, or whose losses differ from the others', are listed and not compared.

Writes all measurements to <out>/results.json, and the verdict by target to <out>/verdict.md and the terminal. Only a
complete run, or --render, --more and --again of one, writes the documentation. Runs with --quick, --models, --ranks or
--programs are partial: they write to out/bench/quick and out/bench/part.
"""
import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import time

import tables
from tables import LIMIT, LIMITED, PROGRAMS, STEPS

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
OUT = os.path.join(ROOT, "out/bench")

MODELS = ["deep", "recipe", "gpt", "deep-768", "recipe-2600", "gpt-512", "llama", "mlp"]
RANKS = [2, 4]
# For --quick: our programs, and each peer that was the fastest of its stage in a long run. The most important models first.
QUICK = ["tessera ddp", "ddp", "tessera sdp", "zero1", "fairscale_sdp", "tessera fsdp", "fsdp1", "fsdp2", "deepspeed3"]
QUICK_MODELS = ["deep", "recipe", "gpt", "mlp"]
QUICK_MINUTES = 15
# Returns freed memory to the system at once, instead of keeping it in glibc's heap: for a second run of these models.
RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4194304"}
MEMORY_MODELS = ["recipe", "recipe-2600"]
# Flags of models whose sizes are not the model's defaults.
SIZES = {"deep-768": ["--model", "deep", "--layers", "24", "--width", "768"],
         "recipe-2600": ["--model", "recipe", "--layers", "12", "--width", "2600"],
         "gpt-512": ["--model", "gpt", "--layers", "4", "--width", "512", "--heads", "8"]}
# Models of transformers, which our program trains from an archive that models.py writes: class of a layer, vocabulary.
ARCHIVES = {"llama": ("LlamaDecoderLayer", 1000), "gpt2": ("GPT2Block", 50257)}
# Chains of this number of units, so narrow that overhead dominates: under FSDP, and without a wrapper.
UNITS = [10, 1000]
UNIT_WRAPPERS = ["fsdp", "local"]
FASTEST = 2  # number of peers, per stage, model and number of ranks, that run in each round
# Python's programs sometimes fail with "terminate called without an active exception", under any wrapper.
TRIES = 2
PEERS = ["torch", "fairscale", "deepspeed", "transformers"]


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    parser.add_argument("--out", help=f"results.json, verdict.md, archives; default: {OUT}, or a folder in it")
    parser.add_argument("--models", nargs="+", choices=list(STEPS))
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--rounds-of-all", type=int, default=1, help="the number of rounds that the slower peers run in, too")
    parser.add_argument("--minutes", type=float, help=f"start no run after this time; with --quick {QUICK_MINUTES}")
    parser.add_argument("--quick", action="store_true", help="two rounds at 2 ranks, fewer steps, only the faster programs")
    parser.add_argument("--more", action="store_true", help="add rounds to what an earlier call has measured")
    parser.add_argument("--again", action="store_true", help="after a change of the library: discard our results, and measure "
                        "them again in one round with the fastest peers; keep the results of the other peers")
    parser.add_argument("--render", action="store_true", help="write the tables of earlier results; measure nothing")
    parser.add_argument("--timeout", type=int, default=900, help="seconds for a run")
    args = parser.parse_args()
    is_part = args.models or args.ranks or args.programs
    # --more, --again and --render work on all earlier results.
    args.writes_docs = args.out is None and not args.quick and (not is_part or args.more or args.again or args.render)
    args.out = os.path.abspath(args.out or os.path.join(OUT, "quick" if args.quick else "" if args.writes_docs else "part"))
    args.models = args.models or (QUICK_MODELS if args.quick else MODELS)
    args.ranks = args.ranks or ([2] if args.quick else RANKS)
    args.programs = args.programs or (QUICK if args.quick else list(PROGRAMS))
    args.rounds = args.rounds or (1 if args.again else 2 if args.quick else 5)
    args.ends = time.time() + 60 * (args.minutes or (QUICK_MINUTES if args.quick else 1e9))
    return args


def command(args, program, model, ranks):
    steps, warmup = STEPS[model]
    if args.quick:
        steps, warmup = max(3, steps // 2), max(1, warmup // 2)
    common = ["--ranks", str(ranks), "--steps", str(steps), "--warmup", str(warmup), "--threads", "1"]
    which = of_archive(args, model) if model in ARCHIVES and program.startswith("tessera ") else SIZES.get(model, ["--model", model])
    if program == LIMIT:
        return [os.path.join(args.build, "bench/limits"), "--json", *common, *which]
    if program.startswith("tessera "):
        return [os.path.join(args.build, "bench/train_step"), "--wrapper", program.split()[1], "--json", *common, *which]
    return [sys.executable, os.path.join(HERE, "peer.py"), "--peer", program, *common, *which]


def of_archive(args, model):
    path = os.path.join(args.out, model + ".pt2")
    source = os.path.join(HERE, "models.py")
    if not os.path.exists(path) or os.path.getmtime(path) < os.path.getmtime(source):
        os.makedirs(args.out, exist_ok=True)
        subprocess.run([sys.executable, source, model, path], check=True)
    unit, vocabulary = ARCHIVES[model]
    batch = {"gpt2": 1}.get(model, 4)
    return ["--model", "archive", "--archive", path, "--unit", unit, "--vocabulary", str(vocabulary), "--batch", str(batch)]


def run(args, words, environment=None):
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=args.timeout, check=False,
                              env={**os.environ, **(environment or {})})
    except subprocess.TimeoutExpired:
        return {"error": f"no end within {args.timeout} s"}
    if done.returncode == 0:
        for line in reversed(done.stdout.splitlines()):
            if line.startswith("{"):
                return json.loads(line)
    errors = [line for line in done.stderr.splitlines() if re.search(r"(Error|Exception|error)\b.*:", line)] or done.stderr.splitlines()
    return {"error": errors[-1].strip()[:300] if errors else f"exit code {done.returncode}"}


def told(line):
    if "error" in line:
        return line["error"]
    if "compute_s" in line:
        return f"computing {line['compute_s'] * 1e3:.1f} ms, moving {line['exchange_stage_1_and_3_s'] * 1e3:.1f} ms under FSDP"
    return f"{line['step_s_median'] * 1e3:.1f} ms a step, processor {line['cpu_s'] * 1e3:.1f} ms"


def measure(args, results):
    for round_number in range(args.rounds):
        results["rounds"] += 1
        for count, wrapper in itertools.product(UNITS, UNIT_WRAPPERS) if "tessera fsdp" in args.programs else []:
            if time.time() > args.ends:
                return
            words = [os.path.join(args.build, "bench/train_step"), "--model", "deep", "--wrapper", wrapper, "--count", str(count),
                     "--width", "8", "--batch", "1", "--ranks", "2", "--steps", str(max(3, 1000 // count)), "--warmup", "2", "--json"]
            line = run(args, words)
            results.setdefault("units", {}).setdefault(f"{wrapper}/{count}", []).append(line)
            print(f"round {results['rounds']}, {count} units, {wrapper}: {told(line)}", flush=True)
            save(args, results)
        for ranks in args.ranks:
            for model in args.models:
                order = args.programs[round_number % len(args.programs):] + args.programs[: round_number % len(args.programs)]
                if model in LIMITED and any(program in LIMITED[model] for program in order):
                    order.append(LIMIT)
                for program in order:
                    if time.time() > args.ends:
                        return
                    if results["rounds"] > args.rounds_of_all and not runs_again(results, model, ranks, program):
                        continue
                    measure_one(args, results, model, ranks, program)


def runs_again(results, model, ranks, program):
    if program == LIMIT or program.startswith("tessera "):
        return True
    rivals = tables.peers_of(results, model, ranks, program)
    return program in sorted(rivals, key=lambda peer: tables.median_of(results, model, ranks, peer, "step_s_median"))[:FASTEST]


def measure_one(args, results, model, ranks, program):
    key = f"{model}/{ranks}/{program}"
    runs = results["runs"].setdefault(key, [])
    if runs and "error" in runs[-1]:
        return  # the program fails with this model
    for _ in range(TRIES):
        began = time.time()
        line = run(args, command(args, program, model, ranks))
        line["round"] = results["rounds"]
        runs.append(line)
        print(f"round {results['rounds']}, {model}, {ranks} ranks, {program}: {told(line)} ({time.time() - began:.0f} s)", flush=True)
        if "error" not in line:
            break
    if model in MEMORY_MODELS and program != LIMIT and "error" not in line and key not in results.setdefault("returning", {}):
        results["returning"][key] = run(args, command(args, program, model, ranks), RETURNS_MEMORY)
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


def versions():
    """The versions of the installed peers."""
    found = {}
    for name in PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def without_ours(results):
    for kind in ("runs", "returning"):
        results[kind] = {key: line for key, line in results.get(kind, {}).items()
                         if key.split("/")[2] != LIMIT and not key.split("/")[2].startswith("tessera ")}
    results.pop("units", None)
    results["rounds_without_ours"] = results["rounds"]
    return results


def results_of(args):
    path = os.path.join(args.out, "results.json")
    if args.render or args.more or args.again:
        with open(path) as file:
            results = json.load(file)
        if not args.again:
            return results
    if os.path.exists(path):  # a new run must not destroy the results of hours
        os.replace(path, os.path.join(args.out, "results.before.json"))
    if args.again:
        return without_ours(results)
    return {"machine": machine(), "versions": versions(), "rounds": 0, "runs": {}}


def main():
    args = parse()
    results = results_of(args)
    if not args.render:
        measure(args, results)
    os.makedirs(args.out, exist_ok=True)
    verdict = "\n".join([*tables.glance(results), "", *tables.problems(results)])
    with open(os.path.join(args.out, "verdict.md"), "w") as file:
        file.write(verdict + "\n")
    print("\n".join(["", *tables.ratio_table(results), "", verdict]))
    if args.writes_docs:
        tables.write_documentation(results, os.path.join(ROOT, "docs"))


if __name__ == "__main__":
    main()
