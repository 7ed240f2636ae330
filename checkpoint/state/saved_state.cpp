#include "checkpoint/state/saved_state.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <stdexcept>

#include <tessera/detail/parameter_parts.h>
#include <tessera/optim/lamb.h>
#include "checkpoint/format/safetensors_header.h"
#include "core/layout/shardable.h"
#include "core/runtime/lazy_values.h"
#include "core/runtime/require.h"
#include "core/runtime/stream_uses.h"
#include "offload/disk/disk_pager.h"

namespace tessera::internal {
namespace {

// One replica writes a tensor of fewer than kSplitBytes bytes. A larger tensor is split among its replicas.
constexpr int64_t kSplitBytes = int64_t{4} << 20;

// Returns a 1-D view of a dense tensor's elements in memory order.
at::Tensor flat_view(const at::Tensor& dense) {
  return dense.numel() == 0 ? dense.reshape({0}) : dense.as_strided({dense.numel()}, {1});
}

// Returns the tensor, or a copy if its memory does not hold its values (lazy conjugation, negation or zeros).
at::Tensor with_values_in_memory(const at::Tensor& tensor) {
  return has_lazy_values(tensor) ? tensor.detach().clone() : tensor.detach();
}

at::Tensor whole_in_memory_order(const at::Tensor& tensor, const std::vector<int64_t>& strides) {
  return flat_view(in_strides(with_values_in_memory(tensor), strides));
}

bool is_whole(const at::Tensor& tensor, const NamedShard& shard) {
  return tensor.sizes() == at::IntArrayRef(shard.sizes) && shard.held.numel() == numel_of(shard.sizes);
}

// Returns a shard's elements as a 1-D tensor in memory order (a view if possible). Returns a tensor on disk unchanged.
at::Tensor flat_elements(const at::Tensor& tensor, const NamedShard& shard) {
  require_strided("'" + shard.fqn + "'", tensor);
  if (DiskPager::of(tensor) != nullptr) return tensor;
  // A flat shard is in memory order. In a world of one rank it has all elements, so is_whole() also compares sizes.
  if (is_whole(tensor, shard)) return whole_in_memory_order(tensor, shard.strides);
  if (tensor.dim() == 1 && tensor.numel() == shard.held.numel()) return with_values_in_memory(tensor).contiguous();
  throw std::invalid_argument("the state of '" + shard.fqn + "' has the shape " + to_string(tensor.sizes().vec()) +
                              "; expected " + to_string({shard.held.numel()}) + " or " + to_string(shard.sizes));
}

// Returns the elements of a segment. For a tensor on disk, returns a copy of the segment, so that a save holds only one
// segment in memory at a time.
at::Tensor elements_of(const LocalTensor& local, const Segment& segment) {
  const auto part = [&](const at::Tensor& elements) {
    return elements.narrow(0, segment.memory.begin - local.held.begin, segment.memory.numel());
  };
  DiskPager* disk = DiskPager::of(local.tensor);
  if (disk == nullptr) return part(local.tensor);
  const auto hold = disk->hold(local.tensor, /*writes=*/false);
  return part(flat_elements(hold.values(), local)).clone();
}

// Returns a view of a segment's elements with the shape of the segment's box.
at::Tensor as_box(const at::Tensor& elements, const LocalTensor& local, const Segment& segment) {
  const auto order = memory_order(local.sizes, local.strides);
  std::vector<int64_t> strides(order.size());
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0; stride *= segment.box.sizes[order[i]]) strides[order[i]] = stride;
  return elements.as_strided(segment.box.sizes, strides, elements.storage_offset());
}

Piece piece_of(const LocalTensor& local, const Segment& segment) {
  auto order = memory_order(local.sizes, local.strides);
  if (std::ranges::is_sorted(order)) order.clear();
  // A tensor on disk has no Piece::view, so an asynchronous save copies the values before the next step changes them.
  const bool is_read_at_once = DiskPager::of(local.tensor) != nullptr;
  const auto view = [local, segment] { return as_box(elements_of(local, segment), local, segment); };
  return {local.fqn,
          local.tensor.scalar_type(),
          local.sizes,
          local.aliases,
          local.kind,
          segment.box,
          [local, segment] { return as_box(elements_of(local, segment).cpu(), local, segment).contiguous(); },
          segment.memory,
          std::move(order),
          is_read_at_once ? std::function<at::Tensor()>() : view};
}

// Returns the part of a tensor that replica `index` writes. All parts are equal and of whole rows (slices along the
// dimension with the largest stride), but the last ones may be shorter. Equal parts keep the manifest short (RankRun).
Range part_of_replica(const LocalTensor& local, int index) {
  const auto order = memory_order(local.sizes, local.strides);
  const int64_t row = order.empty() ? 1 : numel_of(local.sizes) / local.sizes[order[0]];
  const int64_t even = (local.held.numel() + local.replica_count - 1) / local.replica_count;
  const int64_t part = (even + row - 1) / row * row;
  return {std::min(local.held.begin + index * part, local.held.end),
          std::min(local.held.begin + (index + 1) * part, local.held.end)};
}

std::map<std::string, at::Generator> default_generators(at::Device device) {
  std::map<std::string, at::Generator> generators{{"cpu", at::globalContext().defaultGenerator(at::kCPU)}};
  if (device.is_cuda()) generators.emplace("cuda", at::globalContext().defaultGenerator(device));
  return generators;
}

}  // namespace

