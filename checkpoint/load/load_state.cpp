#include "checkpoint/load/load_state.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <list>
#include <optional>
#include <ranges>
#include <set>
#include <string_view>

#include <tessera/errors.h>
#include "checkpoint/format/box.h"
#include "checkpoint/format/entries.h"
#include "checkpoint/format/rank_files.h"
#include "checkpoint/format/slice_reader.h"
#include "checkpoint/save/outcome.h"
#include "checkpoint/state/saved_state.h"
#include "core/runtime/no_grad_no_inference_guard.h"
#include "offload/disk/disk_pager.h"

namespace tessera::internal {
namespace {

using Misfits = std::map<std::string, std::vector<std::string>>;

void throw_if_any(const Misfits& misfits) {
  if (misfits.empty()) return;
  constexpr size_t kMost = 100;
  std::string message = "it does not fit:";
  for (const auto& [kind, texts] : misfits) {
    message += "\n  " + kind + ":";
    for (size_t i = 0; i < std::min(texts.size(), kMost); ++i) message += (i > 0 ? ", " : " ") + texts[i];
    if (texts.size() > kMost) message += ", and " + std::to_string(texts.size() - kMost) + " more";
  }
  throw CheckpointMismatch(message);
}

template <class Values>
Values reversed(Values values) {
  std::ranges::reverse(values);
  return values;
}

// Throws libtorch's error if a write to `target` would fail. Does not change any value.
void write_nothing(const at::Tensor& target) {
  const WritesTo scope(target);
  target.as_strided({0}, {1}).fill_(0);
}

// Returns the reason why a buffer is not writable, or "" if the buffer is writable. Uses .data(), because the version
// counter must not change: autograd may have saved the buffer.
std::string what_keeps(const at::Tensor& buffer) try {
  write_nothing(buffer.data());
  return "";
} catch (const c10::Error& error) {
  return error.what_without_backtrace();
}

// Throws if a shard is not writable at present, for example inside summon_full_params().
void require_writable(const NamedShard& shard) {
  if (DiskPager::of(shard.tensor) == nullptr) {
    write_nothing(shard.tensor.detach());
  } else if (Page& page = *page_of(shard.tensor); !page.is_writable()) {
    page.pager()->refuse(page, shard.tensor, "load_checkpoint");
  }
}

class Loader {
 public:
  Loader(const Manifest& manifest, const StateObjects& objects, const LoadOptions& options)
      : manifest_(manifest),
        saved_(manifest.saved),
        model_(objects.model),
        models_(objects.models),
        shards_(in_dense_order(model_.named_shards())),
        buffers_(local_buffers(model_)),
        targets_(model_.named_buffers()),
        beside_(objects.beside),
        shards_beside_(shards_beside(beside_)),
        options_(options),
        reader_(manifest.saved, {}, storage_of(manifest.saved.directory).reading_threads()) {
    for (auto& [name, named] : named_optimizers(shards_, objects.optimizers))
      optimizers_.push_back({name, std::move(named)});
  }

  void read() {
    match_models();
    match_model();
    match_optimizers();
    match_beside();
    if (options_.rng && manifest_.world_size == model_.comm()->size())
      generators_ = generators_of(manifest_, model_.comm()->rank());
    match_generators();
    match_writable();
    throw_if_any(misfits_);
    // Checks all shards before any object is modified.
    for (const auto* shards : {&shards_, &shards_beside_})
      for (const NamedShard& shard : *shards) require_writable(shard);
    read_model();
    for (LoadedOptimizer& optimizer : optimizers_) read_optimizer(optimizer);
    for (const auto& [shard, saved] : found_beside_)
      tensors_.emplace_back(shard->tensor, want_shard(saved.name, *shard, saved.transposed));
    reader_.fetch();
    check_tied();
    check_states();
    // Rounds the loaded values of parameters that another rank owns, as a step of a sharded optimizer does.
    for (auto& [target, value] : tensors_)
      for (const LoadedOptimizer& optimizer : optimizers_) value = optimizer.named.as_kept(target, value);
  }

