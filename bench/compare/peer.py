"""One training run under one of Python's wrappers: prints the fields of bench/train_step, as JSON.

    peer.py --peer fsdp2 --model deep --ranks 2

Without a launcher, starts its ranks as processes that are joined by gloo over loopback.
"""
import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

PEERS = ["local", "ddp", "zero1", "fairscale_sdp", "deepspeed1", "deepspeed2", "fsdp1", "fsdp2", "fairscale_fsdp", "deepspeed3"]


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--model", default="gpt", choices=["gpt", "deep", "recipe", "mlp", "llama", "gpt2"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def launch(args):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(args.ranks):
        environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.ranks), LOCAL_WORLD_SIZE=str(args.ranks),
                           MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS=str(args.threads),
                           DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo", TORCHELASTIC_USE_AGENT_STORE="False")
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    codes = []
    while len(codes) < args.ranks:
        for process in list(ranks):
            if process.poll() is None:
                continue
            ranks.remove(process)
            codes.append(process.returncode)
            if process.returncode != 0:
                for other in ranks:
                    other.kill()
        time.sleep(0.02)
    return max(abs(code) for code in codes)


def resident_bytes(field):
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def adam(parameters):
    import torch

    return torch.optim.Adam(parameters, lr=1e-3, fused=True)


class Trainer:
    """Forward, backward, step under a wrapper; the settings are each project's own advice for speed."""

    def __init__(self, model, optimizer, zero_grad=None):
        self.model, self.optimizer = model, optimizer
        self.zero_grad = zero_grad or optimizer.zero_grad

    def step(self, batch):
        self.zero_grad()
        loss = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class DeepSpeedTrainer:
    def __init__(self, engine):
        self.engine = engine

    def step(self, batch):
        loss = self.engine(*batch)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()


def make_ddp(model):
    import torch

    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def make_zero1(model):
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = make_ddp(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=1e-3, fused=True)
    return Trainer(ddp, optimizer)


def make_fsdp1(model, unit):
    import torch
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    sharded = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({unit}), device_id=torch.device("cpu"),
                                       backward_prefetch=BackwardPrefetch.BACKWARD_PRE, forward_prefetch=True)
    return Trainer(sharded, adam(sharded.parameters()))


def make_fsdp2(model, unit, ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    for module in model.modules():
        if isinstance(module, unit):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Trainer(model, adam(model.parameters()))


def make_fairscale_sdp(model):
    import torch
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    optimizer = OSS(model.parameters(), optim=torch.optim.Adam, lr=1e-3, fused=True)
    sharded = ShardedDataParallel(model, optimizer)
    return Trainer(sharded, optimizer, sharded.zero_grad)  # the wrapper's zero_grad: training is wrong with the optimizer's


def make_fairscale_fsdp(model, unit):
    import torch
    from fairscale.nn.wrap import auto_wrap, enable_wrap

    from fairscale_on_cpu import without_streams

    FullyShardedDataParallel = without_streams()

    def policy(module, recurse, unwrapped_params, **_):
        return True if recurse else isinstance(module, unit)

    settings = dict(compute_device=torch.device("cpu"), bucket_cap_mb=0, flatten_parameters=True)
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, auto_wrap_policy=policy, **settings):
        model = auto_wrap(model)
    sharded = FullyShardedDataParallel(model, **settings)
    return Trainer(sharded, adam(sharded.parameters()))


def make_deepspeed(model, stage, args):
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    bucket = 10_000_000  # elements: the default of 5e8 would overlap nothing here
    zero = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "overlap_comm": False,
            "contiguous_gradients": True}
    if stage == 3:
        zero.update(stage3_prefetch_bucket_size=bucket, stage3_param_persistence_threshold=10_000, stage3_max_live_parameters=4 * bucket,
                    stage3_max_reuse_distance=bucket)
    config = {"train_micro_batch_size_per_gpu": args.batch, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
              "zero_force_ds_cpu_optimizer": False, "zero_optimization": zero, "steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model.parameters()), config=config)
    return DeepSpeedTrainer(engine)


def make_trainer(args, model, unit):
    if args.peer == "local":
        return Trainer(model, adam(model.parameters()))
    if args.peer == "ddp":
        ddp = make_ddp(model)
        return Trainer(ddp, adam(ddp.parameters()))
    if args.peer == "zero1":
        return make_zero1(model)
    if args.peer == "fsdp1":
        return make_fsdp1(model, unit)
    if args.peer == "fsdp2":
        return make_fsdp2(model, unit, args.ranks)
    if args.peer == "fairscale_sdp":
        return make_fairscale_sdp(model)
    if args.peer == "fairscale_fsdp":
        return make_fairscale_fsdp(model, unit)
    return make_deepspeed(model, int(args.peer[-1]), args)


def run(args):
    import torch
    import torch.distributed as dist

    import models

    batch, layers, width = models.SIZES[args.model]
    args.batch, args.layers, args.width = args.batch or batch, args.layers or layers, args.width or width
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()
    if args.peer.startswith("deepspeed"):
        import deepspeed  # noqa: F401
    if args.peer.startswith("fairscale"):
        import fairscale.nn.data_parallel  # noqa: F401
        import fairscale.optim.oss  # noqa: F401
    if args.model in models.ARCHIVES:
        models.unit_class(args)  # imports transformers
    # Loads the modules that torch imports in the first step, so that they do not count as its memory.
    tiny = torch.nn.Linear(4, 4)
    tiny(torch.ones(1, 4)).sum().backward()
    adam(tiny.parameters()).step()
    rss_before = resident_bytes("VmRSS:")
    data = models.make_batch(args, rank)
    trainer = make_trainer(args, models.make_model(args), models.unit_class(args))

    losses, step_s = [], []
    for step in range(args.warmup + args.steps):
        if step == args.warmup:
            dist.barrier()
            cpu_before = time.process_time()
        began = time.perf_counter()
        loss = trainer.step(data)
        if step >= args.warmup:
            step_s.append(time.perf_counter() - began)
        losses.append(float(loss))
    cpu_s = (time.process_time() - cpu_before) / args.steps
    rss_peak = resident_bytes("VmHWM:")

    slowest = torch.tensor(step_s, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    memory = [None] * args.ranks
    dist.all_gather_object(memory, (rss_peak, rss_before, cpu_s))
    if rank == 0:
        slowest, mean = slowest.tolist(), (mean / args.ranks).tolist()
        print(json.dumps({"model": args.model, "wrapper": args.peer, "ranks": args.ranks, "batch": args.batch, "steps": args.steps,
                          "warmup": args.warmup, "threads": args.threads, "step_s_median": statistics.median(slowest),
                          "step_s_min": min(slowest), "cpu_s": sum(m[2] for m in memory) / args.ranks, "rss_before_bytes": max(memory)[1], "rss_peak_bytes": max(memory)[0],
                          "loss": mean[-1], "losses": mean, "step_s": slowest}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = parse()
    if "RANK" not in os.environ:
        sys.exit(launch(arguments))
    run(arguments)
