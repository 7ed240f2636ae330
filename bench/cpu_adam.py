"""Compares DeepSpeed's CPUAdam, HostAdamW and libtorch's fused operator: steps of AdamW on 16 Mi elements of fp32.

    bench/compare/setup.sh
    cmake --build --preset release --target adam_turns
    tools/python.sh bench/cpu_adam.py [--threads 1] [--rounds 60] [--build build/release]

DeepSpeed compiles its operator on first use. The result is checked against torch.optim.AdamW before it is timed. In a
round each optimizer runs one step, so that other load on the machine affects all: DeepSpeed's in this process, the others
in bench/adam_turns.cpp. Prints the median of each, and the median over rounds of its ratio to DeepSpeed's time.
"""
import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

try:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
except ImportError:
    sys.exit("cpu_adam.py: DeepSpeed is not in this environment: bench/compare/setup.sh installs it")

NUMEL = 16 << 20
OPTIONS = dict(lr=1e-3, weight_decay=0.1)
WARM_UP = 5


def check():
    own, expected = (torch.linspace(-1, 1, 100003).requires_grad_(True) for _ in range(2))
    optimizers = DeepSpeedCPUAdam([own], **OPTIONS), torch.optim.AdamW([expected], **OPTIONS)
    for step in range(3):
        own.grad = torch.linspace(1 + step, -1, 100003)
        expected.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


class Turns:
    """Runs one step of a named optimizer; step() returns its (milliseconds, processor milliseconds)."""

    def __init__(self, program, threads):
        self.parameter = torch.zeros(NUMEL, requires_grad=True)
        self.parameter.grad = torch.full((NUMEL,), 0.01)
        self.deepspeed = DeepSpeedCPUAdam([self.parameter], **OPTIONS)
        self.others = subprocess.Popen([str(program), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self, name):
        if name == "deepspeed":
            cpu, began = time.process_time(), time.perf_counter()
            self.deepspeed.step()
            return (time.perf_counter() - began) * 1e3, (time.process_time() - cpu) * 1e3
        self.others.stdin.write(name + "\n")
        self.others.stdin.flush()
        answer = self.others.stdout.readline().split()
        if len(answer) != 2:
            sys.exit("cpu_adam.py: adam_turns ended")
        return tuple(map(float, answer))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--build", type=Path, default=Path("build/release"))
    arguments = parser.parse_args()
    program = arguments.build / "bench" / "adam_turns"
    if not program.exists():
        sys.exit(f"cpu_adam.py: {program} is not there: cmake --build --preset release --target adam_turns")
    torch.set_num_threads(arguments.threads)
    check()
    turns = Turns(program, arguments.threads)
    names = ["deepspeed", "host", "fused"]
    times = {name: [] for name in names}
    for round_ in range(WARM_UP + arguments.rounds):
        for shift in range(len(names)):  # each is first by turns
            name = names[(round_ + shift) % len(names)]
            times[name].append(turns.step(name))
    turns.others.stdin.close()
    turns.others.wait()
    print(f"{arguments.threads} threads, {arguments.rounds} rounds, milliseconds a step: clock, processor, and of DeepSpeed's")
    for name in names:
        own, reference = times[name][WARM_UP:], times["deepspeed"][WARM_UP:]
        medians = [statistics.median(step[i] for step in own) for i in range(2)]
        ratios = [statistics.median(a[i] / b[i] for a, b in zip(own, reference)) for i in range(2)]
        print(f"{name:10} {medians[0]:7.1f} {medians[1]:7.1f} {ratios[0]:6.2f} {ratios[1]:6.2f}")


main()
