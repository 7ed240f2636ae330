// Runs an archive and writes its results, for comparison with Python.
//
//   exported_program ARCHIVE INPUTS.safetensors RESULTS.safetensors [ranks=N] [steps=K] [classes=A,B] [checkpointed=A]
//                    [weights=PATH] [stage=S] [forces=INPUT] [eval]
//
// INPUTS has "input.<name>" for each tensor input, "number.<name>" and "text.<name>" (bytes) for others, and
// "none.<name>"; elements of structures are "<name>/<key>" or "<name>/<index>". RESULTS has "output.<leaf>", "loss" and
// "grad.<fqn>" of the first step, and "loss.<step>" of AdamW's steps with a rate of 1e-3; with `eval`, only outputs.
// All ranks get the same batch, so the results are those of one process. With a ZeRO stage, 0 to 3, RESULTS has only
// the losses, of SGD steps with a rate of 1e-2. With `forces`, the loss also includes the gradients of the outputs' sum
// by that input.

#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

#include <tessera/checkpoint/full_file.h>
#include <tessera/exported.h>
#include <tessera/tessera.h>
#include "checkpoint/format/slice_reader.h"
#include "checkpoint/full_file/find_full_tensors.h"

namespace {

using Tensors = std::map<std::string, at::Tensor>;

struct Settings {
  std::string archive, inputs, results;
  int ranks = 0;   // 0: no wrapper
  int stage = -1;  // -1: FSDP, with gradients
  std::string forces;
  int steps = 1;
  std::vector<std::string> classes;
  std::vector<std::string> checkpointed;
  std::string weights;
  bool eval = false;
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; std::getline(stream, word, ',');) words.push_back(word);
  return words;
}

Settings read_settings(const std::vector<std::string>& words) {
  if (words.size() < 3) throw std::invalid_argument("see the first lines of its source");
  Settings settings{words[0], words[1], words[2]};
  for (size_t i = 3; i < words.size(); ++i) {
    const std::string key = words[i].substr(0, words[i].find('=')), value = words[i].substr(words[i].find('=') + 1);
    if (key == "ranks") {
      settings.ranks = std::stoi(value);
    } else if (key == "steps") {
      settings.steps = std::stoi(value);
    } else if (key == "classes") {
      settings.classes = split(value);
    } else if (key == "checkpointed") {
      settings.checkpointed = split(value);
    } else if (key == "stage") {
      settings.stage = std::stoi(value);
    } else if (key == "forces") {
      settings.forces = value;
    } else if (key == "weights") {
      settings.weights = value;
    } else if (key == "eval") {
      settings.eval = true;
    } else {
      throw std::invalid_argument("unknown setting " + words[i]);
    }
  }
  return settings;
}

Tensors read_tensors_of(const std::string& file) {
  const tessera::internal::SavedTensors saved = tessera::internal::find_full_tensors(file);
  tessera::internal::SliceReader reader(saved);
  Tensors tensors;
  for (const auto& [name, tensor] : saved.tensors)
    tensors[name] = reader.read(name, tessera::internal::whole_box(tensor.shape));
  return tensors;
}

void write_tensors(const std::string& file, const Tensors& tensors) {
  std::vector<tessera::FullTensor> entries;
  for (const auto& [name, tensor] : tensors) entries.push_back({name, tensor.scalar_type(), tensor.sizes().vec(), {}});
  tessera::write_full(file, entries,
                      [&](const tessera::FullTensor& entry) { return tensors.at(entry.name).contiguous(); });
}

void leaves_of(const tessera::ExportedValue& value, std::vector<tessera::ExportedValue>& leaves) {
  if (!value.is_sequence() && !value.is_dict()) return leaves.push_back(value);
  for (size_t i = 0; i < value.size(); ++i) leaves_of(value[i], leaves);
}

// The model's loss, or the mean squares of all differentiable outputs, as loss_of() in make_data.py.
at::Tensor loss_of(const tessera::ExportedValue& outputs) {
  if (outputs.is_dict() && outputs.has("loss")) return outputs["loss"].tensor();
  std::vector<tessera::ExportedValue> leaves;
  leaves_of(outputs, leaves);
  at::Tensor loss = at::zeros({});
  for (const auto& leaf : leaves)
    if (leaf.is_tensor() && leaf.tensor().is_floating_point()) loss = loss + leaf.tensor().to(at::kFloat).pow(2).mean();
  return loss;
}

