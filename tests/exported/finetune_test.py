"""Tests examples/finetune: it resumes from a checkpoint bit for bit, trains adapters (peft) beside a frozen base, and
trains GPT-2 on padded examples as Python does. `make interop` runs this.

    tools/python.sh --with peft tests/exported/finetune_test.py build/release/examples/finetune
"""

import contextlib
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

import torch
from safetensors.torch import load_file, save_file

PROGRAM = ""
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import export_model  # noqa: E402

SETTINGS = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=64)


def export_error(folder, *arguments):
    """Runs tools/export_model.py in `folder` and in this process, because torch and transformers take 8 s to import.
    Returns the text of its error, or None."""
    with (contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()),
          unittest.mock.patch.object(sys, "argv", ["export_model.py", *map(str, arguments)])):
        try:
            return export_model.main()
        except SystemExit as error:
            return error.code


class Finetune(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self.temporary.name)
        save_file({"ids": 3 + torch.arange(2000) * 7 % 40}, self.folder / "ids.safetensors")

    def tearDown(self):
        self.temporary.cleanup()

    def export(self, *options, model="config:llama", settings=SETTINGS):
        sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        self.assertIsNone(export_error(self.folder, model, self.folder / "model.pt2", *sets, *options))

    def train(self, out, *options):
        """Returns the losses by step, and the trained model's values."""
        done = subprocess.run(
            [PROGRAM, "--archive", self.folder / "model.pt2", "--out", self.folder / out, "--length", "16", "--sample", "16",
             "--log-every", "1", *(() if "--rows" in options else ("--ids", self.folder / "ids.safetensors")), *options],
            capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.computed = done.stdout.splitlines()[0]
        self.assertEqual(len(done.stdout.splitlines()[-1].split()), 8 + 16)  # half of a window, and the sample
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
        return {int(line[1]): line[3] for line in lines}, load_file(self.folder / out / "trained/model.safetensors")

    def test_token_files_of_another_form_are_refused(self):
        rows = {name: torch.ones(3, 16, dtype=torch.long) for name in ("input_ids", "attention_mask", "labels")}
        for changed, error in ((dict(labels=rows["labels"][:2]), "'labels' is [2, 16], and 'input_ids' [3, 16]"),
                               (dict(labels=rows["labels"].int()), "'labels' is Int [3, 16], expected Long"),
                               (dict(input_ids=torch.tensor(3)), "'input_ids' is Long [], expected Long with a dim() of 2")):
            save_file({**rows, **changed}, self.folder / "rows.safetensors")
            done = subprocess.run([PROGRAM, "--archive", "none.pt2", "--out", self.folder / "out", "--ranks", "1", "--rows",
                                   self.folder / "rows.safetensors"], capture_output=True, text=True)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(f"rows.safetensors: {error}", done.stderr)

    def test_refused_exports_end_in_one_line(self):
        (self.folder / "models.py").write_text(
            "import torch\ndef net(): return torch.nn.Linear(2, 2)\n"
            "def hooked():\n    net = torch.nn.Linear(2, 2)\n"
            "    net.weight.register_post_accumulate_grad_hook(print)\n    return net, (torch.ones(2, 2),)\n")
        for model, archive, options, reason in (
                ("models:net", "m.pt2", (), "'models:net' returned Linear, expected the model, its inputs"),
                ("models:hooked", "m.pt2", (), "the parameter 'weight' has a hook"),
                ("models:none", "m.pt2", (), "the module 'models' has no function 'none'"),
                ("none.deep:net", "m.pt2", (), "there is no module 'none.deep'"),
                ("config:none", "m.pt2", (), "config:none: Unrecognized model identifier"),
                ("config:llama", "none/m.pt2", (), "expected a file in a folder that exists"),
                ("config:llama", "m.pt2", ("--dtype", "Tensor"), "--dtype Tensor: expected a floating-point type"),
                ("config:llama", "m.pt2", ("--set", "layers"), "--set layers: expected KEY=VALUE"),
                ("config:llama", "m.pt2", ("--batch", "1"), "--batch is 1, expected 2 or more"),
                ("config:llama", "m.pt2", ("--static", "width"), "--static width: expected batch or sequence")):
            error = export_error(self.folder, model, archive, *options)
            self.assertTrue(error.startswith("export_model.py: "), error)
            self.assertIn(reason, error)
            self.assertFalse((self.folder / "m.pt2").exists())

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

    def test_computes_in_the_precision_that_is_asked(self):
        self.export()
        for stage in ("1", "3"):
            options = ("--stage", stage, "--ranks", "2", "--steps", "4", "--lr", "1e-2")
            exact, _ = self.train("fp32", *options)
            self.assertEqual(self.computed, "cpu, fp32")
            for dtype in ("bf16", "fp16"):
                rounded, values = self.train(dtype, *options, "--dtype", dtype)
                self.assertEqual(self.computed, f"cpu, {dtype}, parameters and optimizer fp32")
                self.assertNotEqual(rounded, exact)
                for step, loss in rounded.items():
                    self.assertAlmostEqual(float(loss), float(exact[step]), delta=0.02)
                self.assertTrue(all(value.dtype == torch.float32 for value in values.values()))
                again, _ = self.train("again", *options, "--dtype", dtype, "--checkpoint-activations")
                self.assertEqual(again, rounded)
        half = ("--stage", "3", "--ranks", "2", "--dtype", "fp16")
        whole, _ = self.train("whole", *half, "--steps", "4")
        self.train("part", *half, "--steps", "2", "--checkpoint-every", "2")
        resumed, _ = self.train("rest", *half, "--steps", "4", "--resume", self.folder / "part/checkpoint")
        self.assertEqual(resumed, {step: whole[step] for step in (3, 4)})

    def test_help_shows_the_defaults(self):
        done = subprocess.run([PROGRAM, "--help"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0)
        for default in ("--stage N (=3)", "--steps N (=200)", "--lr N (=0.001)", "LlamaDecoderLayer"):
            self.assertIn(default, done.stdout)

    def test_mistakes_name_the_option(self):
        for option, value, message in (("--dtype", "int8", "--dtype must be fp32, bf16 or fp16, got 'int8'"),
                                       ("--ranks", "0", "--ranks must be at least 1, got 0"),
                                       ("--stage", "4", "--stage must be at most 3, got 4"),
                                       ("--lr", "nan", "--lr must be a number of at least 0, got nan"),
                                       ("--resume", "", "--resume is empty"),
                                       ("--rows", "r", "give --ids or --rows, one of both")):
            done = subprocess.run([PROGRAM, "--archive", "a", "--out", "b", "--ids", "i", option, value],
                                  capture_output=True, text=True)
            self.assertEqual(done.returncode, 2)
            self.assertIn(message, done.stderr)

    def test_adapters_train_beside_a_base_that_stays(self):
        import transformers

        self.export("--lora", "4", "--seed", "7")
        torch.manual_seed(7)  # the exported model, rebuilt
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
        same = dict(rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(ours["ids"]).logits, ours["logits"], **same)

        # peft loads the adapters onto its own base.
        import peft

        torch.manual_seed(7)
        base = export_model.from_config(transformers.AutoModelForCausalLM, config)
        base.save_pretrained(self.folder / "base")
        opened = peft.PeftModel.from_pretrained(base, str(self.folder / "lora/trained"))
        with torch.no_grad():
            torch.testing.assert_close(opened.eval()(ours["ids"]).logits, ours["logits"], **same)

        # The base is the folder of save_pretrained(), with its names from before the adapters.
        self.export("--lora", "4", "--no-weights", model=str(self.folder / "base"), settings={})
        losses, trained = self.train("folder", "--weights", self.folder / "base", "--ranks", "2", "--steps", "20", "--lr", "1e-2")
        self.assertLess(float(losses[20]), float(losses[1]))
        torch.manual_seed(7)
        fresh = export_model.from_config(transformers.AutoModelForCausalLM, config)
        opened = peft.PeftModel.from_pretrained(fresh, str(self.folder / "folder/trained"))
        ours = load_file(self.folder / "folder/logits.safetensors")
        with torch.no_grad():
            torch.testing.assert_close(opened.eval()(ours["ids"]).logits, ours["logits"], **same)
        # Resumes from its own file, with peft's names.
        again, _ = self.train("again", "--weights", self.folder / "folder/trained/model.safetensors", "--ranks", "1",
                              "--steps", "1", "--lr", "1e-9")
        self.assertLess(float(again[1]), float(losses[1]))

    def tokenized(self):
        """Examples of different lengths, from a tokenizer like those of the hub."""
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = "<end> in the beginning was word and with all things were made by him".split()
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(self.folder / "tokenizer")
        contexts = [" ".join(words[1 + (i * 5 + k * (1 + i % 3)) % 13] for k in range(3 + i * 7 % 20)) for i in range(19)]
        squad = {"data": [{"paragraphs": [{"context": context, "qas": []} for context in contexts]}]}
        (self.folder / "squad.json").write_text(json.dumps(squad))
        tool = [sys.executable, ROOT / "tools/tokenize_text.py", self.folder / "tokenizer"]
        subprocess.run([*tool, self.folder / "squad.json", self.folder / "rows.safetensors", "--length", "16"], check=True,
                       capture_output=True)
        rows = load_file(self.folder / "rows.safetensors")
        self.assertEqual(rows["input_ids"].shape, (19, 16))
        self.assertEqual((rows["labels"] == -100).sum(), (rows["attention_mask"] == 0).sum())
        self.assertGreater((rows["labels"] == -100).sum(), 0)
        decoded = subprocess.run([*tool, "--decode", "1", "2", "3"], check=True, capture_output=True, text=True)
        self.assertEqual(decoded.stdout.strip(), "in the beginning")
        return rows

    def test_gpt2_on_padded_examples_as_python_trains_it(self):
        import transformers

        settings = dict(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
                        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
        rows = self.tokenized()
        self.export("--seed", "3", model="config:gpt2", settings=settings)
        torch.manual_seed(3)  # the exported model, rebuilt
        config = transformers.AutoConfig.for_model("gpt2", **settings)
        model = export_model.from_config(transformers.AutoModelForCausalLM, config)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        expected, ranks, batch, steps = {}, 2, 4, 6
        for step in range(steps):  # averages gradients over ranks, as DistributedDataParallel does
            losses = []
            for rank in range(ranks):
                chosen = (torch.arange(batch) + (step * ranks + rank) * batch) % 19
                losses.append(model(**{name: value[chosen] for name, value in rows.items()}).loss)
            optimizer.zero_grad()
            (sum(losses) / ranks).backward()
            optimizer.step()
            expected[step + 1] = (sum(losses) / ranks).item()
        self.assertLess(expected[steps], expected[1] - 0.1)
        for stage in ("1", "2", "3"):
            losses, trained = self.train(
                f"rows{stage}", "--rows", self.folder / "rows.safetensors", "--classes", "GPT2Block", "--stage", stage,
                "--ranks", str(ranks), "--batch", str(batch), "--steps", str(steps), "--lr", "3e-3", "--weight-decay", "0")
            for step, loss in expected.items():
                self.assertAlmostEqual(float(losses[step]), loss, delta=1.5e-4, msg=f"stage {stage}, step {step}")
            values = model.state_dict()
            for name, value in trained.items():
                torch.testing.assert_close(value, values[name], rtol=1e-3, atol=1e-4, msg=lambda text: f"{name}: {text}")


if __name__ == "__main__":
    PROGRAM = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main(verbosity=2)
