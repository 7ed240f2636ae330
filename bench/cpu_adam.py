"""DeepSpeed's CPUAdam on the parameter of bench/offload_bench.cpp: one step of AdamW on 16 Mi elements of fp32.

    tools/python.sh bench/cpu_adam.py [threads]

Needs DeepSpeed in that environment (pip install deepspeed), which compiles its operator when it is first used.
Checked against torch.optim.AdamW before it is timed. Prints the median and the best of the steps.
"""
import statistics
import sys
import time

import torch

try:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
except ImportError:
    sys.exit("cpu_adam.py: DeepSpeed is not in this environment; bench/offload_bench measures the others without it")

NUMEL = 16 << 20
OPTIONS = dict(lr=1e-3, weight_decay=0.1)


def check():
    own, expected = (torch.linspace(-1, 1, 100003).requires_grad_(True) for _ in range(2))
    optimizers = DeepSpeedCPUAdam([own], **OPTIONS), torch.optim.AdamW([expected], **OPTIONS)
    for step in range(3):
        own.grad = torch.linspace(1 + step, -1, 100003)
        expected.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


def main():
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads())
    check()
    parameter = torch.zeros(NUMEL, requires_grad=True)
    parameter.grad = torch.full((NUMEL,), 0.01)
    optimizer = DeepSpeedCPUAdam([parameter], **OPTIONS)
    optimizer.step()
    times = []
    for _ in range(20):
        began = time.perf_counter()
        optimizer.step()
        times.append((time.perf_counter() - began) * 1e3)
    print(f"deepspeed_cpu_adam: median {statistics.median(times):.1f} ms, best {min(times):.1f} ms, {torch.get_num_threads()} threads")


main()
