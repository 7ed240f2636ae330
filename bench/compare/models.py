"""The models, values and data of bench/train_step, for Python's wrappers.

    tools/python.sh bench/compare/models.py llama llama.pt2  # writes the archive that train_step trains

Parameters and data are the same function of (index of the parameter, index of the element) as in bench/train_step, so both
programs start from the same bits, whatever their random generators.
"""
import math
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

DATA_STREAM = 1 << 20  # streams from here on are data, lower ones parameters
SIZES = {  # batch of a rank, layers, width
    "gpt": (4, 6, 384),
    "deep": (8, 48, 512),
    "recipe": (20, 20, 2000),
    "mlp": (16, 2, 256),
    "llama": (4, 8, 384),
    "gpt2": (1, 12, 768),
}
# Models of transformers, which our program trains from an archive: class of a layer, tokens in the vocabulary.
ARCHIVES = {"llama": ("LlamaDecoderLayer", 1000), "gpt2": ("GPT2Block", 50257)}


class CausalSelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x):  # [B, T, width] -> [B, T, width]
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.projection = nn.Linear(4 * width, width)

    def forward(self, x):
        attended = x + self.attention(self.attention_norm(x))
        return attended + self.projection(F.gelu(self.expand(self.mlp_norm(attended)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, vocabulary, layers, width, heads, context):
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, targets):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Chain(nn.Module):
    """A chain of linear layers, with or without ReLU between them."""

    def __init__(self, widths, relu, loss):
        super().__init__()
        self.relu, self.loss = relu, loss
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))

    def forward(self, x, targets):
        for layer in self.layers:
            x = layer(x)
            if self.relu:
                x = x.relu()
        return self.loss(x, targets)


class LossOf(nn.Module):
    """A causal language model of transformers, with its loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def of_transformers(name, layers, width):
    import transformers

    vocabulary = ARCHIVES[name][1]
    if name == "llama":
        config = transformers.LlamaConfig(vocab_size=vocabulary, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=layers,
                                          num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=1024)
    else:  # dropout would draw different numbers in both programs
        config = transformers.GPT2Config(vocab_size=vocabulary, n_embd=width, n_layer=layers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return LossOf(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))


def hashed(stream, numel):
    """`numel` numbers in [-1, 1), as doubles."""
    with np.errstate(over="ignore"):
        x = np.arange(numel, dtype=np.uint32) + np.uint32(stream * 0x9E3779B1 & 0xFFFFFFFF)
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x85EBCA6B)
        x ^= x >> np.uint32(13)
        x *= np.uint32(0xC2B2AE35)
        x ^= x >> np.uint32(16)
    return x.astype(np.float64) / 2147483648.0 - 1.0


def values(shape, stream, scale, shift=0.0):
    numbers = hashed(stream, math.prod(shape)) * scale + shift
    return torch.from_numpy(numbers.astype(np.float32)).view(shape)


def choices(shape, stream, count):
    numbers = (hashed(stream, math.prod(shape)) + 1) / 2 * count
    return torch.from_numpy(numbers.astype(np.int64)).view(shape)


def make_model(args):
    if args.model == "gpt":
        model = Gpt(args.vocabulary, args.layers, args.width, args.heads, args.context)
    elif args.model in ARCHIVES:
        model = of_transformers(args.model, args.layers, args.width)
    elif args.model == "mlp":
        model = Chain([256, 128, 10], True, F.cross_entropy)
    else:
        model = Chain([args.width] * (args.layers + 1), args.model == "deep", F.mse_loss)
    with torch.no_grad():
        for stream, (name, parameter) in enumerate(model.named_parameters()):
            matrix = parameter.dim() == 2
            scale = math.sqrt((6.0 if args.model == "deep" else 3.0) / parameter.shape[1]) if matrix else 0.02
            shift = 1.0 if not matrix and name.endswith("weight") else 0.0
            parameter.copy_(values(tuple(parameter.shape), stream, scale, shift))
    return model


def make_batch(args, rank):
    stream = DATA_STREAM + 2 * rank
    if args.model == "gpt" or args.model in ARCHIVES:
        vocabulary = ARCHIVES[args.model][1] if args.model in ARCHIVES else args.vocabulary
        tokens = choices((args.batch, args.context + 1), stream, vocabulary)
        return tokens[:, : args.context], tokens[:, 1:]
    inputs = values((args.batch, args.width), stream, math.sqrt(3.0))
    if args.model == "mlp":
        return inputs, choices((args.batch,), stream + 1, 10)
    return inputs, values((args.batch, args.width), stream + 1, math.sqrt(3.0))


def unit_class(args):
    """The class of a unit: a block of gpt, a layer of transformers' models, each linear layer of the other models."""
    if args.model in ARCHIVES:
        import importlib

        package = f"transformers.models.{args.model}.modeling_{args.model}"
        return getattr(importlib.import_module(package), ARCHIVES[args.model][0])
    return Block if args.model == "gpt" else nn.Linear


def write_archive(name, path, context=128):
    batch, layers, width = SIZES[name]
    tokens, targets = torch.zeros(2, batch, context, dtype=torch.long).unbind()
    program = torch.export.export(of_transformers(name, layers, width).train(), (tokens, targets.clone()))
    torch.export.save(program, path)


if __name__ == "__main__":
    write_archive(*sys.argv[1:])
