#!/usr/bin/env python3
"""Exports a model of Python's to an archive that tessera::load_exported() trains: docs/exported.md.

    tools/python.sh tools/export_model.py gpt2 gpt2.pt2                        a model of the Hugging Face hub
    tools/python.sh tools/export_model.py ./llama llama.pt2 --dtype bfloat16   a folder of save_pretrained()
    tools/python.sh tools/export_model.py config:llama tiny.pt2 --set hidden_size=64 --set num_hidden_layers=2
    tools/python.sh tools/export_model.py my_models:make_net net.pt2           any torch.nn.Module

The last is a function of no arguments, in a module that Python can import, that returns the model, its inputs (a tuple,
or a dictionary by name) and, if it likes, dynamic_shapes as torch.export.export takes them; without them every tensor's
first dimension is the batch.
"""

import argparse
import contextlib
import copy
import importlib
import inspect
import json
import os
import sys
import warnings

import torch

TASKS = {  # --task: transformers' class, and what it is given
    "causal-lm": ("AutoModelForCausalLM", ("input_ids", "attention_mask", "labels")),
    "masked-lm": ("AutoModelForMaskedLM", ("input_ids", "attention_mask", "labels")),
    "seq2seq-lm": ("AutoModelForSeq2SeqLM", ("input_ids", "attention_mask", "decoder_input_ids", "labels")),
    "sequence-classification": ("AutoModelForSequenceClassification", ("input_ids", "attention_mask", "label")),
    "image-classification": ("AutoModelForImageClassification", ("pixel_values", "label")),
    "base": ("AutoModel", ("input_ids", "attention_mask")),
}


def example(name, config, batch, sequence):
    """An input of the task, and the names of its dynamic dimensions. No two inputs may be one tensor: torch.export
    would take them for one input."""
    text = getattr(config, "text_config", config)
    if name in ("input_ids", "decoder_input_ids", "labels"):
        dimension = "target_sequence" if name != "input_ids" and config.is_encoder_decoder else "sequence"
        return torch.randint(3, text.vocab_size, (batch, sequence)), ("batch", dimension)
    if name == "attention_mask":
        return torch.ones(batch, sequence, dtype=torch.long), ("batch", "sequence")
    if name == "label":
        return torch.zeros(batch, dtype=torch.long), ("batch",)
    size = config.image_size if isinstance(config.image_size, (list, tuple)) else (config.image_size,) * 2
    return torch.randn(batch, getattr(config, "num_channels", 3), *size), ("batch",)


def implementations(config, attention="sdpa"):
    """Those of transformers without operators of its own, which a C++ program does not have, and without branches on
    data, which torch.export cannot follow."""
    options = {"attn_implementation": attention}
    if any("expert" in key for key in getattr(config, "text_config", config).to_dict()):
        options["experts_implementation"] = "batched_mm"
    return options


def from_config(automatic, config, attention="sdpa"):
    options = implementations(config, attention)
    config.architectures = config.architectures or []  # where there are several, it looks for one in this list
    try:
        return automatic.from_config(copy.deepcopy(config), **options)
    except ValueError as error:  # not every architecture has a choice of attention
        if "attn_implementation" not in str(error) and "attention implementation" not in str(error):
            raise
        del options["attn_implementation"]
        return automatic.from_config(config, **options)


