#!/usr/bin/env python3
"""Exports a Python model to an archive that tessera::load_exported() trains: docs/exported.md.

    tools/python.sh tools/export_model.py gpt2 gpt2.pt2                        a model of the Hugging Face hub
    tools/python.sh tools/export_model.py ./llama llama.pt2 --dtype bfloat16   a folder of save_pretrained()
    tools/python.sh tools/export_model.py config:llama tiny.pt2 --set hidden_size=64 --set num_hidden_layers=2
    tools/python.sh tools/export_model.py my_models:make_net net.pt2           any torch.nn.Module

The last is a function without arguments in an importable module. It returns the model, its inputs (a tuple, or a
dictionary by name) and optionally dynamic_shapes as torch.export.export takes them; without these, every tensor's first
dimension is the batch.
"""

import argparse
import contextlib
import copy
import importlib.util
import inspect
import json
import logging
import os
import sys
import warnings

try:
    import torch
except ModuleNotFoundError as error:
    sys.exit(f"export_model.py: {error}; call it as tools/python.sh tools/export_model.py ..., which has what it needs")

logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)  # it warns that there is no triton

TASKS = {  # --task: transformers' class, and its inputs
    "causal-lm": ("AutoModelForCausalLM", ("input_ids", "attention_mask", "labels")),
    "masked-lm": ("AutoModelForMaskedLM", ("input_ids", "attention_mask", "labels")),
    "seq2seq-lm": ("AutoModelForSeq2SeqLM", ("input_ids", "attention_mask", "decoder_input_ids", "labels")),
    "sequence-classification": ("AutoModelForSequenceClassification", ("input_ids", "attention_mask", "label")),
    "image-classification": ("AutoModelForImageClassification", ("pixel_values", "label")),
    "base": ("AutoModel", ("input_ids", "attention_mask")),
}


def example(name, config, batch, sequence):
    """Returns an input of the task, and the names of its dynamic dimensions. Each input must be a separate tensor, or
    torch.export merges them."""
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
    """Implementations of transformers without custom operators, which a C++ program lacks, and without branches on
    data, which torch.export cannot trace."""
    options = {"attn_implementation": attention}
    if any("expert" in key for key in getattr(config, "text_config", config).to_dict()):
        options["experts_implementation"] = "batched_mm"
    return options


def from_config(automatic, config, attention="sdpa"):
    options = implementations(config, attention)
    config.architectures = config.architectures or []  # it searches this list if there are several
    try:
        return automatic.from_config(copy.deepcopy(config), **options)
    except ValueError as error:  # some architectures have no choice of attention
        if "attn_implementation" not in str(error) and "attention implementation" not in str(error):
            raise
        del options["attn_implementation"]
        return automatic.from_config(config, **options)


