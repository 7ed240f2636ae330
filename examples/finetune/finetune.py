"""The Python side of the example: before it, makes a small model and exports it; after it, loads what C++ has trained.

    tools/python.sh examples/finetune/finetune.py prepare OUT TEXT     OUT/model.pt2, OUT/initial (weights), OUT/ids.safetensors
    tools/python.sh examples/finetune/finetune.py check OUT            OUT/trained in transformers: the same logits?
"""

import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import export_model  # noqa: E402

LENGTH = 64
disable_progress_bar()  # the files are so small that they load at once


def prepare(out, text):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False, pad_token_id=0,
                         bos_token_id=1, eos_token_id=2)
    model = export_model.from_config(AutoModelForCausalLM, config)
    model.save_pretrained(out / "initial")
    batch, length = torch.export.Dim("batch", min=1, max=1024), torch.export.Dim("length", min=2, max=LENGTH)
    inputs = {name: torch.randint(3, 128, (2, 16)) for name in ("input_ids", "labels")}  # two tensors, not one twice
    inputs["attention_mask"] = torch.ones(2, 16, dtype=torch.long)
    program = export_model.export(model, inputs, {name: {0: batch, 1: length} for name in inputs})
    export_model.save(export_model.without_weights(program), out / "model.pt2")
    ids = torch.tensor(list(text.read_text("ascii", "ignore").encode()), dtype=torch.long).clamp(max=127)
    save_file({"ids": ids}, out / "ids.safetensors")
    print(f"{out}/model.pt2: {sum(p.numel() for p in model.parameters()):,} parameters, {len(ids):,} characters of text")


def check(out):
    config = out / "initial" / "config.json"
    (out / "trained" / "config.json").write_text(config.read_text())
    model, info = AutoModelForCausalLM.from_pretrained(out / "trained", output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"]:
        raise SystemExit(f"other names: {info}")
    ours = load_file(out / "logits.safetensors")
    with torch.no_grad():
        logits = model.eval()(ours["ids"]).logits
    difference = (logits - ours["logits"]).abs().max().item()
    print(f"transformers' logits of the trained model differ by at most {difference:.1e}")
    torch.testing.assert_close(logits, ours["logits"], rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder, pathlib.Path(sys.argv[3])) if sys.argv[1] == "prepare" else check(folder)
