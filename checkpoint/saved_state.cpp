#include "tessera/checkpoint/saved_state.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>

#include "tessera/checkpoint/dtype.h"
#include "tessera/paging/disk_pager.h"

namespace tessera {
namespace {

// Tensors below this many bytes are written by one replica, not split.
constexpr int64_t kSplitBytes = int64_t{4} << 20;

at::Tensor whole_in_memory_order(const at::Tensor& tensor, const std::vector<int64_t>& sizes,
                                 const std::vector<int64_t>& strides) {
  const int64_t numel = numel_of(sizes);
  if (numel == 0) return tensor.detach().reshape({0});
  at::Tensor dense = tensor.detach();
  if (dense.strides() != at::IntArrayRef(strides)) {
    dense = at::empty_strided(sizes, strides, dense.options().requires_grad(false));
    dense.copy_(tensor.detach());
  }
  return dense.as_strided({numel}, {1});
}

// The elements of a segment, row-major and in host memory.
at::Tensor box_data(const LocalTensor& tensor, const Segment& segment) {
  at::Tensor elements =
      tensor.elements.narrow(0, segment.memory.begin - tensor.held.begin, segment.memory.numel()).cpu();
  const auto order = memory_order(tensor.sizes, tensor.strides);
  std::vector<int64_t> ordered, back(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    ordered.push_back(segment.box.sizes[order[i]]);
    back[order[i]] = static_cast<int64_t>(i);
  }
  return elements.view(ordered).permute(back).contiguous();
}

Piece piece_of(const LocalTensor& tensor, const Segment& segment) {
  return {.name = tensor.name,
          .dtype = tensor.elements.scalar_type(),
          .shape = tensor.sizes,
          .aliases = tensor.aliases,
          .kind = tensor.kind,
          .box = segment.box,
          .data = [tensor, segment] { return box_data(tensor, segment); }};
}

// The part of a tensor that replica `index` of `count` writes: whole slowest rows.
Range part_of_replica(const LocalTensor& tensor, int index) {
  const auto order = memory_order(tensor.sizes, tensor.strides);
  const int64_t rows = order.empty() ? 1 : tensor.sizes[order[0]];
  const int64_t row = std::max<int64_t>(1, numel_of(tensor.sizes) / std::max<int64_t>(1, rows));
  auto cut = [&](int64_t i) {
    if (i == 0) return tensor.held.begin;
    if (i == tensor.replica_count) return tensor.held.end;
    const int64_t even = tensor.held.begin + tensor.held.numel() * i / tensor.replica_count;
    return std::clamp(even / row * row, tensor.held.begin, tensor.held.end);
  };
  return {cut(index), cut(index + 1)};
}

void check_dtype(const LocalTensor& tensor) {
  if (!safetensors_name(tensor.elements.scalar_type()))
    throw std::invalid_argument("'" + tensor.name + "' has the dtype " + c10::toString(tensor.elements.scalar_type()) +
                                ", which safetensors files have no name for");
}

}  // namespace

NamedOptimizer::NamedOptimizer(const std::vector<NamedShard>& shards, torch::optim::Optimizer& optimizer)
    : whole_(optimizer), shards_(dynamic_cast<OptimizerShards*>(&optimizer)), kind_(optimizer_kind(optimizer)) {
  std::map<const void*, std::string> by_tensor;
  for (const NamedShard& shard : shards) by_tensor[shard.tensor.unsafeGetTensorImpl()] = shard.fqn;
  for (const auto& group : optimizer.param_groups()) {
    const int index = static_cast<int>(groups_.size());
    auto& names = groups_.emplace_back();
    for (const at::Tensor& parameter : group.params()) {
      const auto found = by_tensor.find(parameter.unsafeGetTensorImpl());
      if (found == by_tensor.end())
        throw std::invalid_argument(
            "the optimizer's group " + std::to_string(index) + " has parameter number " + std::to_string(names.size()) +
            ", which is not one of the model's: build the optimizer from the wrapper's parameters");
      names.push_back(found->second);
      names_[found->second] = index;
    }
  }
}

bool NamedOptimizer::owns(const NamedShard& shard) const { return shards_ == nullptr || shards_->owns(shard.tensor); }

const torch::optim::OptimizerParamState* NamedOptimizer::state(const NamedShard& shard) const {
  const auto& states = (shards_ == nullptr ? whole_ : shards_->local()).state();
  const auto found = states.find(shard.tensor.unsafeGetTensorImpl());
  return found == states.end() ? nullptr : found->second.get();
}

void NamedOptimizer::set_state(const NamedShard& shard, std::unique_ptr<torch::optim::OptimizerParamState> state) {
  auto& states = (shards_ == nullptr ? whole_ : shards_->local()).state();
  states.erase(shard.tensor.unsafeGetTensorImpl());
  if (state) states[shard.tensor.unsafeGetTensorImpl()] = std::move(state);
}

at::Tensor flat_elements(const at::Tensor& tensor, const NamedShard& shard) {
  if (DiskPager::of(tensor) != nullptr)
    return flat_elements(tensor.clone(), shard);  // on a disk: pointers to it are not to be kept
  // A shard that holds everything may still be 1-D, as its tensor in a world of one.
  if (tensor.sizes() == at::IntArrayRef({shard.held.numel()}) && shard.sizes.size() != 1)
    return tensor.detach().reshape({-1});
  if (tensor.sizes() == at::IntArrayRef(shard.sizes) && shard.held.numel() == numel_of(shard.sizes))
    return whole_in_memory_order(tensor, shard.sizes, shard.strides);
  if (tensor.dim() == 1 && tensor.numel() == shard.held.numel()) return tensor.detach().contiguous();
  throw std::invalid_argument("the state of '" + shard.fqn + "' has the shape " + to_string(tensor.sizes().vec()) +
                              "; expected " + to_string(shard.tensor.sizes().vec()));
}

std::pair<at::Tensor, at::Tensor> host_like(const NamedShard& shard, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype);
  if (shard.tensor.sizes() == at::IntArrayRef(shard.sizes) && shard.held.numel() == numel_of(shard.sizes)) {
    at::Tensor tensor = at::empty_strided(shard.sizes, shard.strides, options);
    return {tensor, numel_of(shard.sizes) == 0 ? tensor.reshape({0}) : tensor.as_strided({tensor.numel()}, {1})};
  }
  at::Tensor tensor = at::empty({shard.held.numel()}, options);
  return {tensor, tensor};
}

