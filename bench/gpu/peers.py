#!/usr/bin/env python3
"""Measures the step of one model under PyTorch's wrappers, for bench/gpu/run.py: the settings of bench/gpu/step.cpp.

    peers.py variants=fsdp2,fsdp2-kept,fsdp2-compiled model=chain layers=24 width=4096 batch=2048 steps=20 device=cuda

One process with one rank, on the same models, batches, dtypes and optimizer as the C++ program. Prints one line of JSON for each
variant as soon as it is measured. Compilation is of each unit by itself (torch.compile of a block).
"""
import gc
import json
import os
import pathlib
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "compare"))
import models  # noqa: E402

# No step clips, as in most steps of a stable training. The work is the same.
LEARNING_RATE, LARGEST_NORM = 1e-4, 100.0


def make_model(settings, device, inputs_on):
    """The model, its units and the loss of a forward."""
    width, batch = int(settings["width"]), int(settings["batch"])
    if settings["model"] in ("chain", "mlp"):
        if settings["model"] == "chain":
            units = [nn.Linear(width, width, device=device) for _ in range(int(settings["layers"]))]
            model = nn.Sequential(*units)
        else:
            units = [nn.Linear(width, width // 2, device=device), nn.Linear(width // 2, 10, device=device)]
            model = nn.Sequential(units[0], nn.ReLU(), units[1])
        x = torch.randn(batch, width, device=inputs_on)
        return model, units, lambda wrapped: wrapped(x).square().mean()
    layers = int(settings["layers"])
    vocabulary, context = int(settings["vocabulary"]), int(settings["context"])
    with torch.device(device):
        model = models.Gpt(vocabulary, layers, width, int(settings["heads"]), context)
    model.head.weight = model.token_embedding.weight
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=width**-0.5)
    tokens = torch.randint(vocabulary, (batch, context + 1), device=inputs_on)
    return model, list(model.blocks), lambda wrapped: wrapped(tokens[:, :-1], tokens[:, 1:])


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def measure(settings, variant, device):
    offloads = settings.get("offload") == "1"
    model, units, loss = make_model(settings, "cpu" if offloads else device, device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if variant == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        if variant == "fsdp2-compiled":
            for unit in units:
                unit.compile()
        policy = {
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy() if offloads else OffloadPolicy(),
            "reshard_after_forward": variant != "fsdp2-kept",
        }
        for unit in units:
            fully_shard(unit, **policy)
        wrapped = fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step():
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=variant == "ddp"):
            value = loss(wrapped)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()

    steps = int(settings["steps"])
    warm_up = max(5, steps // 4)
    for _ in range(warm_up):
        step()
    synchronize(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    step_s = (time.perf_counter() - began) / steps
    host_s = 0
    for _ in range(warm_up):
        idle = time.perf_counter()
        step()
        host_s += (time.perf_counter() - idle) / warm_up
        synchronize(device)
    if "trace" in settings:  # a profile of two steps
        with torch.profiler.profile() as profile:
            step(), step(), synchronize(device)
        profile.export_chrome_trace(f"{settings['trace']}.{variant}.json")
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {"variant": variant, "parameters": parameters, "step_ms": 1e3 * step_s, "host_ms": 1e3 * host_s, "peak_bytes": peak}


def main():
    settings = dict(word.split("=", 1) for word in sys.argv[1:])
    device = settings["device"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    # With offload, FSDP2 clips on the host, which needs a CPU backend for its collective.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    for variant in settings["variants"].split(","):
        if device == "cuda":
            torch.cuda.empty_cache()
        print(json.dumps(measure(settings, variant, device)), flush=True)
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