  // Writes the values to the objects. read() has checked them, so only an allocation or a Stateful object can throw.
  void apply() {
    for (auto& [target, value] : tensors_) {
      const WritesTo scope(target);
      target.copy_(value);
      value.reset();
    }
    for (ReadState& read : states_) put_state(read);
    for (auto& [name, named, saved, takes_options, parameters] : optimizers_) {
      for (size_t i = 0; takes_options && i < saved->groups.size(); ++i)
        write_options(named.whole().param_groups()[i].options(), saved->groups[i].options);
      complete_states(named.whole());
    }
    for (const auto& stateful : beside_)
      if (const auto saved = manifest_.beside.find(stateful->state_name()); saved != manifest_.beside.end())
        stateful->load_state_values(saved->second);
    set_generator_states(generators_, model_.comm()->device());
  }

  int64_t bytes_read() const { return reader_.bytes_read(); }
  const LoadReport& report() const { return report_; }

 private:
  static bool is_of_model(const SavedTensor& tensor) {
    return tensor.kind == TensorKind::kParameter || tensor.kind == TensorKind::kBuffer;
  }

  // Returns the name in the model for a saved tensor's name, or "" if the tensor must be skipped.
  std::string renamed(const std::string& name) const { return options_.rename ? options_.rename(name) : name; }

  struct LoadedOptimizer {
    std::string name;
    NamedOptimizer named;
    const SavedOptimizer* saved = nullptr;  // set by match_optimizers()
    bool takes_options = false;
    std::set<std::string> saved_parameters{};
  };

  // Formats names for an error text: "'a', 'b'", or "one without a name" if all names are empty.
  static std::string listed(const auto& names) {
    std::string all;
    for (const std::string& name : names)
      if (!name.empty()) all += (all.empty() ? "'" : ", '") + name + "'";
    return all.empty() ? "one without a name" : all;
  }

  // Compares the names of models. Adds the saved tensors of models that are not loaded to left_out_.
  void match_models() {
    const auto& saved = manifest_.models;
    if (saved.empty() != models_.empty() && !options_.rename)
      misfits_["models"].push_back("the checkpoint has " + listed(saved) + ", this is " + listed(models_) +
                                   " (LoadOptions::rename maps the names of tensors)");
    for (const auto& name : models_)
      if (!saved.empty() && std::ranges::find(saved, name) == saved.end())
        misfits_["models"].push_back("the checkpoint has " + listed(saved) + ", not '" + name + "'");
    if (models_.empty()) return;
    for (const auto& name : saved)
      if (std::ranges::find(models_, name) == models_.end())
        for (auto tensor = saved_.tensors.lower_bound(name + ".");
             tensor != saved_.tensors.end() && tensor->first.starts_with(name + "."); ++tensor)
          if (is_of_model(tensor->second)) left_out_.insert(tensor->first);
  }

  // Returns names in the checkpoint by names in the model. Adds the names that LoadOptions::rename skips to left_out_.
  std::map<std::string, std::string> names_in_model() {
    std::map<std::string, std::string> names;
    const auto of_other_models = left_out_;
    auto add = [&](const std::string& name, const std::string& saved) {
      const std::string own = renamed(name);
      if (own.empty()) return left_out_.insert(saved), void();
      const auto [found, added] = names.try_emplace(own, saved);
      if (!added && found->second != saved)
        misfits_["two names become one"].push_back(found->second + " and " + saved + " become " + own);
    };
    for (const auto& [name, tensor] : saved_.tensors)
      if (is_of_model(tensor) && !of_other_models.contains(name)) add(name, name);
    for (const auto& [name, tensor] : saved_.tensors)
      for (const auto& alias : tensor.aliases)
        if (!of_other_models.contains(name)) add(alias, name);
    return names;
  }

  bool is_transposed(const std::string& saved) const { return options_.transposed && options_.transposed(saved); }
  bool converts(at::ScalarType from, at::ScalarType to) const {
    return options_.convert_dtypes && at::isFloatingType(from) && at::isFloatingType(to);
  }

  void match_tensor(const NamedShard& own, const std::string& saved) {
    match_tensor(own, saved, is_of_model(saved_.tensors.at(saved)) && is_transposed(saved));
  }

