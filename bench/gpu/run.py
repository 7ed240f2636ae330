#!/usr/bin/env python3
"""Measures steps on one GPU under Tessera's and PyTorch's wrappers, and writes the table of docs/gpu.md.

    bench/gpu/run.py --build build/cuda --python python3

Each row of ROWS is a model with its shapes. The driver runs gpu_bench (bench/gpu/step.cpp) once for each wrapper of Tessera, and
bench/gpu/peers.py once for all of PyTorch's, one after the other, each with a time limit. What fails, or for which no time is
left, is not in the table and is listed at the end. Without --write it only prints the table. --device cpu with --tiny tries
the programs on a machine without a GPU; that table is never written to docs/gpu.md.
"""
import argparse
import datetime
import json
import pathlib
import re
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BEGIN, END = "<!-- bench/gpu: begin -->", "<!-- bench/gpu: end -->"
GPT2 = {"model": "gpt", "vocabulary": 50304, "context": 1024}  # llm.c's padded vocabulary
SMALL = {**GPT2, "layers": 12, "width": 768, "heads": 12, "batch": 16}
LARGE = {**GPT2, "layers": 48, "width": 1600, "heads": 25, "batch": 8}
HUGE = {**GPT2, "layers": 36, "width": 2560, "heads": 20, "batch": 4, "steps": 8}
WIDE = {"model": "chain", "layers": 24, "width": 4096, "batch": 2048}
DEEP = {"model": "chain", "layers": 200, "width": 512, "batch": 2048}
MLP = {"model": "mlp", "width": 256, "batch": 128, "steps": 200}
FSDP = (["fsdp", "fsdp-kept"], ["fsdp2", "fsdp2-kept", "fsdp2-compiled"])
# Title, settings, variants of Tessera and of PyTorch. The most important rows first.
ROWS = [
    ("GPT-2 124M, FSDP", SMALL, *FSDP),
    ("GPT-2 124M, whole replicas under autocast", SMALL, ["ddp", "sdp", "ddp-captured"], ["ddp"]),
    ("24 x Linear(4096), FSDP", WIDE, *FSDP),
    ("200 x Linear(512), FSDP", DEEP, ["fsdp", "fsdp-kept", "fsdp-captured"], FSDP[1]),
    ("MLP 256-128-10, FSDP", MLP, ["fsdp", "fsdp-captured"], ["fsdp2"]),
    ("GPT-2 1.6B, FSDP", LARGE, *FSDP),
    ("24 x Linear(4096), FSDP, offload", {**WIDE, "offload": 1}, ["fsdp", "fsdp-early"], ["fsdp2"]),
    ("GPT-2 124M, FSDP, offload", {**SMALL, "offload": 1}, ["fsdp", "fsdp-early"], ["fsdp2"]),
    ("GPT 3B, FSDP", HUGE, ["fsdp"], []),
    # The part on the device fills 40 GiB, with gradients and activations.
    ("GPT 3B, FSDP, offload", {**HUGE, "offload": 1, "device_fraction": 0.6}, ["fsdp-early"], []),
]
TINY = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 64, "context": 16, "batch": 4, "steps": 2}
NAMES = {
    "fsdp": "Tessera FSDP", "fsdp-early": "Tessera FSDP, step in backward", "fsdp-kept": "Tessera FSDP, no reshard",
    "fsdp-captured": "Tessera FSDP, captured step", "ddp": "Tessera DDP", "ddp-captured": "Tessera DDP, captured step",
    "sdp": "Tessera OSS + SDP",
}  # fmt: skip
PEER_NAMES = {"ddp": "PyTorch DDP", "fsdp2": "FSDP2", "fsdp2-kept": "FSDP2, no reshard", "fsdp2-compiled": "FSDP2, compiled"}
# Tokens a second on one H100, as llm.c's author has published them; not measured here.
PUBLISHED = {"GPT-2 124M, FSDP": 463_000, "GPT-2 1.6B, FSDP": 46_800}


def flops_of(settings, parameters):
    """Operations of a step: 6 for each parameter and token, and causal attention's products."""
    if settings["model"] != "gpt":
        return 6 * parameters * settings["batch"]
    attention = 6 * settings["layers"] * settings["width"] * settings["context"]
    return (6 * parameters + attention) * settings["batch"] * settings["context"]