std::string state_name(const std::string& key, const std::string& fqn) { return "optim." + key + "." + fqn; }

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
    const auto sizes = buffer.sizes().vec();
    const auto strides = row_major_strides(sizes);
    buffers.push_back({.name = item.key(),
                       .kind = TensorKind::kBuffer,
                       .sizes = sizes,
                       .strides = strides,
                       .held = {0, buffer.numel()},
                       .elements = whole_in_memory_order(buffer, sizes, strides),
                       .replica = model.comm()->rank(),
                       .replica_count = model.comm()->size()});
  }
  return buffers;
}

std::vector<LocalTensor> local_tensors(const ModelShards& model, const std::vector<NamedShard>& shards,
                                       const NamedOptimizer* optimizer) {
  std::vector<LocalTensor> tensors;
  auto add = [&](const NamedShard& shard, std::string name, TensorKind kind, const at::Tensor& tensor) -> LocalTensor& {
    return tensors.emplace_back(LocalTensor{.name = std::move(name),
                                            .aliases = {},
                                            .kind = kind,
                                            .sizes = shard.sizes,
                                            .strides = shard.strides,
                                            .held = shard.held,
                                            .elements = flat_elements(tensor, shard),
                                            .replica = shard.replica,
                                            .replica_count = shard.replica_count});
  };
  for (const NamedShard& shard : shards) {
    LocalTensor& local = add(shard, shard.fqn, TensorKind::kParameter, shard.tensor);
    local.aliases = shard.aliases;
    // A sharded optimizer's owner has the exact values; what it sends the others may be rounded.
    if (optimizer != nullptr && optimizer->sharded() && optimizer->has(shard.fqn))
      local.replica = 0, local.replica_count = optimizer->owns(shard) ? 1 : 0;
  }
  for (auto& buffer : local_buffers(model)) tensors.push_back(std::move(buffer));
  for (const NamedShard& shard : shards) {
    if (optimizer == nullptr || !optimizer->has(shard.fqn) || !optimizer->owns(shard)) continue;
    const auto* state = optimizer->state(shard);
    if (state == nullptr) continue;
    for (const auto& [key, tensor] : read_state(*state).tensors) {
      LocalTensor& local = add(shard, state_name(key, shard.fqn), TensorKind::kState, tensor);
      if (optimizer->sharded()) local.replica = 0, local.replica_count = 1;
    }
  }
  std::set<std::string> names;
  for (const LocalTensor& tensor : tensors) {
    check_dtype(tensor);
    check_tensor_name(tensor.name, "the model");
    if (!names.insert(tensor.name).second)
      throw std::invalid_argument("two tensors of the model and its optimizer are named '" + tensor.name + "'");
  }
  return tensors;
}