  void match_tensor(const NamedShard& own, const std::string& saved, bool transposed) {
    const SavedTensor& tensor = saved_.tensors.at(saved);
    const auto shape = transposed ? reversed(tensor.shape) : tensor.shape;
    if (shape != own.sizes || (transposed && shape.size() != 2))
      misfits_["other shapes"].push_back(own.fqn + " is " + to_string(shape) + (transposed ? " transposed" : "") +
                                         ", the model has " + to_string(own.sizes));
    const at::ScalarType dtype = own.tensor.scalar_type();
    if (tensor.dtype != dtype && !converts(tensor.dtype, dtype))
      misfits_["other dtypes"].push_back(
          own.fqn + " is " + c10::toString(tensor.dtype) + ", the model has " + c10::toString(dtype) +
          (at::isFloatingType(tensor.dtype) && at::isFloatingType(dtype) ? " (LoadOptions::convert_dtypes converts)"
                                                                         : ""));
  }

  void match_model() {
    const auto names = names_in_model();
    std::set<std::string> used;
    auto match = [&](const NamedShard& own) {
      names_of_model_.insert(own.fqn);
      auto found = names.find(own.fqn);
      for (size_t i = 0; i < own.aliases.size() && found == names.end(); ++i) found = names.find(own.aliases[i]);
      if (found == names.end()) {
        if (options_.strict) misfits_["missing from the checkpoint"].push_back(own.fqn);
        report_.missing.push_back(own.fqn);
        return;
      }
      saved_names_.insert({own.fqn, found->second});
      orders_.emplace(found->second, memory_order(own.sizes, own.strides));
      used.insert(found->second);
      match_tensor(own, found->second);
      for (const auto& alias : own.aliases)  // another program may have saved a tied tensor once under each name
        if (const auto other = names.find(alias); other != names.end() && other->second != found->second) {
          if (!used.insert(other->second).second) continue;
          match_tensor(own, other->second);
          tied_names_.emplace(own.fqn, other->second);
        }
    };
    std::for_each(shards_.begin(), shards_.end(), match);
    std::for_each(buffers_.begin(), buffers_.end(), match);
    for (const auto& [name, tensor] : saved_.tensors) {
      if (!is_of_model(tensor) || used.contains(name) || left_out_.contains(name)) continue;
      if (options_.strict) misfits_["not in the model"].push_back(name);
      report_.unexpected.push_back(name);
    }
  }

  // Returns the checkpoint's name for a tensor of the model. If the checkpoint lacks the tensor, returns `name`. If
  // LoadOptions::rename is set, returns "" instead, because `name` may belong to an unrelated saved tensor.
  std::string saved_name(const std::string& name) const {
    const auto found = saved_names_.find(name);
    if (found != saved_names_.end()) return found->second;
    return options_.rename ? "" : name;
  }

  static bool have_same_bytes(const at::Tensor& a, const at::Tensor& b) {
    const at::Tensor one = a.contiguous(), two = b.contiguous();
    return one.nbytes() == two.nbytes() &&
           (one.nbytes() == 0 || std::memcmp(one.const_data_ptr(), two.const_data_ptr(), one.nbytes()) == 0);
  }

  // Throws if elements that share memory in the model (tied tensors, expanded dimensions) have different saved values.
  void check_tied() const {
    Misfits misfits;
    for (const auto& [own, other, value, other_value] : tied_values_)
      if (!have_same_bytes(value, other_value))
        misfits["tied in the model, saved with other values"].push_back(saved_name(own) + " and " + other);
    for (const auto& [own, value, once] : expanded_)
      if (!have_same_bytes(value, once.expand_as(value)))
        misfits["expanded in the model, saved with several values"].push_back(saved_name(own));
    throw_if_any(misfits);
  }

  // Records a difference between the saved optimizer and the current one: as an error if strict, else in the report.
  void differs(const std::string& text) {
    (options_.strict ? misfits_["optimizer"] : report_.optimizer).push_back(text);
  }

  void match_optimizers() {
    const auto& all = manifest_.optimizers;
    if (optimizers_.empty()) return;
    if (all.empty()) return misfits_["optimizer"].push_back("the checkpoint was saved without one");
    std::set<std::string> optimized;
    for (LoadedOptimizer& optimizer : optimizers_) {
      const auto saved = all.find(optimizer.name);
      if (saved == all.end())
        return misfits_["optimizer"].push_back("the checkpoint has " + listed(std::views::keys(all)) + ", this is " +
                                               listed(std::array{optimizer.name}));
      optimizer.saved = &saved->second;
      if (!match_optimizer(optimizer, optimized)) return;
    }
    for (const auto& [name, saved] : all)  // collects parameters of saved optimizers that are not loaded
      if (std::ranges::find(optimizers_, name, &LoadedOptimizer::name) == optimizers_.end())
        for (const auto& group : saved.groups)
          without_optimizer_.insert(group.parameters.begin(), group.parameters.end());
    match_states(optimized);
  }