tessera::ExportedValue plain_value(const std::string& kind, const at::Tensor& tensor) {
  if (kind == "none") return std::nullopt;
  if (kind == "text") return std::string(tensor.data_ptr<uint8_t>(), tensor.data_ptr<uint8_t>() + tensor.numel());
  if (tensor.scalar_type() == at::kBool) return tensor.item<bool>();
  if (tensor.is_floating_point()) return tensor.item<double>();
  return tensor.item<int64_t>();
}

// A value, or a structure by keys; a sequence if the keys are digits.
struct Tree {
  std::optional<tessera::ExportedValue> leaf;
  std::map<std::string, Tree> children;

  Tree& at(const std::string& path) {
    const size_t slash = path.find('/');
    Tree& child = children[path.substr(0, slash)];
    return slash == std::string::npos ? child : child.at(path.substr(slash + 1));
  }
  tessera::ExportedValue value() const {
    if (leaf) return *leaf;
    std::vector<tessera::ExportedValue> elements;
    tessera::ExportedValue::Named named;
    for (const auto& [key, child] : children) {
      elements.push_back(child.value());
      named.emplace_back(key, elements.back());
    }
    const bool is_sequence = std::isdigit(static_cast<unsigned char>(children.begin()->first[0])) != 0;
    return is_sequence ? tessera::ExportedValue(elements) : tessera::ExportedValue::dict(std::move(named));
  }
};

tessera::NamedInputs named_inputs(const Tensors& inputs, const std::string& differentiated) {
  Tree tree;
  for (const auto& [key, tensor] : inputs) {
    const std::string kind = key.substr(0, key.find('.')), name = key.substr(kind.size() + 1);
    tree.at(name).leaf =
        kind == "input" ? tensor.clone().set_requires_grad(name == differentiated) : plain_value(kind, tensor);
  }
  tessera::NamedInputs named;
  for (const auto& [name, input] : tree.children) named.add(name, input.value());
  return named;
}

at::Tensor loss_of(const tessera::ExportedValue& outputs, const tessera::NamedInputs& inputs,
                   const std::string& differentiated) {
  const at::Tensor loss = loss_of(outputs);
  if (differentiated.empty()) return loss;
  for (const auto& [name, value] : inputs.inputs())
    if (name == differentiated)
      return loss + torch::autograd::grad({outputs.tensor().sum()}, {value.tensor()}, {}, std::nullopt,
                                          /*create_graph=*/true)[0]
                        .pow(2)
                        .mean();
  throw std::invalid_argument("there is no input " + differentiated);
}

template <class Net>
Tensors run(Net& net, const Settings& settings, const Tensors& inputs, std::vector<at::Tensor> parameters,
            const std::function<Tensors()>& gradients) {
  Tensors results;
  std::unique_ptr<torch::optim::AdamW> optimizer;
  if (!settings.eval) optimizer = std::make_unique<torch::optim::AdamW>(parameters, 1e-3);
  for (int step = 0; step < settings.steps; ++step) {
    const tessera::NamedInputs named = named_inputs(inputs, settings.forces);
    torch::manual_seed(5);
    const at::AutoGradMode grad(!settings.eval);
    const tessera::ExportedValue outputs = net.forward(named);
    if (step == 0) {
      std::vector<tessera::ExportedValue> leaves;
      leaves_of(outputs, leaves);
      for (size_t i = 0; i < leaves.size(); ++i)
        if (leaves[i].is_tensor()) results["output." + std::to_string(i)] = leaves[i].tensor().detach().clone();
    }
    if (settings.eval) return results;
    const at::Tensor loss = loss_of(outputs, named, settings.forces);
    results["loss." + std::to_string(step)] = loss.detach().to(at::kFloat).clone();
    optimizer->zero_grad();
    loss.backward();
    if (step == 0) results.merge(gradients());
    optimizer->step();
  }
  return results;
}

