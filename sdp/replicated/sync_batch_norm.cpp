#include <tessera/sync_batch_norm.h>

#include <ATen/Context.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/batchnorm.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/layout/deferred.h"
#include "core/memory/without_data.h"
#include "core/paging/stand_in.h"
#include "core/runtime/require.h"

namespace tessera {
using namespace internal;
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

// Returns `values`, [C], with shape [1, C, 1, ...] and the dtype of `like`.
at::Tensor by_channel(const at::Tensor& values, const at::Tensor& like) {
  std::vector<int64_t> sizes(like.dim(), 1);
  sizes[1] = values.numel();
  return values.to(like.scalar_type()).view(sizes);
}

std::vector<int64_t> all_but_channel(const at::Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t d = 2; d < input.dim(); ++d) dims.push_back(d);
  return dims;
}

// Returns the input in the dtype of the computation: double stays double, other dtypes become fp32.
at::Tensor widened(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? input : input.to(at::kFloat);
}

struct Statistics {
  at::Tensor mean, variance;  // [C], in double; the variance is the biased estimate
  double count = 0;           // number of values per channel, over all ranks
};

Statistics over_ranks(const at::Tensor& input, Communicator& group) {
  const int64_t channels = input.size(1);
  const at::Tensor x = widened(input);
  const auto count = static_cast<double>(channels == 0 ? 0 : input.numel() / channels);
  const auto in_double = x.options().dtype(at::kDouble);
  at::Tensor mean = at::zeros({channels}, in_double), squares = mean;
  if (count > 0) {
    mean = x.mean(all_but_channel(input), /*keepdim=*/false, at::kDouble);
    squares = (x - by_channel(mean, x)).square_().sum(all_but_channel(input), /*keepdim=*/false, at::kDouble);
  }
  const at::Tensor own = at::cat({mean, squares, at::full({1}, count, in_double)}).to(group.device());
  at::Tensor all = at::empty({group.size(), own.numel()}, own.options());
  group.all_gather(all, own, {}, "statistics of a batch").wait();
  all = all.to(x.device());
  const at::Tensor counts = all.narrow(1, 2 * channels, 1);  // [ranks, 1]
  Statistics made{{}, {}, group.to_host(counts.sum(), "statistics of a batch").item<double>()};
  if (is_without_data()) made.count = count * group.size();  // a dry run gathers no data
  require(made.count >= 2, "SyncBatchNorm: ", made.count,
          " values a channel over all ranks, expected 2 or more in training");
  made.mean = (all.narrow(1, 0, channels) * counts).sum(0) / made.count;
  const at::Tensor apart = (all.narrow(1, 0, channels) - made.mean).square_() * counts;
  made.variance = (all.narrow(1, channels, channels) + apart).sum(0) / made.count;
  return made;
}

