#include <tessera/optim/ema.h>

#include <ATen/OpMathType.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <stdexcept>

#include <tessera/detail/parameter_parts.h>
#include <tessera/host_results.h>
#include "core/runtime/no_grad_no_inference_guard.h"
#include "optim/host/adam_update.h"
#include "optim/state/optimizer_state.h"

namespace tessera {
using namespace internal;
namespace {

// Where possible, replicas split parameters at multiples of this number of elements: 64 bytes of fp32.
constexpr int64_t kAlignmentNumel = 16;

// If torch::load() has replaced the data of the module's parameters, copies the new data into the shards.
// FullyShardedDataParallel::named_shards() does this before it returns.
void take_new_values(const ModelShards& model) { static_cast<void>(model.named_shards()); }

}  // namespace

// The model's shards and the averages, combined in one ModelShards for checkpoints.
class Ema::WithModel : public ModelShards {
 public:
  explicit WithModel(Ema& ema) : ema_(ema) {}
  Ema& ema() const { return ema_; }
  const std::shared_ptr<Communicator>& comm() const override { return ema_.comm(); }
  std::vector<NamedShard> named_shards() const override { return with_averages(ema_.model_.named_shards()); }
  std::vector<NamedShard> shards_to_save() const override { return with_averages(ema_.model_.shards_to_save()); }
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const override {
    auto buffers = ema_.model_.named_buffers();
    buffers.insert("ema.updates", ema_.updates_);
    return buffers;
  }

 private:
  std::vector<NamedShard> with_averages(std::vector<NamedShard> shards) const {
    for (NamedShard& shard : ema_.named_shards()) {
      shard.fqn = "ema." + shard.fqn;
      shard.aliases.clear();
      shards.push_back(std::move(shard));
    }
    return shards;
  }

