#!/usr/bin/env python3
"""Measures step times of ranks without shared memory. Each rank has a network namespace with a link of limited speed.

    hosts.py [--hosts 2 3 4] [--mbit 1000 10000] [--rounds 3] [--pairs fsdp:fsdp2 sdp:zero1 ddp:ddp]
    hosts.py --pairs fsdp,int8:fsdp,exact  # ours against ours: sent in int8 blocks, or exactly
    hosts.py --other old/train_step        # ours against an older build of ours instead of PyTorch's
    hosts.py --hosts 2 --limit             # also measures the limits: computing alone, sending alone

A pair is one of our wrappers and its opponent: a peer of bench/compare/peer.py, or ours again. In a round both programs
of a pair run one after the other, in alternating order. A ratio is that of two runs of one round; the table has its median
and range. "link" is the utilization of the link by ours: bytes that a rank sent in a step, divided by the link's capacity
in that time. The losses of a pair must agree.

The limits are the two tasks of a step, each alone: computing without distribution, on all hosts at once, and sending its
bytes through plain sockets, in both directions at once. If the cores are the bottleneck, a step takes about the sum of
both, less the saving of a sharded optimizer's step.

Hosts are connected to one bridge by veth pairs, with a token bucket (tc tbf) at both ends. Shared memory is switched off
(TESSERA_PEER_MEMORY=0), since the namespaces are on one machine. Needs root and iproute2.
"""
import argparse
import json
import os
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PORT = 29577
EXCHANGES = 5
# Python's programs sometimes fail with "terminate called without an active exception".
PEER_TRIES = 3


def run(*command):
    subprocess.run(command, check=True)


class Hosts:
    """Network namespaces, one per host; removed at the end."""

    def __init__(self, count, mbit, burst_kb=None):
        self.prefix = f"tessera{os.getpid()}"
        self.names = [f"{self.prefix}h{i}" for i in range(count)]
        self.mbit = mbit
        # The bytes of one millisecond: smaller buckets need a finer kernel clock.
        self.burst_kb = burst_kb or max(256, mbit // 8)
        self.processes = []

    def __enter__(self):
        try:
            self.make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def make(self):
        switch = f"{self.prefix}s"
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        for i, name in enumerate(self.names):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", "veth0", "netns", name, "type", "veth", "peer", "name", f"port{i}", "netns", switch)
            run("ip", "-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "veth0")
            run("ip", "-n", switch, "link", "set", f"port{i}", "master", "bridge")
            for space, device in ((name, "veth0"), (switch, f"port{i}")):
                run("ip", "-n", space, "link", "set", device, "up")
                run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{self.mbit}mbit",
                    "burst", f"{self.burst_kb}kb", "latency", "50ms")
            run("ip", "-n", name, "link", "set", "lo", "up")

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
        for name in [*self.names, f"{self.prefix}s"]:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)

    def ranks(self, command, tries=1):
        """Runs the command as a rank on every host, again if it fails. Returns the last line of rank 0, parsed as JSON."""
        for left in reversed(range(tries)):
            try:
                return json.loads(self.start(command).splitlines()[-1])
            except SystemExit as error:
                if left == 0:
                    raise
                print(f"{error}: once more", file=sys.stderr, flush=True)

    def start(self, command):
        """Runs the command once on every host. Returns the output of rank 0."""
        self.processes = processes = []
        for rank, name in enumerate(self.names):
            environment = dict(os.environ, TESSERA_PEER_MEMORY="0", RANK=str(rank), WORLD_SIZE=str(len(self.names)), LOCAL_RANK="0",
                               LOCAL_WORLD_SIZE="1", MASTER_ADDR="10.77.0.1", MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME="veth0",
                               TORCH_CPP_LOG_LEVEL="ERROR", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TORCHELASTIC_USE_AGENT_STORE="False")
            processes.append(subprocess.Popen(["ip", "netns", "exec", name, *command], env=environment, text=True,
                                              stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL))
        output = processes[0].communicate()[0]
        if any([process.wait() for process in processes]):
            raise SystemExit(f"hosts.py: failed: {' '.join(command)}")
        return output


