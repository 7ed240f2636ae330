"""Makes the archives in tests/exported/data with Python's results: tools/python.sh tests/exported/make_data.py

Each NAME.pt2 has a NAME.safetensors: "input.*"; from a step in the mode of the export (seed 5, so that dropout draws
equal numbers) "output.*" by leaf, "grad.*" of the loss, and "buffer.*" afterwards; "eval.*" are eval()'s outputs.
Archives are rewritten without unused parts, to keep them small. llama.pt2 has no results: programs only train it.

`make_data.py --of-version` makes some of them again with the torch that runs it, as NAME_2.9 and so on: for the oldest
and the newest supported version, each in its own environment (torch==2.9.1 safetensors).
"""

import collections
import dataclasses
import json
import math
import pathlib
import subprocess
import sys
import zipfile

import torch
from safetensors.torch import save_file
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F
from torch.utils import _pytree as pytree

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from export_model import export, save, without_weights  # noqa: E402

DATA = ROOT / "tests/exported/data"
OF_VERSION = ("decoder", "norms", "control")
suffix = ""  # of file names, with --of-version


class Block(nn.Module):
    def __init__(self, width, heads, p):
        super().__init__()
        self.heads, self.p = heads, p
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.p if self.training else 0.0)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    """A language model with tied weights that computes its loss."""

    def __init__(self, p=0.1):
        super().__init__()
        self.embed, self.position = nn.Embedding(23, 12), nn.Embedding(16, 12)
        self.blocks = nn.ModuleList([Block(12, 2, p) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 23, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels=None):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Norms(nn.Module):
    """Batch norm, one of them frozen, dropout, a module called twice, and numbers from shapes."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.frozen = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.again, self.drop, self.fc = nn.Conv2d(4, 4, 1), nn.Dropout(0.25), nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("offset", torch.linspace(-1, 1, 4).view(4, 1, 1), persistent=False)

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x, *, weight=None, times=2):
        y = F.relu(self.norm(self.conv(x))) * self.scale + self.offset
        y = self.frozen(self.again(self.again(y)))
        y = self.drop(y).mean((2, 3)) * times
        rows = (x.shape[0] * 3 + 1) // 2 % 7
        return {"y": self.fc(y) if weight is None else self.fc(y) * weight, "rows": rows, "parts": (y * rows, None, 2.5)}


class Control(nn.Module):
    """Branches, modes, constants, operators in place."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x, counts):
        with torch.no_grad():
            size = x.abs().mean()
        table = torch.tensor([1.0, -2.0, 0.5, 3.0])
        y = torch.cond(size > 0.5, lambda v: self.a(v) * 2, lambda v: self.b(v), (x,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.a(y)
        self.steps.add_(1)
        counts.add_(y.shape[0])
        z = z.float().clone()
        z[:, 1] = 0
        z[0].mul_(2)
        return [z * table, y.sum(-1), torch.where(y > 0, y, 1)]


class Recurrent(nn.Module):
    """Loops over rows: with a carried state, also backwards, and a map that uses parameters. The initial state is a
    parameter, because torch 2.11's scan loses the gradients of one without a gradient."""

    def __init__(self):
        super().__init__()
        self.into, self.each, self.start = nn.Linear(4, 3), nn.Linear(3, 3), nn.Parameter(torch.randn(3))

    def forward(self, x):
        step = lambda carry, row: (carry * 0.5 + row.sin(), carry * row)
        last, products = scan(step, self.start, self.into(x), dim=0)
        back, sums = scan(lambda carry, row: (carry + row, carry + 1), last, products, reverse=True)
        return back, sums, map_rows(lambda row: self.each(row).tanh(), products)


class Energy(nn.Module):
    """An energy of pairs of points; its forces need second derivatives."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, positions):
        distances = (positions[:, :, None] - positions[:, None]).pow(2).sum(-1, keepdim=True)
        return self.last(torch.tanh(self.second(torch.tanh(self.first(distances))))).sum((1, 2, 3))


class Adapted(nn.Module):
    """A frozen layer with a trained adapter."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@dataclasses.dataclass
class Parts:
    """A result class with a None field."""

    total: torch.Tensor
    unused: torch.Tensor | None
    rows: dict


torch.export.register_dataclass(Parts, serialized_type_name="make_data.Parts")


class Guarded(nn.Module):
    """Branches on sizes, which leave no trace in the graph, and structured results."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, y):
        z = self.a(x).sum() * 2 if x.shape[0] > y["rows"].shape[0] else self.b(x).sum()
        if math.ceil(x.shape[0] / 2) + 1 < max(y["rows"].shape[0], 9) and not x.shape[0] % 7 == 0:
            z = z + self.b(y["rows"]).mean()
        rows = collections.defaultdict(list)
        rows["b"].append(self.b(x))
        rows["a"].append(z * 3)
        return Parts(total=z, unused=None, rows=rows)


class DropPath(nn.Module):
    def forward(self, x):
        if not self.training:
            return x
        return x * (torch.rand(x.shape[0], 1) + 0.75).floor() / 0.75


class Random(nn.Module):
    """Things that train() and eval() cannot or should not switch: handwritten dropout, an always-on dropout, and batch
    norm in nested graphs."""

    def __init__(self):
        super().__init__()
        self.into, self.norm, self.path, self.noise = nn.Linear(4, 6), nn.BatchNorm1d(6), DropPath(), nn.Identity()
        self.noise.forward = lambda x: F.dropout(x, 0.5)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = self.norm(self.into(x))
        return self.noise(self.path(y))


def loss_of(outputs):
    """The model's loss, or the mean squares of all differentiable outputs."""
    if isinstance(outputs, dict) and "loss" in outputs:
        return outputs["loss"]
    leaves = [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return sum(leaf.float().pow(2).mean() for leaf in leaves)


def expectations(model, inputs, training=True):
    """The model's results for the inputs: see above."""
    tensors = {f"input.{name}": value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    tensors |= {f"input.{name}.{key}": tensor.clone() for name, value in inputs.items() if isinstance(value, dict)
                for key, tensor in value.items()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.train(training)
    model.zero_grad()
    torch.manual_seed(5)
    given = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    outputs = model(**given)
    loss = loss_of(outputs)
    loss.backward()
    tensors["loss"] = loss.detach()
    for i, leaf in enumerate(pytree.tree_leaves(outputs)):
        if isinstance(leaf, torch.Tensor):
            tensors[f"output.{i}"] = leaf.detach()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tensors[f"grad.{name}"] = parameter.grad
    for name, buffer in model.named_buffers():
        tensors[f"buffer.{name}"] = buffer
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and not torch.equal(value, inputs[name]):
            tensors[f"mutated.{name}"] = value
    tensors = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        for i, leaf in enumerate(pytree.tree_leaves(model(**{n: v.clone() if isinstance(v, torch.Tensor) else v
                                                             for n, v in inputs.items()}))):
            if isinstance(leaf, torch.Tensor):
                tensors[f"eval.{i}"] = leaf.contiguous().clone()
    model.load_state_dict(state)
    return tensors


def shrink(path):
    """Removes parts that only Python reads: sample inputs, most metadata of nodes, shapes of inner values."""
    def shrink_graph(graph, kept):
        names = {next(iter(i.values())).get("name") for i in graph["inputs"] if isinstance(next(iter(i.values())), dict)}
        graph["tensor_values"] = {n: m for n, m in graph["tensor_values"].items() if n in names} if kept else {}
        for node in graph["nodes"]:
            metadata = node["metadata"]
            trace = metadata.get("stack_trace", "")
            last = trace[trace.rfind('File "'):].replace(str(ROOT) + "/", "") if trace else ""
            node["metadata"] = {k: v for k, v in {"nn_module_stack": metadata.get("nn_module_stack", ""),
                                                  "stack_trace": last}.items() if v}
            for entry in node["inputs"]:
                if "as_graph" in entry["arg"]:
                    shrink_graph(entry["arg"]["as_graph"]["graph"], False)

    with zipfile.ZipFile(path) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members:
            if "sample_inputs" in name or "/.data/" in name:
                continue
            if name.endswith("models/model.json"):
                program = json.loads(data)
                shrink_graph(program["graph_module"]["graph"], True)
                data = json.dumps(program, separators=(",", ":")).encode()
            info = zipfile.ZipInfo(name)  # dated 1980, so that the bytes are reproducible
            archive.writestr(info, data)


def make(name, model, inputs, shapes, *, weights=True, training=True, **options):
    if suffix and name not in OF_VERSION:
        return
    name += suffix
    tensors = expectations(model, inputs, training)
    program = export(model, inputs, shapes, train=training, **options)
    if not weights:
        save_file({n: t.contiguous().clone() for n, t in model.state_dict().items()}, DATA / f"{name}_weights.safetensors")
        program = without_weights(program)
    path = DATA / f"{name}.pt2"
    save(program, path)
    shrink(path)
    save_file(tensors, DATA / f"{name}.safetensors")
    print(f"{path.name}: {path.stat().st_size:,} bytes")


def make_llama():
    """The archive of the guide's command, of a tiny model. The documentation's snippets train it (tests/readme)."""
    path = DATA / "llama.pt2"
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 32}
    settings = [f"--set={name}={size}" for name, size in sizes.items()]
    subprocess.run([sys.executable, ROOT / "tools/export_model.py", "config:llama", path, "--no-weights", *settings],
                   check=True)
    shrink(path)


def main():
    global suffix
    if "--of-version" in sys.argv:
        suffix = "_" + ".".join(torch.__version__.split(".")[:2])
    DATA.mkdir(exist_ok=True)
    torch.manual_seed(1)
    batch, length = torch.export.Dim("batch", min=2, max=8), torch.export.Dim("length", min=2, max=16)
    text = {"ids": {0: batch, 1: length}, "labels": {0: batch, 1: length}}
    ids, labels = torch.randint(0, 23, (4, 6)), torch.randint(0, 23, (4, 6))
    make("decoder", Decoder(), {"ids": ids, "labels": labels}, text)
    make("decoder_meta", Decoder(p=0.0), {"ids": ids, "labels": labels}, text, weights=False)
    images = {"x": torch.randn(4, 2, 5, 5), "weight": None, "times": 2}
    shapes = {"x": {0: batch}, "weight": None, "times": None}
    torch.manual_seed(2)
    norms = Norms()
    make("norms", norms, images, shapes)
    make("norms_decomposed", norms, images, shapes, decompose=True)
    make("norms_eval", norms, images, shapes, training=False)
    control = {"x": torch.randn(3, 4), "counts": torch.zeros(2, dtype=torch.long)}
    make("control", Control(), control, {"x": {0: batch}, "counts": None})
    make("energy", Energy(), {"positions": torch.randn(3, 4, 2)}, {"positions": {0: batch}})
    make("adapted", Adapted(), {"x": torch.randn(3, 6)}, {"x": {0: batch}})
    make("adapted_bf16", Adapted().to(torch.bfloat16), {"x": torch.randn(3, 6).to(torch.bfloat16)}, {"x": {0: batch}})
    torch.manual_seed(3)
    make("norms_eval_decomposed", norms, images, shapes, training=False, decompose=True)
    auto = {0: torch.export.Dim.AUTO}
    make("guarded", Guarded(), {"y": {"rows": torch.randn(3, 4)}, "x": torch.randn(5, 4)}, {"y": {"rows": auto}, "x": auto})
    make("random", Random(), {"x": torch.randn(6, 4)}, {"x": {0: batch}})
    make("recurrent", Recurrent(), {"x": torch.randn(3, 4)}, {"x": {0: batch}})
    if not suffix:
        make_llama()


if __name__ == "__main__":
    main()
