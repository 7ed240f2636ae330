#!/usr/bin/env python3
"""Measures the step of bench/gpu/cuda_graph.cpp under PyTorch's FSDP2, on one GPU: bench/gpu/peers.py [layers] [width].

The same chain of Linear layers, a unit each, in bf16 with gradients reduced in fp32, gradients clipped by their norm and
AdamW; without offload and with it. One process, one GPU, NCCL: the overhead of the framework beside the kernels.
"""
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

WARM_UP, STEPS, ROWS = 5, 20, 2048


def milliseconds_a_step(layers, width, offloads):
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    if not offloads:
        model.cuda()
    policy = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if offloads else OffloadPolicy(),
    }
    for layer in model:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(ROWS, width, device="cuda")
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            torch.cuda.synchronize()
            began = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / STEPS


def main():
    layers, width = (int(word) for word in (sys.argv[1:] + ["24", "4096"][len(sys.argv) - 1 :])[:2])
    torch.cuda.set_device(0)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555", RANK="0", WORLD_SIZE="1")
    # With offload, FSDP2 clips on the host, which needs a CPU backend for its collective.
    dist.init_process_group("cpu:gloo,cuda:nccl")
    for offloads in (False, True):
        each_ms = milliseconds_a_step(layers, width, offloads)
        text = ", offload" if offloads else ""
        print(f"FSDP2, torch {torch.__version__}, {layers} x Linear({width}), bf16{text}: {each_ms:.2f} ms a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