std::vector<at::Tensor> once(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> unique;
  for (const at::Tensor& tensor : tensors)
    if (std::none_of(unique.begin(), unique.end(), [&](const at::Tensor& other) { return other.is_same(tensor); }))
      unique.push_back(tensor);
  return unique;
}

std::shared_ptr<tessera::ExportedModule> load(const Settings& settings) {
  tessera::ExportedOptions options{.weights = settings.weights, .strict = false};
  if (!settings.checkpointed.empty()) options.checkpointed = tessera::wrap_classes(settings.checkpointed);
  auto build = [&] { return tessera::load_exported(settings.archive, options); };
  auto model = settings.ranks > 0 && !settings.weights.empty() ? tessera::deferred(build) : build();
  if (settings.eval) model->eval();
  return model;
}

// The gradient of each parameter, joined from the ranks' shards.
Tensors gather_gradients(tessera::FullyShardedModule& fsdp, tessera::Communicator& comm) {
  Tensors gradients;
  for (const tessera::NamedShard& shard : fsdp.named_shards()) {
    at::Tensor full = at::zeros(shard.sizes, shard.tensor.options().requires_grad(false));
    at::Tensor has = at::zeros({1});
    if (shard.tensor.grad().defined()) {
      full = at::empty_strided(shard.sizes, shard.strides, full.options()).zero_();
      full.as_strided({full.numel()}, {1}).narrow(0, shard.held.begin, shard.held.numel()).copy_(shard.tensor.grad());
      has.fill_(1);
    }
    full = full.contiguous();
    comm.all_reduce(full.is_complex() ? at::view_as_real(full) : full).wait();
    comm.all_reduce(has).wait();
    if (has.item<float>() > 0) gradients["grad." + shard.fqn] = full;
  }
  return gradients;
}

void run_sharded(const Settings& settings, const Tensors& inputs) {
  tessera::run_ranks(settings.ranks, [&](std::shared_ptr<tessera::Communicator> comm) {
    auto policy = settings.classes.empty() ? tessera::wrap_by_size(1000) : tessera::wrap_classes(settings.classes);
    tessera::FullyShardedDataParallel fsdp(load(settings), comm, {.auto_wrap = policy});
    auto results = run(fsdp, settings, inputs, fsdp.parameters(), [&] { return gather_gradients(fsdp, *comm); });
    if (comm->rank() == 0) write_tensors(settings.results, results);
  });
}

void run_stage(const Settings& settings, const Tensors& inputs) {
  tessera::run_ranks(settings.ranks, [&](std::shared_ptr<tessera::Communicator> comm) {
    tessera::ZeroOptions options{.stage = settings.stage};
    options.fsdp.auto_wrap = tessera::wrap_by_size(100);
    auto model = tessera::zero(load(settings), torch::optim::SGDOptions(1e-2), comm, options);
    Tensors results;
    for (int step = 0; step < settings.steps; ++step) {
      const tessera::NamedInputs named = named_inputs(inputs, settings.forces);
      const at::Tensor loss = loss_of(model(named), named, settings.forces);
      results["loss." + std::to_string(step)] = loss.detach().clone();
      loss.backward();
      model.step();
      model.zero_grad();
    }
    if (comm->rank() == 0) write_tensors(settings.results, results);
  });
}

void run_alone(const Settings& settings, const Tensors& inputs) {
  auto model = load(settings);
  write_tensors(settings.results, run(*model, settings, inputs, once(model->parameters()), [&] {
                  Tensors gradients;
                  for (const auto& parameter : model->named_parameters())
                    if (parameter.value().grad().defined())
                      gradients["grad." + parameter.key()] = parameter.value().grad().clone();
                  return gradients;
                }));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Settings settings = read_settings({argv + 1, argv + argc});
    const Tensors inputs = read_tensors_of(settings.inputs);
    settings.ranks == 0  ? run_alone(settings, inputs)
    : settings.stage < 0 ? run_sharded(settings, inputs)
                         : run_stage(settings, inputs);
    return 0;
  } catch (const std::exception& error) {
    const std::string text = error.what();
    std::cerr << "exported_program: " << text.substr(0, text.find("\nException raised from")) << "\n";
    return 1;
  }
}
