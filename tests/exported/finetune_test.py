"""examples/finetune goes on from a checkpoint as if it had not stopped, and trains adapters (peft) beside a base that
stays as it is: `make interop` runs this.

    tools/python.sh --with peft tests/exported/finetune_test.py build/release/examples/finetune
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

import torch
from safetensors.torch import load_file, save_file

PROGRAM = ""
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import export_model  # noqa: E402

SETTINGS = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=64)


class Finetune(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self.temporary.name)
        save_file({"ids": 3 + torch.arange(2000) * 7 % 40}, self.folder / "ids.safetensors")

    def tearDown(self):
        self.temporary.cleanup()

    def export(self, *options):
        sets = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
        done = subprocess.run([sys.executable, ROOT / "tools/export_model.py", "config:llama", self.folder / "model.pt2",
                               *sets, *options], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)

    def train(self, out, *options):
        """The losses by step, and the trained model's values."""
        done = subprocess.run(
            [PROGRAM, "--archive", self.folder / "model.pt2", "--ids", self.folder / "ids.safetensors", "--out",
             self.folder / out, "--length", "16", "--sample", "16", "--log-every", "1", *options],
            capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
        return {int(line[1]): line[3] for line in lines}, load_file(self.folder / out / "trained/model.safetensors")

    def test_goes_on_as_if_it_had_not_stopped(self):
        self.export()
        for stage in ("3", "1"):
            options = ("--stage", stage, "--ranks", "2")
            losses, values = self.train("whole", *options, "--steps", "6")
            self.train("part", *options, "--steps", "3", "--checkpoint-every", "3")
            resumed, others = self.train("rest", *options, "--steps", "6", "--resume", self.folder / "part/checkpoint")
            self.assertEqual(resumed, {step: losses[step] for step in (4, 5, 6)})
            for name, value in values.items():
                self.assertTrue(torch.equal(value, others[name]), name)

    def test_adapters_train_beside_a_base_that_stays(self):
        import transformers

        self.export("--lora", "4", "--seed", "7")
        torch.manual_seed(7)  # the model that was exported, once more
        config = transformers.AutoConfig.for_model("llama", **SETTINGS)
        model = export_model.add_lora(export_model.from_config(transformers.AutoModelForCausalLM, config), 4, None)
        export_model.without_cache(model)
        before = {name: value.clone() for name, value in model.state_dict().items()}

        losses, trained = self.train("lora", "--ranks", "2", "--steps", "20", "--lr", "1e-2")
        self.assertLess(float(losses[20]), float(losses[1]))
        self.assertEqual(set(trained), set(before))
        for name, value in trained.items():
            self.assertNotEqual(torch.equal(value, before[name]), ".lora_" in name, name)

        model.load_state_dict(trained)
        ours = load_file(self.folder / "lora/logits.safetensors")
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(ours["ids"]).logits, ours["logits"], rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    PROGRAM = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main(verbosity=2)
