#include "tessera/checkpoint/load_plan.h"

#include <ATen/Context.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "tessera/checkpoint/commit.h"
#include "tessera/checkpoint/dtype.h"
#include "tessera/checkpoint/errors.h"
#include "tessera/checkpoint/saved_state.h"
#include "tessera/checkpoint/slice_reader.h"

namespace tessera {
namespace {

// Everything that does not fit, to be told at once.
class Misfits {
 public:
  void add(const std::string& kind, const std::string& text) { by_kind_[kind].push_back(text); }

  void throw_if_any() const {
    if (by_kind_.empty()) return;
    std::string message = "it does not fit:";
    for (const auto& [kind, texts] : by_kind_) {
      message += "\n  " + kind + ":";
      for (size_t i = 0; i < texts.size() && i < kMost; ++i) message += (i > 0 ? ", " : " ") + texts[i];
      if (texts.size() > kMost) message += ", and " + std::to_string(texts.size() - kMost) + " more";
    }
    throw CheckpointError(message);
  }

 private:
  static constexpr size_t kMost = 100;
  std::map<std::string, std::vector<std::string>> by_kind_;
};

class Loader {
 public:
  Loader(const Manifest& manifest, ModelShards& model, const std::vector<NamedShard>& shards,
         torch::optim::Optimizer* optimizer, const LoadOptions& options)
      : manifest_(manifest),
        saved_(manifest.saved),
        model_(model),
        shards_(shards),
        options_(options),
        reader_(manifest.saved) {
    for (const auto& [name, tensor] : saved_.tensors)
      for (const auto& alias : tensor.aliases) canonical_[alias] = name;
    if (optimizer != nullptr) optimizer_ = std::make_shared<NamedOptimizer>(shards, *optimizer);
  }

  LoadedState load() {
    match_model();
    if (optimizer_) match_optimizer();
    check_generators();
    misfits_.throw_if_any();
    read_parameters();
    read_buffers();
    if (optimizer_) read_optimizer();
    restore_generators();
    loaded_.bytes_read = reader_.bytes_read();
    return std::move(loaded_);
  }

 private:
  // The name that the tensor is saved under, if any of its own is known.
  std::optional<std::string> saved_name(const std::string& name, const std::vector<std::string>& aliases) const {
    auto known = [&](const std::string& own) -> std::optional<std::string> {
      if (saved_.tensors.contains(own)) return own;
      const auto found = canonical_.find(own);
      return found == canonical_.end() ? std::nullopt : std::optional(found->second);
    };
    if (auto found = known(name)) return found;
    for (const auto& alias : aliases)
      if (auto found = known(alias)) return found;
    return std::nullopt;
  }

  void match(const std::string& name, const std::vector<std::string>& aliases, const std::vector<int64_t>& sizes,
             std::optional<at::ScalarType> dtype) {
    const auto own = saved_name(name, aliases);
    if (!own) {
      if (options_.strict) misfits_.add("missing from the checkpoint", name);
      return;
    }
    used_.insert(*own);
    if (saved_.block_bytes == 0) used_.insert(aliases.begin(), aliases.end());  // other programs write each name
    const SavedTensor& tensor = saved_.tensors.at(*own);
    if (tensor.shape != sizes)
      misfits_.add("other shapes", name + " is " + to_string(tensor.shape) + ", the model has " + to_string(sizes));
    if (dtype && tensor.dtype != *dtype)
      misfits_.add("other dtypes",
                   name + " is " + c10::toString(tensor.dtype) + ", the model has " + c10::toString(*dtype));
  }

  void match_model() {
    for (const NamedShard& shard : shards_) match(shard.fqn, shard.aliases, shard.sizes, shard.tensor.scalar_type());
    buffers_ = local_buffers(model_);
    for (const auto& buffer : buffers_) match(buffer.name, buffer.aliases, buffer.sizes, buffer.elements.scalar_type());
    if (!options_.strict) return;
    for (const auto& [name, tensor] : saved_.tensors)
      if (tensor.kind != TensorKind::kState && !used_.contains(name)) misfits_.add("not in the model", name);
  }