def exchange(sent_bytes):
    """Runs as one of two hosts: the median time to send and receive this number of bytes at once."""
    is_first = os.environ["RANK"] == "0"
    address = (os.environ["MASTER_ADDR"], PORT)
    connection = socket.create_server(address).accept()[0] if is_first else connect(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    outgoing, incoming = bytearray(os.urandom(1 << 20) * (sent_bytes // (1 << 20) + 1))[:sent_bytes], bytearray(sent_bytes)
    seconds, cpu_seconds = [], []
    for _ in range(EXCHANGES):
        connection.sendall(b"!")
        connection.recv(1)
        began, cpu_began = time.monotonic(), cpu_now()
        sender = threading.Thread(target=connection.sendall, args=(outgoing,))
        sender.start()
        left = memoryview(incoming)
        while left:
            received = connection.recv_into(left)
            if received == 0:
                raise SystemExit("hosts.py: the other host has gone")
            left = left[received:]
        sender.join()
        seconds.append(time.monotonic() - began)
        cpu_seconds.append(cpu_now() - cpu_began)
    print(json.dumps({"exchange_s": statistics.median(seconds), "cpu_s": statistics.median(cpu_seconds)}))


def connect(address):
    for _ in range(100):
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:  # the other host does not listen yet
            time.sleep(0.1)
    raise SystemExit(f"hosts.py: nobody answers at {address[0]}")


def cpu_now():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def limit_of(hosts, args, result):
    """The limits of `result`'s step: computing alone, and sending its bytes alone. Measured again beside each pair."""
    computing = hosts.ranks(command_of("local", args, len(hosts.names), is_ours=True))
    moving = hosts.ranks([sys.executable, os.path.abspath(__file__), "--exchange", str(result["sent_bytes"])])
    limit_s = computing["step_s_median"] + moving["exchange_s"]
    print(f"  computing {computing['step_s_median'] * 1e3:.0f} + moving {moving['exchange_s'] * 1e3:.0f} = {limit_s * 1e3:.0f} ms: "
          f"ours {result['ours_s'] / limit_s:.2f} of it, it {limit_s / result['other_s']:.2f} of {'old' if args.other else result['other']}  "
          f"processor {computing['cpu_s']:.2f} + {moving['cpu_s']:.2f} s", flush=True)
    return {"computing_s": computing["step_s_median"], "moving_s": moving["exchange_s"], "moving_cpu_s": moving["cpu_s"]}


def command_of(program, args, hosts, is_ours):
    size = ["--model", args.model, "--ranks", str(hosts), "--steps", str(args.steps), "--warmup", str(args.warmup)]
    for name in ("layers", "width", "batch"):
        if getattr(args, name) is not None:
            size += [f"--{name}", str(getattr(args, name))]
    wrapper, _, option = program.partition(",")
    if is_ours or option:
        return [args.train_step, "--json", "--wrapper", wrapper, *size, *(["--wire", option] if option else [])]
    if args.other:
        return [args.other, "--json", "--wrapper", wrapper, *size]
    return [os.path.join(ROOT, "tools/python.sh"), os.path.join(ROOT, "bench/compare/peer.py"), "--peer", program, *size]


def compare(hosts, args, pair):
    ours, other = pair.split(":")
    if args.other:
        other = ours
    lines = {"ours": [], "other": []}
    for turn in range(args.rounds):
        for who in ("ours", "other") if turn % 2 == 0 else ("other", "ours"):
            program = ours if who == "ours" else other
            command = command_of(program, args, len(hosts.names), who == "ours")
            lines[who].append(hosts.ranks(command, tries=1 if who == "ours" else PEER_TRIES))
    for mine, theirs in zip(lines["ours"], lines["other"]):
        if "int8" not in pair and abs(mine["losses"][0] - theirs["losses"][0]) > 1e-5 * abs(mine["losses"][0]):
            raise SystemExit(f"hosts.py: {ours} begins with loss {mine['losses'][0]}, {other} with {theirs['losses'][0]}")
    ratios = [a["step_s_median"] / b["step_s_median"] for a, b in zip(lines["ours"], lines["other"])]
    step_s = {who: statistics.median(line["step_s_median"] for line in of) for who, of in lines.items()}
    sent = lines["ours"][0]["sent_bytes"]
    result = {"hosts": len(hosts.names), "mbit": hosts.mbit, "model": args.model, "ours": ours, "other": args.other or other,
              "ours_s": step_s["ours"], "other_s": step_s["other"], "ratio": statistics.median(ratios), "ratios": ratios,
              "link": sent * 8 / (hosts.mbit * 1e6) / step_s["ours"], "wait_s": lines["ours"][-1]["comm_wait_s"],
              "cpu_s": [statistics.median(line["cpu_s"] for line in of) for of in lines.values()], "sent_bytes": sent}
    print(f"{result['hosts']} hosts, {hosts.mbit:5d} Mbit/s, {ours:9} / {'old' if args.other else other:10}  "
          f"{step_s['ours'] * 1e3:7.0f} / {step_s['other'] * 1e3:7.0f} ms  ratio {result['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})  "
          f"link {result['link'] * 100:3.0f} %  processor {result['cpu_s'][0]:.2f} / {result['cpu_s'][1]:.2f} s", flush=True)
    if args.limit:
        result["limit"] = limit_of(hosts, args, result)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-step", default=os.path.join(ROOT, "build/release/bench/train_step"))
    parser.add_argument("--other", help="another train_step to compare with, in the place of PyTorch")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2])
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", nargs="+", default=["fsdp:fsdp2", "sdp:zero1", "ddp:ddp"])
    parser.add_argument("--model", default="recipe")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--json", help="a file for everything measured")
    parser.add_argument("--limit", action="store_true", help="measure computing and moving by themselves, too, of 2 hosts")
    parser.add_argument("--exchange", type=int, help=argparse.SUPPRESS)  # runs as one of two hosts
    args = parser.parse_args()
    if args.exchange is not None:
        return exchange(args.exchange)
    if args.limit and args.hosts != [2]:
        parser.error("--limit goes with --hosts 2")
    if os.geteuid() != 0:
        parser.error("needs root, for network namespaces")
    if not shutil.which("ip") or not shutil.which("tc"):
        parser.error("needs ip and tc: install iproute2")
    for program in filter(None, (args.train_step, args.other)):
        if not os.access(program, os.X_OK):
            parser.error(f"{program} is not built")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also removes the namespaces
    results = []
    for count in args.hosts:
        for mbit in args.mbit:
            with Hosts(count, mbit) as hosts:
                results += [compare(hosts, args, pair) for pair in args.pairs]
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