def without_cache(model):
    """Removes the cache of keys and values, which is for generation and is not a tensor."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False


class Refused(ValueError):
    """A wrong argument, or a model that would train otherwise than in Python."""


def hugging_face(arguments):
    """Returns the model, its inputs by name, and their dynamic dimensions by name."""
    import transformers

    settings = {}
    for setting in arguments.set:
        key, separator, value = setting.partition("=")
        if not separator:
            raise Refused(f"--set {setting}: expected KEY=VALUE")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    try:
        if arguments.model.startswith("config:"):
            config = transformers.AutoConfig.for_model(arguments.model.removeprefix("config:"), **settings)
        else:
            config = transformers.AutoConfig.from_pretrained(arguments.model, **settings)
    except (OSError, ValueError) as error:
        raise Refused(f"{arguments.model}: {error}") from error
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
    try:
        is_there = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a part of the path is missing or is no package
        is_there = False
    if not is_there:
        raise Refused(f"there is no module '{module}' in {os.getcwd()} or in Python's path")
    make = getattr(importlib.import_module(module), function, None)
    if not callable(make):
        raise Refused(f"the module '{module}' has no function '{function}'")
    made = make()
    if not isinstance(made, (tuple, list)) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module) \
            or not isinstance(made[1], (tuple, list, dict)):
        raise Refused(f"'{path}' returned {type(made).__name__}, expected the model, its inputs (a tuple, or a dictionary by "
                      "name) and optionally dynamic_shapes")
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
    """Gives forward(**kwargs) named parameters, because torch.export supports dynamic shapes only for these."""
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
    """Runs torch.export in the model's train or eval mode. Facts that C++ needs and the program lacks are in its
    tessera_record, which save() stores."""
    model.train(train)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (tuple(inputs), None)
    positional = positional_names(model, args, kwargs or {})
    with warnings.catch_warnings(), named_inputs(model, kwargs or {}), backward_of_its_own() as found:
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=strict)
        except torch._dynamo.exc.UserError as error:
            if "Constraints violated" not in str(error):
                raise
            # Some facts cannot be proved for all lengths (24 s <= 48 s, for example): checks them when the graph runs.
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=strict,
                                          prefer_deferred_runtime_asserts_over_guards=True)
        decompose = decompose or has_vmap(program)
        if decompose:
            program = program.run_decompositions({})
    spell_out_casts(program)
    found |= functions_of(program) | hooks_of_parameters(model)
    if decompose:
        found.add("run_decompositions() (torch.no_grad and Tensor.detach)")
    if found:
        check_gradients(model, program, args, kwargs or {}, found)
    program.tessera_record = {"ties": ties(model), "positional": positional, "gradients": bool(found),
                              "modes": compare_modes(model, program, args, kwargs or {}, train)}
    return program


def spell_out_casts(program):
    """Makes casts explicit: torch.export leaves booleans that an assertion converts to integers, and cannot save them.
    """
    for graph in graphs_of(program.graph_module):
        for node in list(graph.graph.nodes):
            if getattr(node.target, "__name__", "") == "cast_symbool_to_symint_guardless":
                node.target, node.args = torch.sym_ite, (node.args[0], 1, 0)
        graph.recompile()


def save(program, path):
    torch.export.save(program, str(path), extra_files={"tessera.json": json.dumps(program.tessera_record)})


def positional_names(model, args, kwargs):
    """The inputs that forward() takes by position, in order, up to the first missing one."""
    names = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        takes = parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if not takes or (len(names) >= len(args) and name not in kwargs):
            break
        names.append(name)
    return names if len(names) >= len(args) else []


# ---- what torch.export loses -----------------------------------------------------------------------


def has_vmap(program):
    """Returns whether the graph has calls left by torch.vmap, which cannot be saved; decomposition removes them."""
    return any(getattr(node.target, "__module__", None) == "torch._functorch.predispatch" for node in program.graph.nodes)


@contextlib.contextmanager
def backward_of_its_own():
    """Names of objects that torch.export drops silently in tracing: the backward of a torch.autograd.Function, which it
    replaces by the derivatives of its forward, and hooks on tensors."""
    found, register, before = set(), torch.Tensor.register_hook, sys.getprofile()
    function = torch.autograd.Function

    # Function.apply() is implemented in C, and callers may keep a reference, so replacing it is not enough.
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
    """As above, for a program that TorchDynamo traced, which traces through Function.apply()."""
    nodes = (node for graph in program.graph_module.modules() if hasattr(graph, "graph") for node in graph.graph.nodes)
    return {"a torch.autograd.Function" for node in nodes if "autograd.Function" in str(node.meta.get("source_fn_stack"))}


def hooks_of_parameters(model):
    """Hooks that existed before tracing. Code that runs after a gradient is added to .grad, such as an optimizer's
    step, does not affect derivatives and is not compared."""
    found = set()
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise Refused(f"the parameter '{name}' has a hook of register_post_accumulate_grad_hook(), which torch.export "
                          "does not keep: remove it, and do in C++ what it does")
        if parameter._backward_hooks:
            found.add(f"Tensor.register_hook (of '{name}')")
    return found


@contextlib.contextmanager
def without_hooks(model):
    hooks = {parameter: parameter._backward_hooks for parameter in model.parameters() if parameter._backward_hooks}
    for parameter in hooks:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, own in hooks.items():
            parameter._backward_hooks = own


@contextlib.contextmanager
def kept_buffers(model):
    buffers = {name: tensor.detach().clone() for name, tensor in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in model.named_buffers():
                tensor.copy_(buffers[name])


def results_of(model, args, kwargs, seed=0):
    """The tensors of a call with random numbers from a seed. Does not change the inputs or the generator."""
    cloned = lambda value: value.detach().clone() if isinstance(value, torch.Tensor) else value
    args, kwargs = torch.utils._pytree.tree_map(cloned, (args, kwargs))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        results = model(*args, **kwargs)
    return [leaf for leaf in torch.utils._pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def tolerance(dtype):
    """For equal operators in another order, relative to the largest element."""
    return min(16 * torch.finfo(dtype).eps**0.5, 0.1)


def gradients_of(model, args, kwargs):
    """Gradients by name of the mean squares of all results. Does not change buffers."""
    real = lambda tensor: torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    with kept_buffers(model):
        return _gradients(model, [real(leaf) for leaf in results_of(model, args, kwargs)])


def _gradients(model, leaves):
    loss = sum(leaf.float().pow(2).mean() for leaf in leaves if leaf.is_floating_point())
    trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    has_graph = isinstance(loss, torch.Tensor) and loss.requires_grad
    gradients = (torch.autograd.grad(loss, list(trained.values()), allow_unused=True) if has_graph
                 else [None] * len(trained))
    return {name: torch.zeros(()) if gradient is None
            else (torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient).double()
            for name, gradient in zip(trained, gradients)}


def functional_batch_norm(x, weight, bias, mean, variance, training, momentum, eps):
    """Replaces _native_batch_norm_legit_functional, which has no derivative, as C++ does."""
    mean, variance = mean.clone(), variance.clone()
    return (*torch.ops.aten._native_batch_norm_legit(x, weight, bias, mean, variance, training, momentum, eps), mean, variance)


def module_of(program):
    """The program as a module, as C++ runs it, with its own copy of the graphs."""
    guarded = "check_guards" in inspect.signature(program.module).parameters  # since torch 2.9
    module = program.module(**({"check_guards": False} if guarded else {}))
    for name, inner in list(module.named_modules()):  # shared between program.module() and the program
        if name and isinstance(inner, torch.fx.GraphModule):
            parent, _, own = name.rpartition(".")
            setattr(module.get_submodule(parent), own, torch.fx.GraphModule(inner, copy.deepcopy(inner.graph)))
    for graph in graphs_of(module):
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten._native_batch_norm_legit_functional.default:
                node.target = functional_batch_norm
        graph.recompile()
    return module


def graphs_of(module):
    return [inner for inner in module.modules() if isinstance(inner, torch.fx.GraphModule)]


def check_gradients(model, program, args, kwargs, found):
    expected = gradients_of(model, args, kwargs)
    with without_hooks(model):  # the program shares its parameters
        got = gradients_of(module_of(program), args, kwargs)
    for name, gradient in expected.items():
        difference = (gradient - got[name]).abs().max().item()
        scale = gradient.abs().max().item()
        if not difference <= tolerance(model.get_parameter(name).dtype) * scale + 1e-6:
            raise Refused(
                f"the gradient of '{name}' would be another: it differs by {difference:.3g}, of values up to {scale:.3g}. "
                f"The model uses {', '.join(sorted(found))}, whose backward torch.export does not keep. Write forward with "
                "operators that have the derivative: a straight-through estimator as x + (f(x) - x).detach(), say; and "
                "leave out --decompose and torch.vmap, which asks for it, where there are stop-gradients.")


# ---- train() and eval() ------------------------------------------------------------------------------


def is_random(function, args=(), kwargs=None):
    """Returns whether a call of an operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
        return False
    value = lambda name: argument_of(function, args, kwargs or {}, name)
    return value("dropout_p") != 0 and value("train") is not False and value("training") is not False and value("p") != 0