NamedOptimizer::NamedOptimizer(const std::vector<NamedShard>& shards, torch::optim::Optimizer& optimizer)
    : whole_(optimizer),
      shards_(dynamic_cast<const OptimizerShards*>(&optimizer)),
      state_kind_(optimizer_kind(optimizer)),
      kind_(dynamic_cast<const Lamb*>(shards_ == nullptr ? &whole_ : &shards_->local()) == nullptr ? state_kind_
                                                                                                   : "Lamb") {
  std::map<const void*, std::string> by_tensor;
  for (const NamedShard& shard : shards) by_tensor[shard.tensor.unsafeGetTensorImpl()] = shard.fqn;
  for (const auto& group : optimizer.param_groups()) {
    auto& names = groups_.emplace_back();
    std::set<std::string> listed;
    for (size_t i = 0; i < group.params().size(); ++i) {
      const auto found = by_tensor.find(group.params()[i].unsafeGetTensorImpl());
      require(found != by_tensor.end(), "the optimizer's group ", groups_.size() - 1, " has parameter number ", i,
              ", which is not one of the model's: build the optimizer from the wrapper's parameters");
      // Lists a tied parameter once, although a module's parameters() contains it once for each name.
      if (listed.insert(found->second).second) names.push_back(found->second);
      names_.insert(found->second);
    }
  }
}

const torch::optim::OptimizerParamState* NamedOptimizer::state(const NamedShard& shard) const {
  if (!keeps(shard)) return nullptr;
  const auto found = whole_.state().find(shard.tensor.unsafeGetTensorImpl());
  return found == whole_.state().end() ? nullptr : found->second.get();
}

void NamedOptimizer::set_state(const NamedShard& shard, std::unique_ptr<torch::optim::OptimizerParamState> state) {
  whole_.state().erase(shard.tensor.unsafeGetTensorImpl());
  if (state) whole_.state()[shard.tensor.unsafeGetTensorImpl()] = std::move(state);
}

NamedOptimizers named_optimizers(const std::vector<NamedShard>& shards,
                                 const std::map<std::string, torch::optim::Optimizer*>& optimizers) {
  NamedOptimizers all;
  std::map<std::string, std::string> optimizer_of;
  for (const auto& [name, optimizer] : optimizers) {
    const NamedOptimizer& named = all.try_emplace(name, shards, *optimizer).first->second;
    for (const std::string& parameter : named.names())
      if (const auto [other, is_new] = optimizer_of.emplace(parameter, name); !is_new)
        throw std::invalid_argument("'" + parameter + "' is in two optimizers, '" + other->second + "' and '" + name +
                                    "'; a checkpoint has one state of each parameter");
  }
  return all;
}