def without_cache(model):
    """Keys and values of earlier calls are for generating, and are no tensors."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False


def hugging_face(arguments):
    """The model, its inputs by name and their dynamic dimensions by name."""
    import transformers

    settings = {}
    for setting in arguments.set:
        key, value = setting.split("=", 1)
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    if arguments.model.startswith("config:"):
        config = transformers.AutoConfig.for_model(arguments.model.removeprefix("config:"), **settings)
    else:
        config = transformers.AutoConfig.from_pretrained(arguments.model, **settings)
    class_name, inputs = TASKS[arguments.task]
    automatic = getattr(transformers, class_name)
    if arguments.model.startswith("config:") or arguments.no_weights:
        model = from_config(automatic, config, arguments.attention)
    else:
        model = automatic.from_pretrained(arguments.model, config=config, dtype=torch.float32,
                                          **implementations(config, arguments.attention))
    without_cache(model)
    if arguments.no_labels:
        inputs = [name for name in inputs if not name.startswith("label")]
    given, dimensions = {}, {}
    for name in inputs:
        given["labels" if name == "label" else name], dimensions["labels" if name == "label" else name] = example(
            name, model.config, arguments.batch, arguments.sequence)
    limits = {"batch": arguments.max_batch, "sequence": arguments.max_sequence, "target_sequence": arguments.max_sequence}
    most = getattr(model.config, "max_position_embeddings", None)
    if most:
        limits["sequence"] = limits["target_sequence"] = min(arguments.max_sequence, most)
    dims = {name: torch.export.Dim(name, min=1, max=limit) for name, limit in limits.items()}
    shapes = {name: {i: dims[d] for i, d in enumerate(names) if d not in arguments.static}
              for name, names in dimensions.items()}
    return model, given, shapes


def from_function(path, arguments):
    module, function = path.split(":", 1)
    sys.path.insert(0, os.getcwd())
    made = getattr(importlib.import_module(module), function)()
    model, inputs, shapes = (*made, None)[:3]
    if shapes is None and "batch" not in arguments.static:
        batch = torch.export.Dim("batch", min=1, max=arguments.max_batch)
        dynamic = lambda value: {0: batch} if isinstance(value, torch.Tensor) and value.dim() > 0 else None
        shapes = ({name: dynamic(value) for name, value in inputs.items()} if isinstance(inputs, dict)
                  else tuple(dynamic(value) for value in inputs))
    return model, inputs, shapes


def add_lora(model, rank, targets):
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets or "all-linear"))


@contextlib.contextmanager
def named_inputs(model, names):
    """Gives forward(**kwargs) a parameter for each: torch.export takes no dynamic shapes of others."""
    forward, own = model.forward, model.__dict__.get("forward")
    parameters = inspect.signature(forward).parameters
    missing = [name for name in names if name not in parameters]
    if not missing:
        yield
        return
    kept = [p for p in parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]

    def named(*args, **kwargs):
        return forward(*args, **kwargs)

    named.__signature__ = inspect.Signature(
        kept + [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in missing])
    model.forward = named
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def export(model, inputs, shapes, *, train=True, decompose=False, strict=False):
    """torch.export of the model in train mode: dropout and batch norm can be switched off later, not on."""
    model.train(train)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (tuple(inputs), None)
    with warnings.catch_warnings(), named_inputs(model, kwargs or {}), backward_of_its_own() as found:
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=strict)
        except torch._dynamo.exc.UserError as error:
            if "Constraints violated" not in str(error):
                raise
            # It cannot prove something about all lengths (that 24 s <= 48 s, say): checked when the graph runs, instead.
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=strict,
                                          prefer_deferred_runtime_asserts_over_guards=True)
        if decompose or has_vmap(program):
            program = program.run_decompositions({})
    found |= functions_of(program)
    if found:
        check_gradients(model, program, args, kwargs or {}, found)
    return program


# ---- what torch.export loses -----------------------------------------------------------------------


def has_vmap(program):
    """torch.vmap leaves calls in a graph that cannot be saved, and that are gone when it is decomposed."""
    return any(getattr(node.target, "__module__", None) == "torch._functorch.predispatch" for node in program.graph.nodes)


@contextlib.contextmanager
def backward_of_its_own():
    """Names of what torch.export drops without a word while it traces: the backward of a torch.autograd.Function, in
    whose place the derivatives of its forward's operators come, and hooks on tensors."""
    found, register, before = set(), torch.Tensor.register_hook, sys.getprofile()
    function = torch.autograd.Function

    # Function.apply() ends in C, wherever somebody has kept it: replacing it would not do.
    def called(frame, event, callee):
        if event != "c_call" or callee.__name__ != "apply":
            return
        own = getattr(callee, "__self__", None)
        if isinstance(own, type) and issubclass(own, function) and not own.__module__.startswith("torch._"):
            found.add(f"{own.__name__} (torch.autograd.Function)")

    def hooked(self, hook):
        found.add("Tensor.register_hook")
        return register(self, hook)

    torch.Tensor.register_hook = hooked
    sys.setprofile(called)
    try:
        yield found
    finally:
        sys.setprofile(before)
        torch.Tensor.register_hook = register


def functions_of(program):
    """The same of a program that TorchDynamo has traced, which looks into Function.apply() itself."""
    nodes = (node for graph in program.graph_module.modules() if hasattr(graph, "graph") for node in graph.graph.nodes)
    return {"a torch.autograd.Function" for node in nodes if "autograd.Function" in str(node.meta.get("source_fn_stack"))}