  Ema& ema_;
};

Ema::Ema(ModelShards& model, EmaOptions options) : model_(model), options_(options) {
  const NoGradNoInferenceGuard quiet;
  updates_ = at::zeros({}, at::TensorOptions(at::kCPU).dtype(at::kLong));
  require_agreement(*comm(), "the options of Ema",
                    {"decay=" + text_of(options.decay) + " warmup=" + text_of(options.warmup)});
  if (!(options.decay >= 0 && options.decay < 1))
    throw std::invalid_argument(c10::str("EmaOptions::decay is ", options.decay, ", expected 0 or more and below 1"));
  int64_t total = 0;
  int count = 1, replica = 0;
  for (NamedShard& shard : model.named_shards()) {
    if (at::isIntegralType(shard.tensor.scalar_type(), /*includeBool=*/true)) continue;
    if (!shard.tensor.is_non_overlapping_and_dense())
      throw std::invalid_argument(
          c10::str("Ema: '", shard.fqn, "' has strides ", shard.tensor.strides(), ", expected dense ones"));
    total += shard.held.numel();
    count = shard.replica_count;  // all shards have the same count
    replica = shard.replica;
    averages_.push_back({.shard = std::move(shard)});
  }
  const int ranks_per_copy = comm()->size() / count;
  if (count == comm()->size())
    replicas_ = count > 1 ? comm() : nullptr;
  else if (count > 1)
    replicas_ = comm()->split_by([=](int rank) { return rank % ranks_per_copy; });

  // Treats the parts of all parameters as one sequence of elements, and assigns an equal range of it to each replica.
  auto cut = [&](int rank) { return rank == count ? total : total * rank / count / kAlignmentNumel * kAlignmentNumel; };
  int64_t offset = 0;
  for (Average& average : averages_) {
    const int64_t numel = average.shard.held.numel();
    auto within = [&](int rank) {
      return Range{std::clamp(cut(rank) - offset, int64_t{0}, numel),
                   std::clamp(cut(rank + 1) - offset, int64_t{0}, numel)};
    };
    average.part = within(replica);
    if (replicas_)
      for (int rank = 0; rank < count; ++rank) average.part_numel.push_back(within(rank).numel());
    offset += numel;
    const at::Tensor& tensor = average.shard.tensor;
    average.values = at::empty({average.part.numel()},
                               tensor.options().requires_grad(false).dtype(at::toOpMathType(tensor.scalar_type())));
    average.values.copy_(source(average));
  }
}

// Returns whether this rank holds the whole parameter, in its original shape.
bool Ema::is_whole(const Average& average) {
  return average.shard.tensor.sizes() == at::IntArrayRef(average.shard.sizes);
}

// Returns the parameter's elements in the memory order that it had at construction, because the replicas divided the
// elements in that order. If set_data() has changed the strides since then, returns a copy.
at::Tensor Ema::elements(const Average& average) {
  const at::Tensor own = average.shard.tensor.detach();
  return in_memory_order(is_whole(average) ? in_strides(own, average.shard.strides) : own);
}

// Returns the elements that this rank averages.
at::Tensor Ema::source(const Average& average) {
  return elements(average).narrow(0, average.part.begin, average.part.numel());
}

void Ema::update() {
  if (is_swapped_in_) throw std::logic_error("Ema::update() while the averages are swapped in");
  const NoGradNoInferenceGuard quiet;
  take_new_values(model_);
  const auto n = static_cast<double>(updates());
  const double decay = options_.warmup ? std::min(options_.decay, (1 + n) / (10 + n)) : options_.decay;
  std::vector<at::Tensor> values, sources;
  for (const Average& average : averages_) {
    if (average.part.numel() == 0) continue;
    if (is_on_disk(average.shard.tensor)) {
      average.values.lerp_(source(average).to(average.values.scalar_type()), 1 - decay);
      continue;
    }
    values.push_back(average.values);
    sources.push_back(source(average).to(average.values.scalar_type()));
  }
  if (!values.empty()) at::_foreach_lerp_(values, sources, 1 - decay);
  updates_.add_(1);
}

ScopeExit Ema::swap_in() {
  if (is_swapped_in_) throw std::logic_error("Ema::swap_in() while the averages are swapped in");
  const NoGradNoInferenceGuard quiet;
  take_new_values(model_);
  std::vector<at::Tensor> own;
  for (const Average& average : averages_) own.push_back(average.shard.tensor.detach().clone());
  is_swapped_in_ = true;
  ScopeExit scope([this, own] {
    const NoGradNoInferenceGuard at_end;
    for (size_t i = 0; i < own.size(); ++i) averages_[i].shard.tensor.detach().copy_(own[i]);
    is_swapped_in_ = false;
  });
  for (const Average& average : averages_) {
    at::Tensor whole = average.values;
    if (replicas_) {
      const auto options = whole.options().device(comm()->device());
      whole = at::empty({average.shard.held.numel()}, options);
      replicas_
          ->all_gather(whole, average.values.to(options.device()), average.part_numel,
                       "the average of '" + average.shard.fqn + "'")
          .wait();
    }
    const NamedShard& shard = average.shard;
    shard.tensor.detach().copy_(is_whole(average) ? whole.as_strided(shard.sizes, shard.strides) : whole);
  }
  return scope;
}

ModelShards& Ema::with_model() {
  if (!with_model_) with_model_ = std::make_unique<WithModel>(*this);
  return *with_model_;
}

Ema* Ema::of(ModelShards& with_model) {
  const auto* both = dynamic_cast<const WithModel*>(&with_model);
  return both == nullptr ? nullptr : &both->ema();
}

std::vector<NamedShard> Ema::named_shards() const {
  std::vector<NamedShard> shards;
  for (const Average& average : averages_) {
    NamedShard& shard = shards.emplace_back(average.shard);
    shard.held = {shard.held.begin + average.part.begin, shard.held.begin + average.part.end};
    shard.tensor = average.values;
    shard.replica = 0;
    shard.replica_count = 1;
  }
  return shards;
}

}  // namespace tessera