def argument_of(function, args, kwargs, name):
    for i, argument in enumerate(function._schema.arguments):
        if argument.name == name:
            return kwargs[name] if name in kwargs else args[i] if i < len(args) else argument.default_value
    return None


@contextlib.contextmanager
def random_modules(model):
    """Collects the modules that draw random numbers, without their callers."""
    found, calls, states = set(), [], []  # of the generator, since the start of the model's call

    def note(change):
        if torch.compiler.is_compiling():  # a branch of torch.cond
            return
        state = torch.get_rng_state()
        if calls and not torch.equal(state, states[-1]):
            found.add(calls[-1])
        states[:] = [state]
        change()

    hooks = [hook for name, module in model.named_modules() for hook in (
        module.register_forward_pre_hook(lambda *_, own=name: note(lambda: calls.append(own)), prepend=True),
        module.register_forward_hook(lambda *_: note(calls.pop)))]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def module_path(node):
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0].split("@")[0].removeprefix("L['self'].") if stack else ""


SWITCHED = ("train", "training", "use_input_stats")  # arguments, as in exported/graph/operators.cpp


def switched_arguments(node):
    """The argument of a node that C++ switches: its index, and whether it is a probability."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name in SWITCHED or (argument.name == "dropout_p" and "scaled_dot_product" in str(node.target)):
            yield i, argument.name


def pinned_modules(model, train):
    """Modules that the model's own train() keeps in one mode (frozen batch norm, for example), with that mode."""
    modes = []
    for mode in (not train, train):
        model.train(mode)
        modes.append({name: module.training for name, module in model.named_modules()})
    return {name: mode for name, mode in modes[1].items() if modes[0][name] == mode}