  void match_optimizer() {
    if (!manifest_.optimizer) return misfits_.add("optimizer", "the checkpoint was saved without one");
    const SavedOptimizer& saved = *manifest_.optimizer;
    if (saved.kind != optimizer_->kind())
      return misfits_.add("optimizer", "the checkpoint's is " + saved.kind + ", this is " + optimizer_->kind());
    auto& groups = optimizer_->whole().param_groups();
    if (saved.groups.size() != groups.size())
      return misfits_.add("optimizer", "the checkpoint's has " + std::to_string(saved.groups.size()) +
                                           " groups, this has " + std::to_string(groups.size()));
    std::map<std::string, const NamedShard*> by_name;
    for (const NamedShard& shard : shards_) by_name[shard.fqn] = &shard;
    std::set<std::string> optimized;
    for (size_t i = 0; i < groups.size(); ++i) {
      std::set<std::string> expected(saved.groups[i].parameters.begin(), saved.groups[i].parameters.end());
      for (const std::string& name : optimizer_->groups()[i]) {
        const std::string own = saved_name(name, by_name.at(name)->aliases).value_or(name);
        optimized.insert(own);
        if (expected.erase(own) == 0) misfits_.add("optimizer", "group " + std::to_string(i) + " did not have " + name);
      }
      for (const auto& name : expected) misfits_.add("optimizer", "group " + std::to_string(i) + " had " + name);
      match_options(saved.groups[i].options, read_options(groups[i].options()), i);
    }
    for (const auto& [name, tensor] : saved_.tensors) {
      if (tensor.kind != TensorKind::kState) continue;
      // "optim.<key>.<fqn>"; keys have no dots.
      const auto dot = name.find('.', 6);
      if (name.rfind("optim.", 0) != 0 || dot == std::string::npos) {
        misfits_.add("optimizer", "'" + name + "' is not the name of a state");
        continue;
      }
      const std::string fqn = name.substr(dot + 1);
      if (!optimized.contains(fqn)) {
        if (options_.strict) misfits_.add("optimizer", "it has no parameter for the state " + name);
        continue;
      }
      const auto parameter = saved_.tensors.find(fqn);
      if (parameter == saved_.tensors.end() || parameter->second.shape != tensor.shape)
        misfits_.add("optimizer", name + " is " + to_string(tensor.shape) + ", unlike the parameter");
      state_keys_[fqn].push_back(name.substr(6, dot - 6));
    }
  }

  void match_options(const OptionList& saved, const OptionList& own, size_t group) {
    for (const auto& [name, value] : saved) {
      const auto found =
          std::find_if(own.begin(), own.end(), [&, n = name](const auto& entry) { return entry.first == n; });
      if (found == own.end() || found->second.index() != value.index())
        misfits_.add("optimizer",
                     "group " + std::to_string(group) + ": the option '" + name + "' is not this optimizer's");
    }
  }

  // The elements that a shard holds, in host memory: shaped like shard.tensor.
  at::Tensor read_shard(const std::string& name, const NamedShard& shard) {
    const auto [tensor, elements] = host_like(shard, saved_.tensors.at(name).dtype);
    for (const Segment& segment : segments_of(shard.sizes, shard.strides, shard.held))
      reader_.read(name, segment.box, elements.mutable_data_ptr(), shard.strides, shard.held.begin);
    return tensor;
  }

  void read_parameters() {
    for (const NamedShard& shard : shards_) {
      const auto name = saved_name(shard.fqn, shard.aliases);
      if (!name) continue;
      loaded_.steps.push_back(
          [value = read_shard(*name, shard), target = shard.tensor]() mutable { target.copy_(value); });
    }
  }

  void read_buffers() {
    for (const LocalTensor& buffer : buffers_) {
      const auto name = saved_name(buffer.name, buffer.aliases);
      if (!name) continue;
      at::Tensor value = reader_.read(*name, whole_box(buffer.sizes));
      at::Tensor target = model_.named_buffers()[buffer.name];
      loaded_.steps.push_back([value, target]() mutable { target.copy_(value); });
    }
  }