class Normalize : public torch::autograd::Function<Normalize> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const at::Tensor& bias, const Statistics* statistics, double eps,
                            const std::shared_ptr<Communicator>& group) {
    const at::Tensor x = widened(input);
    const at::Tensor deviation = (statistics->variance + eps).rsqrt();
    context->save_for_backward({input, weight, statistics->mean, deviation});
    context->saved_data["count"] = statistics->count;
    context->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<Group>(group));
    at::Tensor y = (x - by_channel(statistics->mean, x)).mul_(by_channel(deviation, x));
    y.mul_(by_channel(weight, x)).add_(by_channel(bias, x));
    return y.to(input.scalar_type());
  }

  static tensor_list backward(AutogradContext* context, const tensor_list& gradients) {
    if (c10::GradMode::is_enabled())
      throw std::logic_error("SyncBatchNorm: a second derivative (create_graph) goes through all ranks' batches");
    const auto saved = context->get_saved_variables();
    const at::Tensor& input = saved[0];
    const at::Tensor& weight = saved[1];
    const at::Tensor dy = widened(gradients[0]), x = widened(input);
    const at::Tensor centred = (x - by_channel(saved[2], x)).mul_(by_channel(saved[3], x));
    const auto dims = all_but_channel(input);
    const at::Tensor sum = dy.sum(dims, false, at::kDouble), product = (dy * centred).sum(dims, false, at::kDouble);
    auto& group = *static_cast<Group&>(*context->saved_data["group"].toCapsule()).comm;
    at::Tensor sums = at::stack({sum, product}).to(group.device());
    group.all_reduce(sums, ReduceOp::kSum, "gradients of a batch's statistics").wait();
    sums = sums.to(x.device()) / context->saved_data["count"].toDouble();
    at::Tensor dx = (dy - by_channel(sums[0], x)).sub_(centred * by_channel(sums[1], x)).mul_(by_channel(saved[3], x));
    dx.mul_(by_channel(weight, x));
    return {dx.to(input.scalar_type()), product.to(weight.scalar_type()), sum.to(weight.scalar_type()), {}, {}, {}};
  }

 private:
  struct Group : torch::CustomClassHolder {
    explicit Group(std::shared_ptr<Communicator> group) : comm(std::move(group)) {}
    const std::shared_ptr<Communicator> comm;
  };
};

struct NormTensors {
  at::Tensor weight, bias;               // [C]; undefined if the module has none
  at::Tensor running_mean, running_var;  // [C]; undefined if the module keeps no statistics
};

// Normalizes a training batch by all ranks' statistics. Updates the running statistics by `momentum`. Collective.
at::Tensor normalized(const at::Tensor& input, const NormTensors& tensors, double momentum, double eps,
                      const std::shared_ptr<Communicator>& group) {
  require(group != nullptr, "SyncBatchNorm: the communicator is null");
  require(at::isFloatingType(input.scalar_type()), "SyncBatchNorm: the input is ", input.scalar_type(),
          ", expected a floating-point type");
  Statistics statistics;
  {
    at::NoGradGuard no_grad;
    statistics = over_ranks(input.detach(), *group);
    if (tensors.running_mean.defined()) {
      const double unbiased = statistics.count / (statistics.count - 1);
      const at::Tensor &mean = tensors.running_mean, &variance = tensors.running_var;
      mean.mul_(1 - momentum).add_(statistics.mean.to(mean.scalar_type()), momentum);
      variance.mul_(1 - momentum).add_((statistics.variance * unbiased).to(variance.scalar_type()), momentum);
    }
  }
  const auto none = input.options().requires_grad(false);
  const at::Tensor scale = tensors.weight.defined() ? tensors.weight : at::ones({input.size(1)}, none);
  const at::Tensor shift = tensors.bias.defined() ? tensors.bias : at::zeros({input.size(1)}, none);
  return Normalize::apply(input, scale, shift, &statistics, eps, group);
}

// Stands in for a BatchNorm's running mean, or for its weight if there is no running mean. at::batch_norm() in the
// module's forward() calls batch_norm() here: in training, with all ranks' statistics.
class SyncedBatchNorm : public StandIn {
 public:
  SyncedBatchNorm(std::weak_ptr<torch::nn::Module> owner, const at::Tensor& stands_for, NormTensors tensors,
                  std::shared_ptr<Communicator> group)
      : owner_(std::move(owner)), stands_for_(stands_for), tensors_(std::move(tensors)), group_(std::move(group)) {}

  at::Tensor values_for(const std::string&) const override { return stands_for_; }
  at::Tensor batch_norm(const at::Tensor& input, bool training, double momentum, double eps) override {
    const auto owner = owner_.lock();
    if (owner != nullptr && owner->is_training()) return normalized(input, tensors_, momentum, eps, group_);
    return at::batch_norm(input, tensors_.weight, tensors_.bias, tensors_.running_mean, tensors_.running_var, training,
                          momentum, eps, at::globalContext().userEnabledCuDNN());
  }
  const char* what_it_is() const override { return "a BatchNorm's over all ranks"; }