std::pair<at::Tensor, at::Tensor> host_like(const NamedShard& shard, at::ScalarType dtype) {
  const auto options = at::TensorOptions(at::kCPU).dtype(dtype);
  if (DiskPager* disk = shard.held.numel() > 0 ? DiskPager::of(shard.tensor) : nullptr; disk != nullptr) {
    const auto bytes = shard.held.numel() * static_cast<int64_t>(c10::elementSize(dtype));
    const at::Tensor elements = disk->make_spool(bytes).view(dtype);
    return {is_whole(shard.tensor, shard) ? elements.as_strided(shard.sizes, shard.strides) : elements, elements};
  }
  const at::Tensor tensor = is_whole(shard.tensor, shard) ? at::empty_strided(shard.sizes, shard.strides, options)
                                                          : at::empty({shard.held.numel()}, options);
  return {tensor, flat_view(tensor)};
}

std::string state_name(const std::string& key, const std::string& fqn) { return "optim." + key + "." + fqn; }

std::vector<NamedShard> in_dense_order(std::vector<NamedShard> shards) {
  for (NamedShard& shard : shards)
    if (!fills_memory(shard.sizes, shard.strides)) shard.strides = row_major_strides(shard.sizes);
  return shards;
}

std::vector<LocalTensor> local_buffers(const ModelShards& model) {
  std::vector<LocalTensor> buffers;
  std::map<const void*, size_t> known;
  for (const auto& item : model.named_buffers()) {
    const at::Tensor& buffer = item.value();
    if (!buffer.defined()) continue;
    const auto [found, added] = known.emplace(buffer.unsafeGetTensorImpl(), buffers.size());
    if (!added) {
      buffers[found->second].aliases.push_back(item.key());
      continue;
    }
    require_strided("'" + item.key() + "'", buffer);
    const auto sizes = buffer.sizes().vec();
    const auto strides = row_major_strides(sizes);
    buffers.push_back({{item.key(),
                        {},
                        sizes,
                        strides,
                        {0, buffer.numel()},
                        whole_in_memory_order(buffer, strides),
                        model.comm()->rank(),
                        model.comm()->size()},
                       TensorKind::kBuffer});
  }
  return buffers;
}

std::vector<NamedShard> shards_beside(const std::vector<std::shared_ptr<Stateful>>& beside) {
  std::vector<NamedShard> all;
  for (const auto& stateful : beside)
    for (NamedShard shard : in_dense_order(stateful->state_shards())) {
      shard.fqn = "beside." + stateful->state_name() + "." + shard.fqn;
      shard.aliases.clear();
      all.push_back(std::move(shard));
    }
  return all;
}

std::vector<LocalTensor> local_tensors(const ModelShards& model, const std::vector<NamedShard>& shards,
                                       const NamedOptimizers& optimizers,
                                       const std::vector<std::shared_ptr<Stateful>>& beside) {
  std::vector<LocalTensor> tensors;
  auto optimizer_of = [&](const NamedShard& shard) -> const NamedOptimizer* {
    for (const auto& [name, optimizer] : optimizers)
      if (optimizer.has(shard.fqn)) return &optimizer;
    return nullptr;
  };
  for (const NamedShard& shard : shards) {
    LocalTensor& local = tensors.emplace_back(LocalTensor{shard, TensorKind::kParameter});
    local.tensor = flat_elements(shard.tensor, shard);
    // With a sharded optimizer, only the owner saves a parameter, because other ranks may hold rounded values.
    if (const auto* optimizer = optimizer_of(shard); optimizer != nullptr && optimizer->sharded())
      local.replica = 0, local.replica_count = optimizer->keeps(shard) ? 1 : 0;
  }
  for (auto& buffer : local_buffers(model)) tensors.push_back(std::move(buffer));
  for (const NamedShard& shard : shards) {
    const auto* optimizer = optimizer_of(shard);
    const auto* state = optimizer == nullptr ? nullptr : optimizer->state(shard);
    if (state == nullptr) continue;
    for (const auto& [key, tensor] : read_ordered_state(*state, shard.tensor).tensors) {
      LocalTensor& local =
          tensors.emplace_back(LocalTensor{state_shard(key, shard, *model.comm()), TensorKind::kState});
      local.fqn = state_name(key, shard.fqn);
      local.aliases.clear();
      if (form_of_state(key) == StateForm::kElements) {
        local.tensor = flat_elements(tensor, shard);
      } else {
        const Range saved = saved_part(key, shard);
        local.tensor = with_values_in_memory(tensor).narrow(0, saved.begin - local.held.begin, saved.numel());
        local.held = saved;
      }
      if (optimizer->sharded()) local.replica = 0, local.replica_count = 1;
    }
  }
  for (const NamedShard& shard : shards_beside(beside)) {
    LocalTensor& local = tensors.emplace_back(LocalTensor{shard, TensorKind::kBeside});
    local.tensor = flat_elements(shard.tensor, shard);
  }
  std::set<std::string> names;
  for (const LocalTensor& local : tensors) {
    check_dtype(local.fqn, local.tensor.scalar_type());
    check_tensor_name(local.fqn, "the model");
    for (const auto& alias : local.aliases) check_tensor_name(alias, "the model");
    require(names.insert(local.fqn).second, "two tensors of the model and its optimizer are named '", local.fqn, "'");
  }
  return tensors;
}