def number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class Run:
    def __init__(self, args):
        self.args, self.missing = args, []
        self.end = time.monotonic() + 60 * args.minutes

    def lines_of(self, command, what):
        """The JSON lines that a program prints within its time."""
        left = min(self.args.row_seconds, self.end - time.monotonic())
        if left < 5:
            self.missing.append(f"{what}: no time left")
            return []
        try:
            done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=left)
            printed, code, error = done.stdout, done.returncode, done.stderr
        except subprocess.TimeoutExpired as late:
            printed, code, error = (late.stdout or b"").decode(), -1, f"took more than {left:.0f} s"
        if code != 0:
            last = [line for line in error.strip().splitlines() if line.strip()][-1:] or ["no message"]
            self.missing.append(f"{what}: {last[0][:200]}")
        return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]

    def words(self, settings):
        return [f"{name}={value}" for name, value in {"steps": 20, "device": self.args.device, **settings}.items()]

    def tessera(self, title, settings, variant):
        wrapper, _, kind = variant.partition("-")
        if kind == "captured" and self.args.device == "cpu":
            return []
        flags = {"kept": kind == "kept", "in_backward": kind == "early", "captured": kind == "captured"}
        settings = {**settings, "wrapper": wrapper, **{flag: int(value) for flag, value in flags.items()}}
        lines = self.own_lines(title, settings, NAMES[variant])
        if "device_fraction" in settings:
            return lines
        # Again with the part on the device that hides the host's steps, as the first run has measured it.
        for fraction in [line["suggested_fraction"] for line in lines if line["suggested_fraction"] > 0]:
            lines += self.own_lines(title, {**settings, "device_fraction": round(fraction, 2)}, NAMES[variant])
        return lines

    def own_lines(self, title, settings, name):
        if "device_fraction" in settings:
            name += f", {settings['device_fraction']:.0%} on the device"
        lines = self.lines_of([self.args.build / "bench/gpu_bench", *self.words(settings)], f"{title}, {name}")
        repeated = [f", {line['times_taken_back']} steps repeated" if line["times_taken_back"] else "" for line in lines]
        return [{**line, "name": name + again} for line, again in zip(lines, repeated)]

    def peers(self, title, settings, variants):
        if not self.args.python or not variants:
            return []
        command = [*self.args.python.split(), HERE / "peers.py", f"variants={','.join(variants)}", *self.words(settings)]
        lines = self.lines_of(command, f"{title}, PyTorch")
        return [{**line, "name": PEER_NAMES[line["variant"]]} for line in lines]

    def peak_rate(self):
        width = 256 if self.args.tiny else 8192
        settings = {"model": "matmul", "width": width, "steps": 20}
        lines = self.lines_of([self.args.build / "bench/gpu_bench", *self.words(settings)], "the card's peak")
        return lines[0]["flops"] if lines else None


def table(run):
    """The lines of the table. A row that was not measured is absent."""
    peak = run.peak_rate()
    lines = [
        "| model | wrapper | ms a step | tokens or rows a second | share of the peak | peak MiB | host ms |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for title, settings, own, peers in ROWS:
        if run.args.tiny:
            settings = {**settings, **TINY}
        measured = [line for variant in own for line in run.tessera(title, settings, variant)]
        measured += run.peers(title, settings, peers)
        for line in measured:
            seconds = line["step_ms"] / 1e3
            items = settings["batch"] * settings.get("context", 1) if settings["model"] == "gpt" else settings["batch"]
            share = f"{flops_of(settings, line['parameters']) / seconds / peak:.0%}" if peak else ""
            memory = number(line["peak_bytes"] / 2**20) if line["peak_bytes"] else ""
            lines.append(f"| {title} | {line['name']} | {number(line['step_ms'])} | {number(items / seconds)} | {share} | {memory} | {number(line['host_ms'])} |")
            print(lines[-1], flush=True)
        if measured and title in PUBLISHED and not run.args.tiny:
            lines.append(f"| {title.split(',')[0]} | llm.c on an H100, as published | | {PUBLISHED[title]:,} | | | |")
    return lines, peak


def output_of(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def heading(args, peak):
    card = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()[:1]
    name = "One {}, driver {}".format(*card[0].split(", ")) if card else "No GPU"
    peers = "no PyTorch"
    if args.python:
        versions = 'import torch; print("PyTorch", torch.__version__, "and NCCL", ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none")'
        peers = output_of(*args.python.split(), "-c", versions) or peers
    rate = f" A product of two matrices of 8192 x 8192 in bf16 reaches {peak / 1e12:.0f} TFLOP/s, the peak." if peak and not args.tiny else ""
    return f"{name}, {peers}, {datetime.date.today()}.{rate}"


def check_page(page):
    old = page.read_text(encoding="utf-8")
    if old.count(BEGIN) != 1 or old.count(END) != 1:
        sys.exit(f"run.py: {page} must have the lines '{BEGIN}' and '{END}' once")


def write(page, text):
    old = page.read_text(encoding="utf-8")
    between = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    page.write_text(between.sub(lambda _: f"{BEGIN}\n{text}\n{END}", old), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/cuda", help="the build tree with gpu_bench")
    parser.add_argument("--python", default="python3", help="the command of a Python with torch; '' measures Tessera only")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the programs")
    parser.add_argument("--minutes", type=float, default=8, help="of the whole run")
    parser.add_argument("--row-seconds", type=float, default=75, help="the limit of one program")
    parser.add_argument("--write", type=pathlib.Path, nargs="?", const=ROOT / "docs/gpu.md", help="the page with the table")
    args = parser.parse_args()
    if (args.tiny or args.device == "cpu") and args.write and args.write.resolve() == (ROOT / "docs/gpu.md"):
        sys.exit("run.py: docs/gpu.md has figures of GPUs only; give another page to --write")
    if args.write:
        check_page(args.write)
    if not (args.build / "bench/gpu_bench").exists():
        sys.exit(f"run.py: there is no {args.build / 'bench/gpu_bench'}; build the target gpu_bench")
    if args.python and not output_of(*args.python.split(), "-c", "import torch; print(1)"):
        print(f"run.py: {args.python} has no torch, so PyTorch is not measured", file=sys.stderr)
        args.python = ""
    run = Run(args)
    lines, peak = table(run)
    text = "\n".join([heading(args, peak), "", *lines])
    print("\n" + text + "\n")
    for what in run.missing:
        print(f"not measured: {what}")
    if len(lines) == 2:
        sys.exit("run.py: nothing was measured")
    if args.write:
        write(args.write, text)


if __name__ == "__main__":
    main()
