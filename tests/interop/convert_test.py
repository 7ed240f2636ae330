"""Tests tools/tessera-convert: a run started in Python continues in C++ with Python's losses, and the reverse. `make
interop` runs the suite Convert; `make interop-peers` the suite Peers, on files of DeepSpeed and FairScale.

    tools/python.sh tests/interop/convert_test.py build/release/tests/interop/interop_program \
      build/release/tools/tessera/tessera Convert
"""

import contextlib
import io
import json
import math
import os
import pathlib
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONVERT, BENCH = ROOT / "tools/tessera-convert", ROOT / "bench/compare"
PROGRAM = COMMAND = ""
sys.path.insert(0, str(ROOT / "tools"))


def make_model():
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(20, 33), torch.nn.Tanh(), torch.nn.Linear(33, 7), torch.nn.BatchNorm1d(7))


def batch():
    return torch.linspace(-1, 1, 80).view(4, 20)


def loss_of(model):
    return (model(batch()) - 1).square().mean()


def steps(model, optimizer, count, backward=torch.Tensor.backward):
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = loss_of(model)
        backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def on_ranks(work, *arguments, ranks=2):
    """Runs work(rank, *arguments) in processes, and returns rank 0's result."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(one_rank, (ranks, port, queue, work, arguments), nprocs=ranks)
    return queue.get()


def one_rank(rank, ranks, port, queue, work, arguments):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of deprecations
    dist.init_process_group("gloo")
    result = work(rank, *arguments)
    if rank == 0:
        queue.put(result)
    dist.barrier()
    dist.destroy_process_group()


def safe_reader(folder):
    """Reads a folder of torch.distributed.checkpoint without the ability to run code from its pickles."""
    from convert import untrusted

    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    reader = dcp.FileSystemReader(folder)
    reader.read_metadata = lambda *_, **__: untrusted.load_metadata(pathlib.Path(folder) / ".metadata")
    return reader


def run_fsdp2(rank, load, before, save, after):
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    fully_shard(model[0])
    fully_shard(model)
    optimizer = adamw(model.parameters())
    if load:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optimizer_state}
        dcp.load(state, storage_reader=safe_reader(load))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    losses = steps(model, optimizer, before)
    if save:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optimizer_state, "step": before}, checkpoint_id=save)
    return losses + steps(model, optimizer, after)


def run_fsdp1(rank, before, save, after):
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model = FullyShardedDataParallel(make_model(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = adamw(model.parameters())
    losses = steps(model, optimizer, before)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"app": {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}}
        dcp.save(state, checkpoint_id=save)
    return losses + steps(model, optimizer, after)


def run_deepspeed(rank, stage, folder, before, after):
    import deepspeed

    model = make_model()
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": [p for p in model.parameters() if p.dim() == 1]}]
    config = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
              "zero_optimization": {"stage": stage, "sub_group_size": 500, "overlap_comm": False}, "steps_per_print": 10**9,
              "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(groups), config=config)

    def more(count):
        losses = []
        for _ in range(count):
            loss = loss_of(engine)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    losses = more(before)
    engine.save_checkpoint(folder, tag="here")
    return losses + more(after)


def run_fairscale_fsdp(rank, file, before, after):
    """Gathering leaves the optimizer in a state that newer torch refuses, so a separate run gives the later losses."""
    sys.path.append(str(BENCH))
    from fairscale_on_cpu import without_streams

    FullyShardedDataParallel = without_streams()
    model = FullyShardedDataParallel(make_model(), flatten_parameters=True, bucket_cap_mb=0, compute_device=torch.device("cpu"))
    optimizer = adamw(model.parameters())
    losses = steps(model, optimizer, before + after if file is None else before)
    if file is None:
        return losses
    torch.Tensor.cpu = lambda self, *_: self.clone()  # it gathers into one buffer, and assumes that cpu() copies
    state, optimizer_state = model.state_dict(), model.gather_full_optim_state_dict(optimizer)
    if rank == 0:
        torch.save({"model": state, "optimizer": optimizer_state}, file)
    return losses


def run_fairscale_oss(rank, file, before, after):
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim import OSS

    model = make_model()
    optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    wrapped = ShardedDataParallel(model, optimizer)
    losses = steps(wrapped, optimizer, before)
    optimizer.consolidate_state_dict(0)
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return losses + steps(wrapped, optimizer, after)


class Base(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)

    def run_words(self, *words, code=0):
        ran = subprocess.run(list(map(str, words)), capture_output=True, text=True)
        self.assertEqual(ran.returncode, code, ran.stdout + ran.stderr)
        return ran.stdout + ran.stderr

    def convert(self, *words, code=0):
        """Converts in this process, because importing torch takes longer than converting. Returns the error."""
        arguments, sys.argv = sys.argv, [str(CONVERT), *map(str, words)]
        told = ""
        try:
            runpy.run_path(str(CONVERT), run_name="__main__")
        except SystemExit as end:
            told = str(end)
        finally:
            sys.argv = arguments
        self.assertEqual(bool(told), bool(code), told)
        return told

    def go_on(self, folder, ranks, count, save=None):
        """The losses of `count` steps in C++ from one of our checkpoints, after verifying it."""
        self.run_words(COMMAND, "verify", folder)
        told = self.run_words(PROGRAM, "continue", folder, ranks, count, save or "-")
        return [float(line) for line in told.splitlines()]

    def assert_close(self, got, expected):
        self.assertEqual(len(got), len(expected))
        for one, other in zip(got, expected):
            self.assertTrue(math.isclose(one, other, rel_tol=2e-5), f"{got} and {expected}")


class Convert(Base):
    def test_what_fsdp2_begins_goes_on_here_and_back(self):
        expected = on_ranks(run_fsdp2, None, 3, str(self.path / "python"), 6)
        self.convert(self.path / "python", self.path / "ours")
        for ranks in (1, 2, 3):
            self.assert_close(self.go_on(self.path / "ours", ranks, 3, self.path / "after"), expected[3:6])
        self.convert(self.path / "after", self.path / "back")
        self.assert_close(on_ranks(run_fsdp2, str(self.path / "back"), 3, None, 0), expected[6:])
        self.assertIn("is there already", self.convert(self.path / "after", self.path / "back", code=1))
        # Converts back once more: nothing changed on the way.
        self.convert(self.path / "back", self.path / "again")
        self.assertIn("the same", self.run_words(COMMAND, "diff", self.path / "after", self.path / "again", "--parameters"))

    def test_what_fsdp1_begins_goes_on_here(self):
        expected = on_ranks(run_fsdp1, 3, str(self.path / "python"), 3)
        self.convert(self.path / "python", self.path / "ours")
        self.assert_close(self.go_on(self.path / "ours", 2, 3), expected[3:])

    def train(self, made=adamw):
        model = make_model()
        optimizer = made(model.parameters())
        steps(model, optimizer, 3)
        return model, optimizer

    def test_files_of_torch_save(self):
        model, optimizer = self.train()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 5}, self.path / "both.pt")
        torch.save(model.state_dict(), self.path / "model.pt")
        torch.save(optimizer.state_dict(), self.path / "optimizer.pt", _use_new_zipfile_serialization=False)
        expected = steps(model, optimizer, 3)
        self.convert(self.path / "both.pt", self.path / "both")
        self.assert_close(self.go_on(self.path / "both", 2, 3), expected)
        self.convert(self.path / "model.pt", self.path / "two", "--optimizer-file", self.path / "optimizer.pt", "--extra", '{"epoch": 5}')
        self.assertIn("the same", self.run_words(COMMAND, "diff", self.path / "both", self.path / "two"))

    def test_files_of_lightning(self):
        model, optimizer = self.train()
        file = {"epoch": 5, "global_step": 2**40, "pytorch-lightning_version": "2.6", "state_dict": model.state_dict(), "best": math.inf,
                "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [{"last_epoch": 5}], "loops": {"fit_loop": {}}}
        torch.save(file, self.path / "last.ckpt")
        expected = steps(model, optimizer, 3)
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            self.convert(self.path / "last.ckpt", self.path / "ours")
        self.assertIn("left out, beside the model, its optimizer, and numbers and texts: best, lr_schedulers, loops", errors.getvalue())
        self.assert_close(self.go_on(self.path / "ours", 2, 3), expected)
        torch.save({**file, "optimizer_states": [optimizer.state_dict()] * 2}, self.path / "two.ckpt")
        told = self.convert(self.path / "two.ckpt", self.path / "two", code=1)
        self.assertIn("optimizer_states/0, optimizer_states/1 may each be the optimizer", told)
        self.convert(self.path / "two.ckpt", self.path / "two", "--optimizer", "optimizer_states/1")
        self.run_words(COMMAND, "verify", self.path / "two")
        torch.save({**file, "global_step": 2**70}, self.path / "large.ckpt")
        self.assertIn("extra/global_step is 1180591620717411303424, which has more than 64 bits",
                      self.convert(self.path / "large.ckpt", self.path / "large", code=1))

    def test_views_with_other_values_are_no_tied_weights(self):
        weight = torch.arange(9.0).view(3, 3)
        complex_weight = torch.complex(weight, weight + 1)
        # A conjugated and a negated view have the memory and strides of the tensor, with other values.
        state = {"a": weight, "b": weight.t(), "c": weight, "d": complex_weight, "e": complex_weight.conj(),
                 "f": weight.clone(), "g": torch.Tensor._neg_view(weight)}
        torch.save(state, self.path / "model.pt")
        dcp.save({"model": state}, checkpoint_id=self.path / "python", no_dist=True)
        for source, names in (("model.pt", "abdefg"), ("python", "abcdefg")):
            self.convert(self.path / source, self.path / "ours")
            told = json.loads(self.run_words(COMMAND, "inspect", self.path / "ours", "--json"))
            self.assertEqual("".join(sorted(told["tensors"])), names)
            self.run_words(COMMAND, "consolidate", self.path / "ours", self.path / "ours.safetensors")
            loaded = load_file(self.path / "ours.safetensors")
            for name in names:
                self.assertTrue(torch.equal(loaded[name], state[name]), name)
            shutil.rmtree(self.path / "ours")

    def test_what_is_converted_later_is_newer_and_numbers_are_as_ours_print_them(self):
        torch.save(make_model().state_dict(), self.path / "model.pt")
        numbers = [1e15, 9876543210123456.0, 123456789012345.6, 5e-324, 2.5e-05, -0.0, 0.1 + 0.2, 1.7976931348623157e308]
        numbers += [float(number) for number in torch.rand(2000, dtype=torch.float64) * 10.0 ** torch.arange(2000).remainder(40).sub(20)]
        for sequence, name in enumerate(("a", "b"), 1):
            self.convert(self.path / "model.pt", self.path / "run" / name, "--extra", json.dumps({"numbers": numbers}))
            told = json.loads(self.run_words(COMMAND, "inspect", self.path / "run" / name, "--json"))
            self.assertEqual((told["sequence"], told["extra"]["numbers"]), (sequence, numbers))

    def test_numbered_parameters_of_several_groups_need_names(self):
        model = make_model()
        named = dict(model.named_parameters())
        order = sorted(named, key=lambda name: named[name].dim())
        optimizer = torch.optim.AdamW([{"params": [named[name] for name in order if named[name].dim() == 1]},
                                       {"params": [named[name] for name in order if named[name].dim() == 2], "weight_decay": 0.5}], lr=0.01)
        steps(model, optimizer, 2)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, self.path / "file.pt")
        self.assertIn("give --parameter-order", self.convert(self.path / "file.pt", self.path / "ours", code=1))
        (self.path / "order").write_text("\n".join(order))
        self.convert(self.path / "file.pt", self.path / "ours", "--parameter-order", self.path / "order")
        manifest = json.loads((self.path / "ours/tessera.json").read_text())
        self.assertEqual([group["parameters"] for group in manifest["optimizer"]["groups"]], [order[:4], order[4:]])

    def test_other_optimizers(self):
        makers = {"Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True), "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
                  "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True), "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1)}
        for kind, make in makers.items():
            with self.subTest(kind=kind):
                model, optimizer = self.train(make)
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, self.path / "file.pt")
                self.convert(self.path / "file.pt", self.path / kind)
                self.run_words(COMMAND, "verify", self.path / kind)
                self.assertIn(f"optimizer {kind}", self.run_words(COMMAND, "inspect", self.path / kind))
                self.convert(self.path / kind, self.path / f"{kind}-dcp")
                self.convert(self.path / f"{kind}-dcp", self.path / f"{kind}-again")
                self.run_words(COMMAND, "diff", self.path / kind, self.path / f"{kind}-again")

    def test_several_optimizers_become_one_of_dcp(self):
        from convert.checkpoint import sum_of_manifest

        def in_groups(parameters):
            parameters = list(parameters)
            return adamw([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}])

        model, optimizer = self.train(in_groups)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, self.path / "file.pt")
        (self.path / "order").write_text("\n".join(name for name, _ in model.named_parameters()))
        self.convert(self.path / "file.pt", self.path / "one", "--parameter-order", self.path / "order")
        shutil.copytree(self.path / "one", self.path / "two")
        manifest = json.loads((self.path / "two/tessera.json").read_text())
        whole = manifest.pop("optimizer")
        of = lambda names: {**whole, "groups": [group for group in whole["groups"] if group["parameters"][0] in names],
                            "numbers": {name: numbers for name, numbers in whole["numbers"].items() if name in names}}
        first = whole["groups"][0]["parameters"]
        manifest |= {"optimizer": None, "optimizers": {"a": of(first), "b": of(set(whole["numbers"]) - set(first))}}
        manifest["checksum"] = sum_of_manifest(manifest)
        (self.path / "two/tessera.json").write_text(json.dumps(manifest))
        for name in ("one", "two"):
            self.convert(self.path / name, self.path / f"{name}-dcp")
            self.convert(self.path / f"{name}-dcp", self.path / f"{name}-again")
        self.assertIn("the same", self.run_words(COMMAND, "diff", self.path / "one-again", self.path / "two-again"))

    def test_mistakes_are_told(self):
        model, optimizer = self.train()
        groups = optimizer.state_dict()
        for group in groups["param_groups"]:
            group.pop("decoupled_weight_decay", None)
        torch.save({"model": model.state_dict(), "optimizer": groups, "ema": model.state_dict()}, self.path / "file.pt")
        told = lambda *words: self.convert(self.path / "file.pt", self.path / "ours", *words, code=1)
        self.assertIn("model, ema may each be the model: say with --model", told())
        self.assertIn("whether the optimizer is Adam or AdamW", told("--model", "ema"))
        self.assertIn("has no 'none'", told("--model", "none"))
        self.assertIn("which unpickling would run as code", self.pickled())
        self.assertIn("is not there", self.convert(self.path / "nothing", self.path / "ours", code=1))
        for text in ("", "{}", "a" * 100):
            (self.path / "text").write_text(text)
            self.assertIn("text: is not a file of torch.save", self.convert(self.path / "text", self.path / "ours", code=1))
        (self.path / "text").unlink()
        self.assertEqual([entry.name for entry in self.path.iterdir()], ["file.pt"])  # nothing else is left
        self.convert(self.path / "file.pt", self.path / "ours", "--model", "ema", "--optimizer-kind", "AdamW")
        self.run_words(COMMAND, "verify", self.path / "ours")

    def pickled(self):
        file = self.path / "file.pt"
        kept = file.read_bytes()
        torch.save({"model": make_model().state_dict(), "path": pathlib.Path("x")}, file)
        told = self.convert(file, self.path / "ours", code=1)
        file.write_bytes(kept)
        return told

    def peak_mib(self, source, target):
        """The peak memory of a conversion, beyond Python with torch."""
        script = ("import runpy, sys, threading, time; sys.argv = sys.argv[1:]; import torch, torch.distributed.checkpoint\n"
                  "def own(): return int(next(line for line in open('/proc/self/status') if line.startswith('RssAnon')).split()[1])\n"
                  "before, most = own(), [0]\n"
                  "def watch():\n  while True: most[0] = max(most[0], own()); time.sleep(0.005)\n"
                  "threading.Thread(target=watch, daemon=True).start()\n"
                  "runpy.run_path(sys.argv[0], run_name='__main__'); print((most[0] - before) // 1024)")
        return int(self.run_words(sys.executable, "-c", script, CONVERT, self.path / source, self.path / target).split()[-1])

    def test_a_piece_is_in_memory_at_a_time(self):
        weights = {f"layer{i}.weight": torch.full((4 << 20,), float(i)) for i in range(10)}  # 160 MiB
        weights["large.weight"] = torch.arange(50 << 20, dtype=torch.float32).view(1 << 11, 25 << 10)  # 200 MiB
        torch.save(weights, self.path / "file.pt")
        dcp.save({"model": weights}, checkpoint_id=self.path / "whole", no_dist=True)
        weights.clear()
        most = {name: self.peak_mib(*name) for name in (("file.pt", "ours"), ("ours", "dcp"), ("dcp", "again"))}
        self.run_words(COMMAND, "reshard", self.path / "ours", self.path / "of3", "--ranks", 3)
        most["of3", "dcp3"] = self.peak_mib("of3", "dcp3")
        self.assertLess(max(most.values()), 110, f"{most} MiB")
        self.assertLess(self.peak_mib("whole", "ours2"), 260)  # torch wrote it as one chunk
        for name in ("again", "ours2"):
            self.run_words(COMMAND, "diff", self.path / "ours", self.path / name)
        self.assertEqual(sorted(file.name for file in (self.path / "dcp").iterdir()), [".metadata", "__0_0.distcp"])

    def test_parameters_without_dimensions_keep_their_optimizer_state(self):
        weight, scale = torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.tensor(2.0))
        optimizer = torch.optim.AdamW([weight, scale], lr=0.1)
        (weight.sum() * scale).backward()
        optimizer.step()
        state = optimizer.state_dict()
        torch.save({"model": {"weight": weight.data, "scale": scale.data}, "optimizer": state}, self.path / "file.pt")
        self.convert(self.path / "file.pt", self.path / "ours")
        self.convert(self.path / "ours", self.path / "dcp")
        self.convert(self.path / "dcp", self.path / "again")
        self.assertIn("the same", self.run_words(COMMAND, "diff", self.path / "ours", self.path / "again"))
        from convert import checkpoint

        with checkpoint.Reader(self.path / "again") as reader:
            for key in ("exp_avg", "exp_avg_sq"):
                (_, _, read), = reader.pieces(f"optim.{key}.scale")
                self.assertTrue(torch.equal(read(), state["state"][1][key]), key)

    def test_pieces_of_any_shape_come_back(self):
        """Pieces of 48 bytes: rows, parts of rows, scalars, empty tensors, and tensors that are not in torch's order.
        """
        torch.manual_seed(1)
        weights = {"matrix": torch.randn(7, 5), "wide": torch.randn(2, 3, 29), "scalar": torch.tensor(3.0), "none": torch.empty(0, 4),
                   "vector": torch.arange(100, dtype=torch.int64), "bytes": torch.arange(97, dtype=torch.uint8), "half": torch.randn(3, 1, 1, 41).bfloat16()}
        torch.save(weights, self.path / "file.pt")
        self.convert(self.path / "file.pt", self.path / "ours")
        self.run_words(COMMAND, "reshard", self.path / "ours", self.path / "of4", "--ranks", 4)
        from convert import checkpoint

        with unittest.mock.patch.object(checkpoint, "PIECE_BYTES", 48), checkpoint.Reader(self.path / "of4") as reader:
            reader.manifest["block_bytes"] = 1 << 20
            for name, weight in weights.items():
                back = torch.full_like(weight, 7)
                for offsets, shape, read in reader.pieces(name):
                    back[tuple(slice(o, o + n) for o, n in zip(offsets, shape))] = read()
                self.assertTrue(torch.equal(back, weight), name)


class Peers(Base):
    """Files of the packages that bench/compare/setup.sh installs: `make interop-peers`."""

    def convert_deepspeed(self, stage):
        expected = on_ranks(run_deepspeed, stage, str(self.path / "python"), 3, 3)
        self.convert(self.path / "python", self.path / "ours", "--trust")
        self.assert_close(self.go_on(self.path / "ours", 2, 3), expected[3:])
        return expected

    def test_deepspeed_zero_2_and_universal(self):
        expected = self.convert_deepspeed(2)
        universal = self.path / "universal"
        self.run_words(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", self.path / "python/here",
                       "--output_folder", universal, "--num_extract_workers", 1, "--num_merge_workers", 1, "--inject_missing_state")
        self.convert(universal, self.path / "ours2", "--trust")
        self.assert_close(self.go_on(self.path / "ours2", 2, 3), expected[3:])

    def test_deepspeed_zero_3(self):
        self.convert_deepspeed(3)

    def test_fairscale(self):
        for number, work in enumerate((run_fairscale_oss, run_fairscale_fsdp)):
            with self.subTest(work=work.__name__):
                file = self.path / f"file{number}.pt"
                expected = on_ranks(work, str(file), 3, 3)
                if work is run_fairscale_fsdp:
                    expected = on_ranks(work, None, 3, 3)
                self.convert(file, self.path / f"ours{number}", "--trust", "--optimizer-kind", "AdamW")
                self.assert_close(self.go_on(self.path / f"ours{number}", 2, 3), expected[3:])


if __name__ == "__main__":
    COMMAND = str(pathlib.Path(sys.argv.pop(2)).resolve())
    PROGRAM = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main(verbosity=2)