  // Compares an optimizer's kind, groups and options with the checkpoint's. Adds the saved names of its parameters to
  // `optimized`. Returns false if the states cannot be compared.
  bool match_optimizer(LoadedOptimizer& optimizer, std::set<std::string>& optimized) {
    const SavedOptimizer& saved = *optimizer.saved;
    const std::string whose = optimizer.name.empty() ? "" : "'" + optimizer.name + "': ";
    auto misfit = [&](const std::string& text) { misfits_["optimizer"].push_back(whose + text); };
    if (saved.kind != optimizer.named.kind())
      return misfit("the checkpoint's is " + saved.kind + ", this is " + optimizer.named.kind()), false;
    auto& groups = optimizer.named.whole().param_groups();
    optimizer.takes_options = saved.groups.size() == groups.size();
    if (!optimizer.takes_options) {
      differs(whose + "the checkpoint's has " + std::to_string(saved.groups.size()) + " groups, this has " +
              std::to_string(groups.size()));
      if (options_.strict) return false;
    }
    for (const auto& group : saved.groups)
      optimizer.saved_parameters.insert(group.parameters.begin(), group.parameters.end());
    std::vector<std::set<std::string>> own, of_saved;
    for (const auto& names : optimizer.named.groups()) {
      auto& group = own.emplace_back();
      for (const std::string& name : names) group.insert(saved_name(name));
      optimized.insert(group.begin(), group.end());
    }
    for (const auto& group : saved.groups) of_saved.emplace_back(group.parameters.begin(), group.parameters.end());
    if (const std::string order = other_order(own, of_saved); !order.empty()) {
      differs(whose + order);
      optimizer.takes_options = false;
    }
    for (size_t i = 0; optimizer.takes_options && i < groups.size(); ++i) {
      match_group(optimizer.named.groups()[i], of_saved[i], whose + "group " + std::to_string(i));
      match_options(groups[i].options(), saved.groups[i].options, whose + "group " + std::to_string(i));
    }
    return true;
  }

  void match_group(const std::vector<std::string>& names, std::set<std::string> expected, const std::string& group) {
    for (const std::string& name : names)
      if (expected.erase(saved_name(name)) == 0) differs(group + " did not have " + name);
    for (const auto& name : expected)
      if (!left_out_.contains(name)) differs(group + " had " + name);
  }

  // Returns an error text if both sides have the same groups in a different order. Otherwise returns "".
  static std::string other_order(const std::vector<std::set<std::string>>& own,
                                 const std::vector<std::set<std::string>>& saved) {
    const auto sorted = [](std::vector<std::set<std::string>> groups) {
      std::ranges::sort(groups);
      return groups;
    };
    if (own == saved || sorted(own) != sorted(saved)) return "";
    std::string text = "its groups are in another order than the checkpoint's: groups";
    for (size_t i = 0; i < own.size(); ++i)
      text += std::string(i > 0 ? ", " : " ") + std::to_string(std::ranges::find(saved, own[i]) - saved.begin());
    return text + " of the checkpoint are given as 0 to " + std::to_string(own.size() - 1);
  }

  void match_options(const torch::optim::OptimizerOptions& options, const OptionList& saved, const std::string& group) {
    const OptionList own = read_options(options);
    for (const auto& [name, value] : saved)
      if (std::ranges::none_of(own, [&, &key = name, &option = value](const auto& entry) {
            return entry.first == key && entry.second.index() == option.index();
          }))
        misfits_["optimizer"].push_back(group + ": the option '" + name + "' is not this optimizer's");
  }

  static bool fits(const std::string& key, const std::vector<int64_t>& parameter, const std::vector<int64_t>& state) {
    const StateForm form = form_of_state(key);
    if ((form == StateForm::kRows || form == StateForm::kColumns) && parameter.size() < 2) return false;
    return state == state_sizes(key, parameter);
  }

