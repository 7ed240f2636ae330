"""Python reads files that Tessera wrote, and the reverse: `make interop` runs this.

    tools/python.sh tests/interop/interop_test.py build/release/tests/interop/interop_program
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from transformers import GPT2Config, GPT2LMHeadModel

PROGRAM = ""


def program(*words):
    subprocess.run([PROGRAM, *map(str, words)], check=True)


class Interop(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name)

    def tearDown(self):
        self.folder.cleanup()

    def assert_same(self, got, expected):
        self.assertEqual(sorted(got), sorted(expected))
        for name, tensor in expected.items():
            self.assertEqual(got[name].dtype, tensor.dtype, name)
            self.assertTrue(torch.equal(got[name], tensor), name)

    def test_safetensors_reads_every_slice(self):
        program("save", self.path)
        whole = load_file(self.path / "whole.safetensors")
        self.assertEqual(whole["permuted"].shape, (4, 5, 6))
        seen = {name: torch.zeros_like(tensor, dtype=torch.int32) for name, tensor in whole.items()}
        for file in sorted((self.path / "checkpoint").glob("*.safetensors")):
            with safe_open(file, "pt") as slices:
                places = json.loads(slices.metadata()["DCP_SHARDING_INFO"])
                for name in slices.keys():
                    tensor = slices.get_tensor(name)
                    box = tuple(slice(o, o + n) for o, n in zip(places[name]["saved_offsets"], tensor.shape))
                    if name in whole:
                        self.assertTrue(torch.equal(whole[name][box], tensor), f"{name} in {file}")
                        seen[name][box] += 1
        for name, count in seen.items():
            self.assertTrue(bool((count == 1).all()), f"{name}: each element once")
        manifest = json.loads((self.path / "checkpoint/tessera.json").read_text())
        self.assertEqual(manifest["world_size"], 3)
        self.assertEqual(manifest["extra"], {"step": 3})
        self.assertEqual(manifest["optimizer"]["numbers"]["first.weight"]["step"], 1)

    def test_torch_distributed_checkpoint_reads_a_checkpoint(self):
        program("save", self.path)
        whole = load_file(self.path / "whole.safetensors")
        reader = HuggingFaceStorageReader(str(self.path / "checkpoint"))
        saved = reader.read_metadata().state_dict_metadata
        state = {name: torch.full(list(entry.size), -1, dtype=entry.properties.dtype) for name, entry in saved.items()}
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(self.path / "checkpoint")))
        self.assert_same({name: state[name] for name in whole}, whole)
        moments = state["optim.exp_avg.first.weight"]
        self.assertEqual(moments.shape, (11, 7))
        self.assertTrue(bool((moments > 0.05).all()), "each rank's part of the first moment")

    def test_we_load_what_torch_distributed_checkpoint_wrote(self):
        program("save", self.path)
        whole = load_file(self.path / "whole.safetensors")
        changed = {name: tensor + 1 for name, tensor in whole.items()}
        index = {name: 1 + i % 2 for i, name in enumerate(sorted(changed))}
        for number, options in enumerate(({}, {"fqn_to_index_mapping": index}, {"save_distributed": True})):
            with self.subTest(options=options):
                target = self.path / f"torch{number}"
                dcp.save(changed, storage_writer=HuggingFaceStorageWriter(str(target), **options))
                program("load", target, self.path / "again.safetensors")
                self.assert_same(load_file(self.path / "again.safetensors"), changed)

    def check_logits(self, model, file):
        ours = load_file(file)
        with torch.no_grad():
            logits = model.eval()(ours["tokens"]).logits
        torch.testing.assert_close(logits, ours["logits"], rtol=1e-4, atol=1e-5)

    def test_transformers_loads_our_gpt2(self):
        for command in ("export-gpt2", "export-tied-gpt2"):
            with self.subTest(command=command):
                program(command, self.path)
                model, info = GPT2LMHeadModel.from_pretrained(self.path, output_loading_info=True)
                self.assertFalse(info["missing_keys"] or info["unexpected_keys"], info)
                self.check_logits(model, self.path / "logits.safetensors")
                program("import-gpt2", self.path, self.path / "imported.safetensors")
                self.check_logits(model, self.path / "imported.safetensors")

    def test_we_load_a_gpt2_of_transformers(self):
        for tied in (True, False):
            with self.subTest(tied=tied):
                torch.manual_seed(3)
                config = GPT2Config(vocab_size=53, n_positions=16, n_embd=20, n_layer=2, n_head=5, tie_word_embeddings=tied,
                                    bos_token_id=0, eos_token_id=0)
                model = GPT2LMHeadModel(config)
                model.save_pretrained(self.path)
                program("import-gpt2", self.path, self.path / "imported.safetensors")
                self.check_logits(model, self.path / "imported.safetensors")


    def test_we_load_a_gpt2_with_other_scales_and_write_nothing_beside_it(self):
        for number, other in enumerate(({"layer_norm_epsilon": 0.3}, {"scale_attn_weights": False},
                                        {"scale_attn_by_inverse_layer_idx": True})):
            with self.subTest(other=other):
                torch.manual_seed(3)
                config = GPT2Config(vocab_size=53, n_positions=16, n_embd=20, n_layer=3, n_head=5, bos_token_id=0,
                                    eos_token_id=0, attn_implementation="eager", initializer_range=0.4, **other)
                model = GPT2LMHeadModel(config).to(torch.bfloat16)
                source = self.path / f"source{number}"
                model.save_pretrained(source)
                before = {file.name: file.stat().st_mtime_ns for file in source.iterdir()}
                source.chmod(0o555)
                program("import-gpt2", source, self.path / "imported.safetensors")
                self.assertEqual({file.name: file.stat().st_mtime_ns for file in source.iterdir()}, before)
                self.check_logits(model.to(torch.float32), self.path / "imported.safetensors")


if __name__ == "__main__":
    PROGRAM = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main(verbosity=2)
