#!/usr/bin/env python3
"""Compares predicted with measured step times of ranks without shared memory, on the hosts of bench/hosts.py, a rank each.

    plan_hosts.py [--hosts 2 4] [--mbit 100 1000 10000] [--steps 6] [--speed speed.json] [--only fsdp]

Calibrates the machine once, with two ranks, or reads --speed; then calibrates the link between the hosts by `tessera
calibrate --speed`. After a pause, the token buckets pass at most the bytes of one millisecond, or 32 KiB, at once.
bench/plan_time then trains and predicts the cases whose wrapper and model contain the text of --only. The ratio is
predicted / measured. "wait" is the share of the predicted step that waits for messages. Needs root and iproute2.
"""
import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile

from hosts import ROOT, Hosts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    parser.add_argument("--hosts", type=int, nargs="+", default=[2])
    parser.add_argument("--mbit", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--speed", help="of `tessera calibrate`; without, it is measured")
    parser.add_argument("--only", default="", help="a part of a wrapper's and model's text, such as 'fsdp' or 'llama'")
    args = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("needs root, for network namespaces")
    if not shutil.which("ip") or not shutil.which("tc"):
        parser.error("needs ip and tc: install iproute2")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also removes the namespaces
    with tempfile.TemporaryDirectory() as folder:
        speed = args.speed or os.path.join(folder, "speed.json")
        if not args.speed:
            subprocess.run([os.path.join(args.build, "tools/tessera/tessera"), "calibrate", "-o", speed, "--ranks", "2"],
                           check=True, stderr=subprocess.DEVNULL)
        errors = []
        print("hosts  Mbit/s  measured ms  predicted  ratio  wait %  of", flush=True)
        for count in args.hosts:
            for mbit in args.mbit:
                errors += compare(count, mbit, speed, args)
        errors.sort()
        print(f"error: median {errors[len(errors) // 2]:.0f} %, worst {errors[-1]:.0f} %; "
              f"{sum(error <= 10 for error in errors)} of {len(errors)} within 10 %")


def compare(count, mbit, speed, args):
    with Hosts(count, mbit, burst_kb=max(32, mbit // 8)) as hosts:
        of_hosts = f"{speed}.hosts"
        hosts.start([os.path.join(args.build, "tools/tessera/tessera"), "calibrate", "--speed", speed, "-o", of_hosts])
        line = hosts.ranks([os.path.join(args.build, "bench/plan_time"), "--json", "--steps", str(args.steps), "--speed", of_hosts,
                            "--only", args.only])
    for case in line["cases"]:
        print(f"{count:5d} {mbit:7d} {case['measured_ms']:12.1f} {case['predicted_ms']:10.1f} {case['ratio']:6.2f} "
              f"{case['exposed_ms'] / case['predicted_ms'] * 100:7.0f}  {case['stage']}, {case['model']}", flush=True)
    return [abs(case["ratio"] - 1) * 100 for case in line["cases"]]


if __name__ == "__main__":
    sys.exit(main())