def switch(module, train, always, pinned):
    """Applies the C++ module's train() or eval() to the graphs. Returns the other modules with random operators."""
    others = set()
    for graph in graphs_of(module):
        for node in graph.graph.nodes:
            own, is_switched = module_path(node), False
            if own in pinned:
                continue
            functional = node.target is functional_batch_norm
            for i, name in [(5, "training")] if functional else switched_arguments(node):
                is_switched = True
                value = node.args[i] if i < len(node.args) else node.kwargs.get(name)
                no_statistics = not functional and argument_of(node.target, node.args, node.kwargs, "running_mean") is None and (
                    any(argument.name == "running_mean" for argument in node.target._schema.arguments))
                is_kept = no_statistics or (own in always and (name == "dropout_p" or "dropout" in str(node.target)))
                if value is None or is_kept or (name == "dropout_p" and train):
                    continue
                new = 0.0 if name == "dropout_p" else train
                if i < len(node.args):
                    node.update_arg(i, new)
                else:
                    node.update_kwarg(name, new)
            if node.op == "call_function" and not is_switched and is_random(node.target, node.args, node.kwargs):
                others.add(own)
        graph.recompile()
    return others


def same_results(got, expected):
    if len(got) != len(expected):
        return False
    for a, b in zip(got, expected):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.is_floating_point() and not a.is_complex():
            if not torch.equal(a, b):
                return False
            continue
        scale = b.abs().max().item() if b.numel() else 0.0
        if not torch.allclose(a, b, rtol=0, atol=tolerance(a.dtype) * scale + 1e-6, equal_nan=True):
            return False
    return True