  void match_states(const std::set<std::string>& optimized) {
    for (const auto& [name, tensor] : saved_.tensors) {
      if (tensor.kind != TensorKind::kState) continue;
      const auto dot = name.find('.', 6);  // a state is named "optim.<key>.<fqn>", and keys contain no dots
      if (!name.starts_with("optim.") || dot == std::string::npos) {
        misfits_["optimizer"].push_back("'" + name + "' is not the name of a state");
        continue;
      }
      const std::string fqn = name.substr(dot + 1);
      if (!optimized.contains(fqn)) {
        if (left_out_.contains(fqn) || without_optimizer_.contains(fqn)) continue;
        if (options_.strict) misfits_["optimizer"].push_back("it has no parameter for the state " + name);
        report_.unexpected.push_back(name);
        continue;
      }
      const auto parameter = saved_.tensors.find(fqn);
      const std::string key = name.substr(6, dot - 6);
      if (parameter == saved_.tensors.end() || !fits(key, parameter->second.shape, tensor.shape))
        misfits_["optimizer"].push_back(name + " is " + to_string(tensor.shape) + ", unlike the parameter");
      else if (form_of_state(key) != StateForm::kElements && is_transposed(fqn))
        misfits_["optimizer"].push_back(name + " cannot be transposed: it is not in the parameter's shape");
      else if (form_of_state(key) == StateForm::kBlocks)
        match_order(name, fqn);
      state_keys_[fqn].push_back(key);
    }
  }

  // Requires equal memory orders for block-quantized state, because reordering its blocks would round the values again.
  void match_order(const std::string& state, const std::string& parameter) {
    const SavedTensor& saved = saved_.tensors.at(parameter);
    const auto own = orders_.find(parameter);
    if (!saved_.by_rank || own == orders_.end()) return;
    std::vector<int64_t> order = saved.order;
    if (order.empty())
      for (size_t d = 0; d < saved.shape.size(); ++d) order.push_back(static_cast<int64_t>(d));
    if (own->second != order)
      misfits_["optimizer"].push_back(state + " is of blocks in the order of memory " + to_string(order) + " of '" +
                                      parameter + "', the model has it in " + to_string(own->second));
  }

  // Compares the Stateful objects with the checkpoint, which may contain further objects.
  void match_beside() {
    auto missing = [&](const std::string& name) {
      if (options_.strict) misfits_["missing from the checkpoint"].push_back(name);
      report_.missing.push_back(name);
    };
    for (const auto& stateful : beside_) {
      const auto saved = manifest_.beside.find(stateful->state_name());
      if (saved == manifest_.beside.end()) {
        missing("the state '" + stateful->state_name() + "'");
        continue;
      }
      try {
        stateful->check_state_values(saved->second);
      } catch (const std::invalid_argument& error) {
        misfits_["beside the model"].emplace_back(error.what());
      }
    }
    for (const NamedShard& shard : shards_beside_) {
      const SavedBeside beside = saved_beside(shard.fqn);
      const auto saved = saved_.tensors.find(beside.name);
      if (saved == saved_.tensors.end() || saved->second.kind != TensorKind::kBeside) {
        missing(shard.fqn);
        continue;
      }
      match_tensor(shard, beside.name, beside.transposed);
      found_beside_.emplace_back(&shard, beside);
    }
  }

  struct SavedBeside {
    std::string name;
    bool transposed = false;
  };

  // Returns the checkpoint's name for a tensor of a Stateful object. If the tensor has a parameter's name, as averages
  // have, the tensor is renamed, transposed or skipped like the parameter (LoadOptions).
  SavedBeside saved_beside(const std::string& own) const {
    const auto dot = own.find('.', std::string_view("beside.").size());  // `own` is "beside.<state_name>.<fqn>"
    const std::string start = own.substr(0, dot + 1), fqn = own.substr(dot + 1);
    if (!names_of_model_.contains(fqn)) return {own};
    const std::string saved = saved_name(fqn);
    return {start + saved, !saved.empty() && is_transposed(saved)};
  }

  void match_generators() {
    if (generators_.empty()) return;
    const auto own = generator_states(model_.comm()->device());
    for (const auto& [device, bytes] : generators_)
      if (const auto found = own.find(device); found != own.end() && found->second.size() != bytes.size())
        misfits_["random generators"].push_back("the state for " + device +
                                                " is another libtorch's; load with rng = false");
  }

