#include "replicated.h"

#include <string>
#include <utility>

namespace train_gpt {
namespace {

constexpr int64_t kBucketBytes = int64_t{8} << 20;

// Parameters in groups of at most kBucketBytes, or of one.
std::vector<std::vector<at::Tensor>> group_by_bytes(const std::vector<at::Tensor>& parameters) {
  std::vector<std::vector<at::Tensor>> groups;
  int64_t group_bytes = kBucketBytes;
  for (const auto& parameter : parameters) {
    const auto parameter_bytes = static_cast<int64_t>(parameter.nbytes());
    if (group_bytes + parameter_bytes > kBucketBytes) {
      groups.emplace_back();
      group_bytes = 0;
    }
    groups.back().push_back(parameter);
    group_bytes += parameter_bytes;
  }
  return groups;
}

}  // namespace

ReplicatedModel::ReplicatedModel(Gpt model, std::shared_ptr<tessera::Communicator> comm)
    : LocalModel(std::move(model)), comm_(std::move(comm)) {
  for (const auto& item : named_parameters()) {
    comm_->broadcast(item.value().detach(), /*root=*/0, "parameter '" + item.key() + "'").wait();
  }
  make_buckets();
}

void ReplicatedModel::make_buckets() {
  for (const auto& group : group_by_bytes(parameters())) {
    int64_t bucket_numel = 0;
    for (const auto& parameter : group) bucket_numel += parameter.numel();
    auto bucket = at::zeros(bucket_numel, group.front().options().requires_grad(false));
    int64_t offset = 0;
    for (const auto& parameter : group) {
      parameter.mutable_grad() = bucket.narrow(0, offset, parameter.numel()).view(parameter.sizes());
      offset += parameter.numel();
    }
    buckets_.push_back(std::move(bucket));
  }
}

at::Tensor ReplicatedModel::add_gradients(const Batch& batch, double scale, bool last_of_step) {
  auto loss = LocalModel::add_gradients(batch, scale, last_of_step);
  if (last_of_step) average_gradients();
  return loss;
}

void ReplicatedModel::average_gradients() {
  std::vector<tessera::Pending> pending;
  for (const auto& bucket : buckets_) {
    pending.push_back(comm_->all_reduce(bucket, tessera::ReduceOp::kAverage, "gradients"));
  }
  for (auto& operation : pending) operation.wait();
}

// Keeps the gradients where they are: autograd adds into a gradient that exists.
void ReplicatedModel::zero_grad() {
  for (auto& bucket : buckets_) bucket.zero_();
}

std::string ReplicatedModel::describe() const {
  return "ddp: the whole state on each of " + std::to_string(comm_->size()) + " ranks";
}

}  // namespace train_gpt