 private:
  const std::weak_ptr<torch::nn::Module> owner_;
  const at::Tensor stands_for_;  // the registered tensor that this object represents
  const NormTensors tensors_;
  const std::shared_ptr<Communicator> group_;
};

using Visit = std::function<void(const std::string& name, torch::nn::Module&)>;

void for_each_module(torch::nn::Module& root, const Visit& visit) {
  std::unordered_set<const torch::nn::Module*> seen;
  auto walk = [&](auto& self, torch::nn::Module& module, const std::string& name) -> void {
    if (!seen.insert(&module).second) return;
    visit(name, module);
    for (const auto& child : module.named_children())
      self(self, *child.value(), name.empty() ? child.key() : name + "." + child.key());
  };
  walk(walk, root, "");
}

// Calls act(module) if the module is a BatchNorm1d, BatchNorm2d or BatchNorm3d.
template <class Act>
void with_batch_norm(torch::nn::Module& module, Act act) {
  if (auto* norm = dynamic_cast<torch::nn::BatchNorm1dImpl*>(&module)) act(*norm);
  if (auto* norm = dynamic_cast<torch::nn::BatchNorm2dImpl*>(&module)) act(*norm);
  if (auto* norm = dynamic_cast<torch::nn::BatchNorm3dImpl*>(&module)) act(*norm);
}

// Returns the tensor that a stand-in replaces; undefined if the module has neither running mean nor weight.
template <class Norm>
at::Tensor& anchor_of(Norm& norm) {
  return norm.running_mean.defined() ? norm.running_mean : norm.weight;
}

}  // namespace

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  require(input.dim() >= 2 && input.size(1) == options.num_features(), "SyncBatchNorm: an input of shape ",
          input.sizes(), ", expected [N, ", options.num_features(), ", ...]");
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  if (!is_training()) return BatchNormImplBase::forward(input);
  _check_input_dim(input);
  double factor = options.momentum().value_or(0);
  if (num_batches_tracked.defined()) {
    at::NoGradGuard no_grad;
    num_batches_tracked += 1;
    if (!options.momentum()) factor = 1.0 / num_batches_tracked.item<double>();
  }
  return normalized(input, {weight, bias, running_mean, running_var}, factor, options.eps(), group_);
}

int convert_sync_batch_norm(torch::nn::Module& module, Communicator& comm) {
  std::string without;
  for_each_module(module, [&](const std::string& name, torch::nn::Module& child) {
    with_batch_norm(child, [&](auto& norm) {
      if (anchor_of(norm).defined() && !norm.weak_from_this().expired()) return;
      if (!without.empty()) without += ", ";
      without += name.empty() ? "(root)" : name;
    });
  });
  require(without.empty(), "convert_sync_batch_norm: ", without,
          ": neither running statistics nor weights, or held by no std::shared_ptr: nothing can stand for them, "
          "declare a tessera::SyncBatchNorm");
  const auto group = comm.split_by([](int) { return 0; });
  int count = 0;
  for_each_module(module, [&](const std::string& name, torch::nn::Module& child) {
    with_batch_norm(child, [&](auto& norm) {
      at::Tensor& anchor = anchor_of(norm);
      if (stand_in_of(anchor) != nullptr) return;
      const auto stand_in = std::make_shared<SyncedBatchNorm>(
          norm.weak_from_this(), anchor, NormTensors{norm.weight, norm.bias, norm.running_mean, norm.running_var},
          group);
      const OrdinaryScope ordinary;
      anchor = stand_in_view(
          stand_in,
          (name.empty() ? "" : name + ".") + std::string(norm.running_mean.defined() ? "running_mean" : "weight"),
          device_of_values(anchor), anchor.scalar_type(), anchor.sizes());
      ++count;
    });
  });
  return count;
}

}  // namespace tessera