SavedOptimizer local_optimizer(const std::vector<NamedShard>& shards, NamedOptimizer& optimizer) {
  SavedOptimizer saved{.kind = optimizer.kind()};
  auto& groups = optimizer.whole().param_groups();
  for (size_t i = 0; i < groups.size(); ++i) {
    saved.groups.push_back({read_options(groups[i].options()), optimizer.groups()[i]});
    for (const auto& [name, option] : saved.groups.back().options)
      if (const double* number = std::get_if<double>(&option); number != nullptr && !std::isfinite(*number))
        throw std::invalid_argument("the option '" + name + "' of the optimizer's group " + std::to_string(i) +
                                    " is not finite");
  }
  for (const NamedShard& shard : shards) {
    if (!optimizer.has(shard.fqn) || !optimizer.owns(shard)) continue;
    // A rank that holds no element of it may not have counted its steps: its numbers are not taken.
    if (shard.held.numel() == 0 && numel_of(shard.sizes) > 0) continue;
    if (const auto* state = optimizer.state(shard)) saved.numbers[shard.fqn] = read_state(*state).numbers;
  }
  return saved;
}

std::vector<Piece> pieces_of(const std::vector<LocalTensor>& tensors, int rank) {
  std::vector<Piece> pieces;
  std::map<int, std::vector<int64_t>> loads;  // by replica count: bytes that each replica writes
  for (const LocalTensor& tensor : tensors) {
    const int64_t numel = numel_of(tensor.sizes);
    const auto bytes = static_cast<int64_t>(tensor.elements.nbytes());
    // Buffers are rank 0's; a tensor without elements is written by whoever is first to have it.
    if (numel == 0 || tensor.kind == TensorKind::kBuffer) {
      const bool writes = tensor.kind == TensorKind::kState ? tensor.replica == 0 : rank == 0;
      if (writes && numel == 0) pieces.push_back(piece_of(tensor, {whole_box(tensor.sizes), {0, 0}}));
      if (!writes || numel == 0) continue;
    }
    if (tensor.replica_count == 0) continue;  // the owner writes it
    Range own = tensor.held;
    if (tensor.replica_count > 1 && tensor.kind != TensorKind::kBuffer) {
      auto& load = loads.try_emplace(tensor.replica_count, tensor.replica_count, 0).first->second;
      if (bytes >= kSplitBytes) {
        own = part_of_replica(tensor, tensor.replica);
      } else {
        const auto least = std::min_element(load.begin(), load.end());
        *least += bytes;
        if (least - load.begin() != tensor.replica) continue;
      }
    }
    for (const Segment& segment : segments_of(tensor.sizes, tensor.strides, own))
      pieces.push_back(piece_of(tensor, segment));
  }
  return pieces;
}

std::map<std::string, std::string> generator_states(at::Device device) {
  std::map<std::string, std::string> states;
  auto take = [&](at::Device of, const char* name) {
    at::Generator generator = at::globalContext().defaultGenerator(of);
    at::Tensor state;
    {
      std::lock_guard lock(generator.mutex());
      state = generator.get_state();
    }
    states[name] = std::string(static_cast<const char*>(state.const_data_ptr()), state.nbytes());
  };
  take(at::kCPU, "cpu");
  if (device.is_cuda()) take(device, "cuda");
  return states;
}

void set_generator_states(const std::map<std::string, std::string>& states, at::Device device) {
  auto put = [&](at::Device of, const std::string& bytes) {
    at::Generator generator = at::globalContext().defaultGenerator(of);
    std::lock_guard lock(generator.mutex());
    const at::Tensor current = generator.get_state();
    // A state of another length is another libtorch's; set_state() would stop the program.
    if (current.nbytes() != bytes.size()) return;
    at::Tensor state = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), bytes.data(), bytes.size());
    generator.set_state(state);
  };
  for (const auto& [name, bytes] : states) {
    if (name == "cpu") put(at::kCPU, bytes);
    if (name == "cuda" && device.is_cuda()) put(device, bytes);
  }
}

}  // namespace tessera