  // Records the buffers that are not writable. require_writable() checks the shards.
  void match_writable() {
    for (const LocalTensor& buffer : buffers_)
      if (saved_names_.contains(buffer.fqn))
        if (const std::string reason = what_keeps(targets_[buffer.fqn]); !reason.empty())
          misfits_["cannot be written to"].push_back(buffer.fqn + " (" + reason + ")");
  }

  // Returns a host tensor with the saved dtype. The next reader_.fetch() fills it with the shard's elements.
  at::Tensor want_shard(const std::string& name, const NamedShard& shard, bool transposed) {
    const auto [tensor, elements] = host_like(shard, saved_.tensors.at(name).dtype);
    const auto strides = transposed ? reversed(shard.strides) : shard.strides;
    for (const Segment& segment : segments_of(shard.sizes, shard.strides, shard.held)) {
      Box box = segment.box;
      if (transposed) box = {reversed(box.offsets), reversed(box.sizes)};
      reader_.want(name, box, elements.mutable_data_ptr(), strides, shard.held.begin);
    }
    return tensor;
  }

  void read_model() {
    for (const NamedShard& shard : shards_)
      if (const auto found = saved_names_.find(shard.fqn); found != saved_names_.end()) {
        const at::Tensor value = want_shard(found->second, shard, is_transposed(found->second));
        want_once(shard.fqn, shard.tensor, value);
        want_tied(shard, value);
      }
    for (const LocalTensor& buffer : buffers_) {
      const auto found = saved_names_.find(buffer.fqn);
      if (found == saved_names_.end()) continue;
      const bool transposed = is_transposed(found->second);
      const auto sizes = transposed ? reversed(buffer.sizes) : buffer.sizes;
      const at::Tensor value =
          at::empty(sizes, at::TensorOptions(at::kCPU).dtype(saved_.tensors.at(found->second).dtype));
      if (value.numel() > 0)
        reader_.want(found->second, whole_box(sizes), value.mutable_data_ptr(), row_major_strides(sizes), 0);
      const at::Tensor taken = transposed ? value.t() : value;
      want_once(buffer.fqn, targets_[buffer.fqn], taken);
      want_tied(buffer, taken);
    }
  }

  // Schedules the write of `value` to `target`. Elements of an expanded `target` that share memory are written once.
  void want_once(const std::string& fqn, at::Tensor target, const at::Tensor& value) {
    at::Tensor once = value;
    for (int64_t d = 0; d < target.dim(); ++d)
      if (target.size(d) > 1 && target.stride(d) == 0) target = target.narrow(d, 0, 1), once = once.narrow(d, 0, 1);
    tensors_.emplace_back(target, once);
    if (once.numel() != value.numel()) expanded_.push_back({fqn, value, once});
  }

  void want_tied(const NamedShard& own, const at::Tensor& value) {
    const auto [begin, end] = tied_names_.equal_range(own.fqn);
    for (auto tied = begin; tied != end; ++tied)
      tied_values_.push_back(
          {own.fqn, tied->second, value, want_shard(tied->second, own, is_transposed(tied->second))});
  }

  struct TiedValues {
    std::string own, other;  // the tensor's name in the model, and its second name in the checkpoint
    at::Tensor value, other_value;
  };

  struct Expanded {
    std::string own;
    at::Tensor value, once;
  };

  void read_optimizer(LoadedOptimizer& optimizer) {
    for (const NamedShard& shard : shards_) {
      if (!optimizer.named.keeps(shard)) continue;
      const std::string name = saved_name(shard.fqn);
      if (!optimizer.saved_parameters.contains(name)) continue;  // not strict: the state stays unchanged
      ReadState& state = states_.emplace_back(ReadState{&optimizer.named, &shard, name, {}});
      const auto numbers = optimizer.saved->numbers.find(name);
      if (numbers != optimizer.saved->numbers.end())
        state.values.numbers.assign(numbers->second.begin(), numbers->second.end());
      for (const auto& key : state_keys_[name])
        state.values.tensors.emplace_back(
            key, want_shard(state_name(key, name), state_shard(key, shard, *model_.comm()), is_transposed(name)));
    }
  }

  struct ReadState {
    NamedOptimizer* optimizer;
    const NamedShard* shard;
    std::string name;  // the parameter's name in the checkpoint
    ParameterState values;

    bool is_empty() const { return values.numbers.empty() && values.tensors.empty(); }
  };