  void read_optimizer() {
    for (const NamedShard& shard : shards_) {
      if (!optimizer_->has(shard.fqn) || !optimizer_->owns(shard)) continue;
      const std::string name = saved_name(shard.fqn, shard.aliases).value_or(shard.fqn);
      ParameterState values;
      const auto numbers = manifest_.optimizer->numbers.find(name);
      if (numbers != manifest_.optimizer->numbers.end()) values.numbers = numbers->second;
      for (const auto& key : state_keys_[name])
        values.tensors.emplace_back(key, read_shard(state_name(key, name), shard).to(shard.tensor.device()));
      std::shared_ptr<std::unique_ptr<torch::optim::OptimizerParamState>> state =
          std::make_shared<std::unique_ptr<torch::optim::OptimizerParamState>>();
      try {
        if (!values.numbers.empty() || !values.tensors.empty()) *state = make_state(optimizer_->kind(), values);
      } catch (const std::invalid_argument& error) {
        throw CheckpointError("the optimizer's state of '" + name + "': " + error.what());
      }
      loaded_.steps.push_back(
          [state, shard, optimizer = optimizer_] { optimizer->set_state(shard, std::move(*state)); });
    }
    loaded_.steps.push_back([optimizer = optimizer_, groups = manifest_.optimizer->groups] {
      for (size_t i = 0; i < groups.size(); ++i)
        write_options(optimizer->whole().param_groups()[i].options(), groups[i].options);
    });
  }

  bool restores_generators() const {
    return options_.rng && !manifest_.rng.empty() && static_cast<int>(manifest_.rng.size()) == model_.comm()->size();
  }

  void check_generators() {
    if (!restores_generators()) return;
    const auto own = generator_states(model_.comm()->device());
    for (const auto& [device, bytes] : manifest_.rng[model_.comm()->rank()]) {
      const auto found = own.find(device);
      if (found != own.end() && found->second.size() != bytes.size())
        misfits_.add("random generators", "the state for " + device + " is another libtorch's; load with rng = false");
    }
  }

  void restore_generators() {
    if (!restores_generators()) return;
    loaded_.steps.push_back([states = manifest_.rng[model_.comm()->rank()], device = model_.comm()->device()] {
      set_generator_states(states, device);
    });
  }

  const Manifest& manifest_;
  const SavedTensors& saved_;
  ModelShards& model_;
  const std::vector<NamedShard>& shards_;
  const LoadOptions& options_;
  SliceReader reader_;
  std::shared_ptr<NamedOptimizer> optimizer_;
  std::vector<LocalTensor> buffers_;
  std::map<std::string, std::string> canonical_;  // of aliases
  std::set<std::string> used_;
  std::map<std::string, std::vector<std::string>> state_keys_;
  Misfits misfits_;
  LoadedState loaded_;
};

}  // namespace

LoadedState read_state_of(const Manifest& manifest, ModelShards& model, const std::vector<NamedShard>& shards,
                          torch::optim::Optimizer* optimizer, const LoadOptions& options) {
  return Loader(manifest, model, shards, optimizer, options).load();
}

std::string explain_missing(const std::filesystem::path& directory) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const std::string where = directory.string();
  if (!fs::exists(directory, ignored)) return where + ": there is no such directory";
  if (!fs::is_directory(directory, ignored)) return where + ": is not a directory; a single file is for load_full()";
  const auto inside = complete_checkpoints(directory);
  if (!inside.empty())
    return where + ": is not a checkpoint but holds " + std::to_string(inside.size()) + "; latest_checkpoint() gives " +
           inside.back().string();
  return where + ": is not a checkpoint: it has no " + kManifestName +
         (fs::is_empty(directory, ignored) ? ", it is empty" : "") +
         " (safetensors files of another program are for load_full())";
}

}  // namespace tessera