def compare_modes(model, program, args, kwargs, train):
    """Checks whether C++ gets the results of the model's other mode by switching dropout and batch norm; returns the
    modules where it does not. Skips models without values."""
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        return None
    other, pinned = not train, pinned_modules(model, train)

    def call(module, seed=0):
        with kept_buffers(module):
            return [leaf.clone() for leaf in results_of(module, args, kwargs, seed)]

    model.train(other)
    fixed, always = {}, set()
    try:
        with torch.no_grad():
            with random_modules(model) as drawn:
                call(model)
            switched = module_of(program)
            dropouts = {module_path(node) for graph in graphs_of(switched) for node in graph.graph.nodes
                        if list(switched_arguments(node)) and "batch_norm" not in str(node.target)}
            always = drawn & dropouts if train else set()
            others = switch(switched, other, always, pinned)
            seeds = (0, 1) if others or drawn else (0,)
            same = all(same_results(call(switched, seed), call(model, seed)) for seed in seeds)
    except Exception as error:  # noqa: BLE001: whatever a model does in the mode that was not asked for
        same, fixed = True, {"": f"it fails there in Python: {type(error).__name__}: {str(error)[:200]}"}
    finally:
        model.train(train)
    if not same and train:
        fixed = {name: "it draws random numbers, which Python's module does not in eval()" for name in sorted(others - drawn)}
    elif not same:
        fixed = {name: "it does not draw the random numbers that Python's module draws in train()" for name in sorted(drawn - dropouts)}
    if not same and not fixed:
        fixed = {"": f"Python's module computes something else in {'train' if other else 'eval'}()"}
    if fixed:
        print(f"export_model.py: {'train' if other else 'eval'}() of the archive is refused, for "
              + ", ".join(f"'{name}': {why}" if name else why for name, why in list(fixed.items())[:5])
              + f"; export {'without' if other else 'with'} --eval for it", file=sys.stderr)
    return {"training": train, "always": sorted(always), "pinned": pinned, "fixed": fixed}


# ---- archives ----------------------------------------------------------------------------------------


def ties(model):
    """Groups of names of one tensor: in archives without values, shared memory does not show them."""
    names = {}
    for name, tensor in list(model.named_parameters(remove_duplicate=False)) + list(
            model.named_buffers(remove_duplicate=False)):
        names.setdefault(tensor, []).append(name)
    return [own for own in names.values() if len(own) > 1]


def without_weights(program):
    """Omits the values of parameters and persistent buffers, except adapters: C++ reads them from other files."""
    for name, tensor in program.state_dict.items():
        if ".lora_" in name:
            continue
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
    try:
        export_to_file(arguments)
    except Refused as error:
        sys.exit(f"export_model.py: {error}")


def export_to_file(arguments):
    dtype = getattr(torch, arguments.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise Refused(f"--dtype {arguments.dtype}: expected a floating-point type of torch, such as bfloat16")
    for name, least in (("batch", 2), ("sequence", 1), ("max_batch", arguments.batch), ("max_sequence", arguments.sequence)):
        if getattr(arguments, name) < least:
            raise Refused(f"--{name.replace('_', '-')} is {getattr(arguments, name)}, expected {least} or more")
    if unknown := set(arguments.static) - {"batch", "sequence", "target_sequence"}:
        raise Refused(f"--static {' '.join(sorted(unknown))}: expected batch or sequence")
    folder = os.path.dirname(os.path.abspath(arguments.archive))
    if not os.path.isdir(folder) or os.path.isdir(arguments.archive):  # refused before the model is built
        raise Refused(f"{arguments.archive}: expected a file in a folder that exists")
    torch.manual_seed(arguments.seed)
    is_function = ":" in arguments.model and not arguments.model.startswith("config:")
    model, inputs, shapes = from_function(arguments.model, arguments) if is_function else hugging_face(arguments)
    if arguments.lora:
        model = add_lora(model, arguments.lora, arguments.lora_targets)
    if dtype != torch.float32:
        model = model.to(dtype)
        cast = lambda value: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        inputs = ({name: cast(value) for name, value in inputs.items()} if isinstance(inputs, dict)
                  else tuple(cast(value) for value in inputs))
    program = export(model, inputs, shapes, train=not arguments.eval, decompose=arguments.decompose,
                     strict=arguments.strict)
    if arguments.no_weights:
        program = without_weights(program)
    save(program, arguments.archive)
    if arguments.lora:  # for PeftModel.from_pretrained(), beside the adapters that C++ saves
        model.peft_config["default"].save_pretrained(folder)
    numel = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{arguments.archive}: {type(model).__name__}, {numel:,} parameters, {trained:,} of them trained")


if __name__ == "__main__":
    main()