  // Throws CheckpointError if a fetched state is invalid. A check here ensures that put_state() cannot fail later.
  void check_states() const {
    for (const ReadState& read : states_) try {
        if (!read.is_empty()) static_cast<void>(make_state(read.optimizer->state_kind(), read.values));
      } catch (const std::invalid_argument& error) {
        throw CheckpointError("the optimizer's state of '" + read.name + "': " + error.what());
      }
  }

  // Adds state tensors that the current options of a parameter's group require and that the loaded state lacks.
  static void complete_states(torch::optim::Optimizer& optimizer) {
    auto& states = optimizer.state();
    for (auto& group : optimizer.param_groups())
      for (const at::Tensor& parameter : group.params())
        if (const auto state = states.find(parameter.unsafeGetTensorImpl()); state != states.end())
          complete_state(*state->second, group.options());
  }

  // Frees the old state before it creates the new one, so that the device never holds both.
  void put_state(ReadState& read) {
    auto& [optimizer, shard, name, values] = read;
    optimizer->set_state(*shard, nullptr);
    const std::string kind = optimizer->state_kind();
    const at::ScalarType saved_as = dtype_of_averages(kind, saved_.tensors.at(name).dtype);
    const at::ScalarType kept_as = dtype_of_averages(kind, shard->tensor.scalar_type());
    for (auto& [key, tensor] : values.tensors) {
      const at::ScalarType dtype = tensor.scalar_type();
      const bool follows = form_of_state(key) != StateForm::kBlocks && dtype == saved_as && converts(dtype, kept_as);
      tensor = tensor.to(shard->tensor.device(), follows ? kept_as : dtype);
    }
    if (!read.is_empty()) optimizer->set_state(*shard, make_state(kind, values));
    values = {};
  }

  const Manifest& manifest_;
  const SavedTensors& saved_;
  ModelShards& model_;
  const std::vector<std::string>& models_;
  const std::vector<NamedShard> shards_;
  const std::vector<LocalTensor> buffers_;
  const torch::OrderedDict<std::string, at::Tensor> targets_;  // the model's buffers
  const std::vector<std::shared_ptr<Stateful>>& beside_;
  const std::vector<NamedShard> shards_beside_;
  const LoadOptions& options_;
  SliceReader reader_;
  std::list<LoadedOptimizer> optimizers_;
  GeneratorStates generators_;                          // states to restore; empty if generators are not restored
  std::map<std::string, std::string> saved_names_;      // from names in the model to names in the checkpoint
  std::map<std::string, std::vector<int64_t>> orders_;  // memory orders in the model, by name in the checkpoint
  std::multimap<std::string, std::string> tied_names_;  // from names in the model to further names in the checkpoint
  std::set<std::string> names_of_model_;                // the first name of each tensor of the model
  std::set<std::string> left_out_;                      // saved names that `rename` or match_models() excludes
  std::vector<std::pair<const NamedShard*, SavedBeside>> found_beside_;
  std::map<std::string, std::vector<std::string>> state_keys_;
  std::set<std::string> without_optimizer_;  // saved names of parameters whose optimizer is not loaded
  Misfits misfits_;
  LoadReport report_;
  // Values read from the checkpoint. `tensors_` contains pairs of a destination and its value.
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
  std::vector<TiedValues> tied_values_;
  std::vector<Expanded> expanded_;
  std::vector<ReadState> states_;
};

}  // namespace

std::vector<std::string> describe_load(const std::filesystem::path& path, const LoadOptions& options) {
  return {"path " + path.string(), "strict " + std::to_string(options.strict),
          "convert_dtypes " + std::to_string(options.convert_dtypes), "rng " + std::to_string(options.rng)};
}

void load_state(const Manifest& manifest, const StateObjects& objects, const LoadOptions& options,
                const std::string& what) {
  const NoGradNoInferenceGuard quiet;
  std::optional<Loader> loader;
  Communicator& comm = *objects.model.comm();
  on_all_ranks(comm, what, [&] { loader.emplace(manifest, objects, options).read(); });
  loader->apply();
  // Ranks that are threads share generators. The barrier prevents a slow rank from resetting generators in use.
  comm.barrier(what);
  if (options.bytes_read != nullptr) *options.bytes_read = loader->bytes_read();
  if (options.report != nullptr) *options.report = options.strict ? LoadReport() : loader->report();
}

}  // namespace tessera::internal
