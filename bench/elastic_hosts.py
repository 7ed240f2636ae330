#!/usr/bin/env python3
"""Measures the time from a rank's death to the end of the survivors' next step, each rank in a network namespace.

    elastic_hosts.py [--hosts 3] [--mbit 1000] [--kills 5]

The model has 100 MB of parameters and 200 MB of Adam's state, sharded (bench/elastic_bench.cpp). Needs root and iproute2.
"""
import argparse
import os
import statistics
import subprocess
import tempfile

from hosts import PORT, ROOT, Hosts

PROGRAM = os.path.join(ROOT, "build", "release", "bench", "elastic_bench")


def run_once(hosts, victim, file):
    processes = []
    for rank, name in enumerate(hosts.names):
        environment = dict(os.environ, TESSERA_PEER_MEMORY="0", RANK=str(rank), WORLD_SIZE=str(len(hosts.names)),
                           LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="10.77.0.1", MASTER_PORT=str(PORT),
                           GLOO_SOCKET_IFNAME="veth0", TORCH_CPP_LOG_LEVEL="ERROR", OMP_NUM_THREADS="1",
                           CUDA_VISIBLE_DEVICES="", TORCHELASTIC_USE_AGENT_STORE="False")
        # Ranks with other host names do not share memory.
        command = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name,
                   PROGRAM, "--victim", str(victim), "--file", file]
        processes.append(subprocess.Popen(command, env=environment))
    hosts.processes = processes
    for rank, process in enumerate(processes):
        if process.wait() != 0 and rank != victim:
            raise SystemExit(f"elastic_hosts.py: rank {rank} failed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Hosts(arguments.hosts, arguments.mbit) as hosts:
        file = os.path.join(folder, "seconds")
        for kill in range(arguments.kills):
            run_once(hosts, kill % arguments.hosts, file)
        with open(file) as lines:
            seconds = [float(line) for line in lines]
    print(f"{arguments.hosts} namespaces, {arguments.mbit} Mbit/s: from a death to the end of the next step, median "
          f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} kills)")


if __name__ == "__main__":
    main()