SavedOptimizer local_optimizer(const std::vector<NamedShard>& shards, NamedOptimizer& optimizer) {
  SavedOptimizer saved{.kind = optimizer.kind()};
  auto& groups = optimizer.whole().param_groups();
  for (size_t i = 0; i < groups.size(); ++i) {
    saved.groups.push_back({read_options(groups[i].options()), optimizer.groups()[i]});
    for (const auto& [name, option] : saved.groups.back().options)
      if (const std::string reason = why_not_an_option(name, option); !reason.empty())
        throw std::invalid_argument("the option '" + name + "' of the optimizer's group " + std::to_string(i) + " " +
                                    reason);
  }
  for (const NamedShard& shard : shards) {
    // Skips a parameter without elements on this rank, because the rank may not have counted the parameter's steps.
    if (shard.held.numel() == 0 && numel_of(shard.sizes) > 0) continue;
    if (const auto* state = optimizer.state(shard))
      for (const auto& [key, number] : read_state(*state).numbers) saved.numbers[shard.fqn][key] = number;
  }
  return saved;
}

std::vector<Piece> pieces_of(const std::vector<LocalTensor>& tensors, int rank) {
  std::vector<Piece> pieces;
  std::map<int, std::vector<int64_t>> loads;  // for each replica count, the bytes of small tensors per replica
  for (const LocalTensor& local : tensors) {
    const bool is_buffer = local.kind == TensorKind::kBuffer;
    if (numel_of(local.sizes) == 0) {  // rank 0 writes empty tensors, but replica 0 writes empty optimizer state
      if (local.kind == TensorKind::kState ? local.replica == 0 : rank == 0)
        pieces.push_back(piece_of(local, {whole_box(local.sizes), {0, 0}}));
      continue;
    }
    if ((is_buffer && rank != 0) || local.replica_count == 0) continue;  // rank 0 or the owner writes this tensor
    Range own = local.held;
    if (local.replica_count > 1 && !is_buffer) {
      const auto bytes = static_cast<int64_t>(local.tensor.nbytes());
      auto& load = loads.try_emplace(local.replica_count, local.replica_count, 0).first->second;
      if (bytes >= kSplitBytes) {
        own = part_of_replica(local, local.replica);
      } else {
        const auto least = std::ranges::min_element(load);
        *least += bytes;
        if (least - load.begin() != local.replica) continue;
      }
    }
    for (const Segment& segment : segments_of(local.sizes, local.strides, own))
      pieces.push_back(piece_of(local, segment));
  }
  return pieces;
}

void await_current_stream(at::Device device) {
  if (!device.is_cpu()) current_stream(device).synchronize();
}

GeneratorStates generator_states(at::Device device) {
  GeneratorStates states;
  for (auto& [name, generator] : default_generators(device)) {
    const std::lock_guard lock(generator.mutex());
    const at::Tensor state = generator.get_state();
    states[name] = std::string(static_cast<const char*>(state.const_data_ptr()), state.nbytes());
  }
  return states;
}

void set_generator_states(const GeneratorStates& states, at::Device device) {
  for (auto& [name, generator] : default_generators(device)) {
    const auto found = states.find(name);
    if (found == states.end()) continue;
    const auto& bytes = found->second;
    const std::lock_guard lock(generator.mutex());
    const at::Tensor state = generator.get_state();
    // Skips a state of another length, which another libtorch saved, because set_state() would abort the program.
    if (state.nbytes() != bytes.size()) continue;
    std::memcpy(state.mutable_data_ptr(), bytes.data(), bytes.size());
    generator.set_state(state);
  }
}

}  // namespace tessera::internal