def gradients_of(model, args, kwargs):
    """By name, of the mean squares of all results, with the numbers that one seed draws. Buffers stay what they were."""
    buffers = {name: tensor.detach().clone() for name, tensor in model.named_buffers()}
    cloned = lambda value: value.detach().clone() if isinstance(value, torch.Tensor) else value
    real = lambda tensor: torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        results = model(*map(cloned, args), **{name: cloned(value) for name, value in kwargs.items()})
    leaves = [real(leaf) for leaf in torch.utils._pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    loss = sum(leaf.float().pow(2).mean() for leaf in leaves if leaf.is_floating_point())
    trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    has_graph = isinstance(loss, torch.Tensor) and loss.requires_grad
    gradients = (torch.autograd.grad(loss, list(trained.values()), allow_unused=True) if has_graph
                 else [None] * len(trained))
    with torch.no_grad():
        for name, tensor in model.named_buffers():
            tensor.copy_(buffers[name])
    return {name: torch.zeros(()) if gradient is None else real(gradient).double()
            for name, gradient in zip(trained, gradients)}


def check_gradients(model, program, args, kwargs, found):
    expected, got = gradients_of(model, args, kwargs), gradients_of(program.module(), args, kwargs)
    for name, gradient in expected.items():
        difference = (gradient - got[name]).abs().max().item()
        scale, eps = gradient.abs().max().item(), torch.finfo(model.get_parameter(name).dtype).eps
        if not difference <= 16 * eps**0.5 * scale + 1e-6:
            raise ValueError(
                f"the gradient of '{name}' would be another: it differs by {difference:.3g}, of values up to {scale:.3g}. "
                f"The model uses {', '.join(sorted(found))}, whose backward torch.export does not keep. Write forward with "
                "operators that have the derivative: a straight-through estimator as x + (f(x) - x).detach(), say.")


# ---- archives ----------------------------------------------------------------------------------------


def ties(model):
    """Names of one tensor, for archives without values, which show it by shared memory otherwise."""
    names = {}
    for name, tensor in list(model.named_parameters(remove_duplicate=False)) + list(
            model.named_buffers(remove_duplicate=False)):
        names.setdefault(tensor, []).append(name)
    return {"tessera.json": json.dumps({"ties": [own for own in names.values() if len(own) > 1]})}


def without_weights(program):
    """The values of parameters and persistent buffers are left out: C++ reads them from elsewhere."""
    for name, tensor in program.state_dict.items():
        meta = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        program.state_dict[name] = torch.nn.Parameter(meta, tensor.requires_grad) if isinstance(
            tensor, torch.nn.Parameter) else meta
    return program


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name, a folder, config:<model type>, or module:function")
    parser.add_argument("archive", help="the file to write, *.pt2")
    parser.add_argument("--task", choices=TASKS, default="causal-lm")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the model's configuration")
    parser.add_argument("--no-labels", action="store_true", help="the result is logits, without a loss")
    parser.add_argument("--no-weights", action="store_true", help="leave out the weights (and do not download them)")
    parser.add_argument("--lora", type=int, metavar="RANK", help="freeze the model and add adapters (peft)")
    parser.add_argument("--lora-targets", nargs="*", metavar="NAME", help="which linear layers; all, if not given")
    parser.add_argument("--dtype", default="float32", help="in which the graph computes: float32, bfloat16, ...")
    parser.add_argument("--eval", action="store_true", help="without dropout, for good")
    parser.add_argument("--attention", default="sdpa", help="transformers' implementation: sdpa or eager")
    parser.add_argument("--batch", type=int, default=2, help="of the example; at least 2")
    parser.add_argument("--sequence", type=int, default=16, help="of the example")
    parser.add_argument("--max-batch", type=int, default=1024)
    parser.add_argument("--max-sequence", type=int, default=1 << 17)
    parser.add_argument("--static", nargs="*", default=[], help="dimensions that are fixed: batch, sequence")
    parser.add_argument("--strict", action="store_true", help="by TorchDynamo: finds what Python's tracing misses")
    parser.add_argument("--decompose", action="store_true", help="into core ATen operators")
    parser.add_argument("--seed", type=int, default=0, help="of values that are not read from anywhere")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    is_function = ":" in arguments.model and not arguments.model.startswith("config:")
    model, inputs, shapes = from_function(arguments.model, arguments) if is_function else hugging_face(arguments)
    if arguments.lora:
        model = add_lora(model, arguments.lora, arguments.lora_targets)
    dtype = getattr(torch, arguments.dtype)
    if dtype != torch.float32:
        model = model.to(dtype)
        cast = lambda value: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        inputs = ({name: cast(value) for name, value in inputs.items()} if isinstance(inputs, dict)
                  else tuple(cast(value) for value in inputs))
    program = export(model, inputs, shapes, train=not arguments.eval, decompose=arguments.decompose,
                     strict=arguments.strict)
    if arguments.no_weights:
        program = without_weights(program)
    torch.export.save(program, arguments.archive, extra_files=ties(model))
    numel = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{arguments.archive}: {type(model).__name__}, {numel:,} parameters, {trained:,} of them trained")


if __name__ == "__main__":
    main()
