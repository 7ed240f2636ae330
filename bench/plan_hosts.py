#!/usr/bin/env python3
"""How far are predicted steps from measured ones where ranks share no memory? Hosts of bench/hosts.py, a rank on each.

    plan_hosts.py [--hosts 2] [--mbit 100 1000 10000] [--steps 6] [--speed speed.json]

The machine is calibrated once, with as many ranks as hosts (or the file is taken), and the link is what the token buckets
let through; bench/plan_time then trains and predicts. The ratio is predicted by measured. Needs root and iproute2.
"""
import argparse
import os
import shutil
import subprocess
import sys
import tempfile

from hosts import ROOT, Hosts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--mbit", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--speed", help="of `tessera calibrate`; without, it is measured")
    args = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("needs root, for network namespaces")
    if not shutil.which("ip") or not shutil.which("tc"):
        parser.error("needs ip and tc: install iproute2")
    with tempfile.TemporaryDirectory() as folder:
        speed = args.speed or os.path.join(folder, "speed.json")
        if not args.speed:
            subprocess.run([os.path.join(args.build, "tools/tessera/tessera"), "calibrate", "-o", speed, "--ranks",
                            str(args.hosts)], check=True, stderr=subprocess.DEVNULL)
        errors = []
        for mbit in args.mbit:
            with Hosts(args.hosts, mbit) as hosts:
                line = hosts.ranks([os.path.join(args.build, "bench/plan_time"), "--json", "--steps", str(args.steps),
                                    "--speed", speed, "--link", f"{mbit}Mbit"])
            for case in line["cases"]:
                errors.append(abs(case["ratio"] - 1) * 100)
                print(f"{args.hosts} hosts, {mbit:5d} Mbit/s: measured {case['measured_ms']:8.1f} ms, predicted "
                      f"{case['predicted_ms']:8.1f}, ratio {case['ratio']:.2f}  {case['stage']}, {case['model']}", flush=True)
        errors.sort()
        print(f"error: median {errors[len(errors) // 2]:.0f} %, worst {errors[-1]:.0f} %")


if __name__ == "__main__":
    sys.exit(main())
