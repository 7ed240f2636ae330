#include "tessera/sdp/sync_batch_norm.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

// [C] as [1, C, 1, ...].
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

// The computation is in double for double, else in fp32.
at::Tensor widened(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? input : input.to(at::kFloat);
}

struct Statistics {
  at::Tensor mean, variance;  // [C], double; the variance biased
  double count = 0;           // values of a channel, over all ranks
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
  Statistics made{{}, {}, counts.sum().item<double>()};
  if (made.count < 2)
    throw std::invalid_argument(
        c10::str("SyncBatchNorm: ", made.count, " values a channel over all ranks, expected 2 or more in training"));
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

}  // namespace

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  if (input.dim() < 2 || input.size(1) != options.num_features())
    throw std::invalid_argument(c10::str("SyncBatchNorm: an input of shape ", input.sizes(), ", expected [N, ",
                                         options.num_features(), ", ...]"));
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  if (!is_training()) return BatchNormImplBase::forward(input);
  _check_input_dim(input);
  Statistics statistics;
  {
    at::NoGradGuard no_grad;
    statistics = over_ranks(input.detach(), *group_);
    if (running_mean.defined()) {
      num_batches_tracked += 1;
      const double factor = options.momentum() ? *options.momentum() : 1.0 / num_batches_tracked.item<double>();
      const double unbiased = statistics.count / (statistics.count - 1);
      running_mean.mul_(1 - factor).add_(statistics.mean.to(running_mean.scalar_type()), factor);
      running_var.mul_(1 - factor).add_((statistics.variance * unbiased).to(running_var.scalar_type()), factor);
    }
  }
  const auto none = input.options().requires_grad(false);
  const at::Tensor scale = weight.defined() ? weight : at::ones({options.num_features()}, none);
  const at::Tensor shift = bias.defined() ? bias : at::zeros({options.num_features()}, none);
  return Normalize::apply(input, scale, shift, &statistics, options.eps(), group_);
}

namespace {

template <class Module>
std::shared_ptr<SyncBatchNormImpl> converted(const torch::nn::Module& module,
                                             const std::shared_ptr<Communicator>& group) {
  const auto* norm = dynamic_cast<const Module*>(&module);
  if (norm == nullptr) return nullptr;
  auto made = std::make_shared<SyncBatchNormImpl>(norm->options, group);
  at::NoGradGuard no_grad;
  auto take = [](const at::Tensor& from, at::Tensor& to) {
    if (!from.defined()) return;
    to.set_data(from.detach().clone());
    to.set_requires_grad(from.requires_grad());
  };
  take(norm->weight, made->weight), take(norm->bias, made->bias);
  take(norm->running_mean, made->running_mean), take(norm->running_var, made->running_var);
  take(norm->num_batches_tracked, made->num_batches_tracked);
  made->train(norm->is_training());
  return made;
}

std::shared_ptr<SyncBatchNormImpl> any_converted(const torch::nn::Module& module,
                                                 const std::shared_ptr<Communicator>& group) {
  if (auto made = converted<torch::nn::BatchNorm1dImpl>(module, group)) return made;
  if (auto made = converted<torch::nn::BatchNorm2dImpl>(module, group)) return made;
  return converted<torch::nn::BatchNorm3dImpl>(module, group);
}

// Calls visit(name, child, its place in a Sequential or null) for all below.
void for_each_child(torch::nn::Module& module, const std::string& prefix,
                    const std::function<void(const std::string&, torch::nn::Module& parent, const std::string& key,
                                             torch::nn::Module& child, torch::nn::AnyModule*)>& visit) {
  auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(&module);
  size_t place = 0;
  for (const auto& item : module.named_children()) {
    torch::nn::AnyModule* slot = sequential == nullptr ? nullptr : &*(sequential->begin() + static_cast<int>(place++));
    visit(prefix + item.key(), module, item.key(), *item.value(), slot);
    for_each_child(*item.value(), prefix + item.key() + ".", visit);
  }
}

}  // namespace

int convert_sync_batch_norm(torch::nn::Module& module, Communicator& comm) {
  std::string members;
  for_each_child(module, "",
                 [&](const std::string& name, torch::nn::Module&, const std::string&, torch::nn::Module& child,
                     torch::nn::AnyModule* slot) {
                   if (slot == nullptr && any_converted(child, nullptr)) {
                     if (!members.empty()) members += ", ";
                     members += name;
                   }
                 });
  if (!members.empty())
    throw std::invalid_argument("convert_sync_batch_norm: " + members +
                                ": a class calls its members as what they are, declare them tessera::SyncBatchNorm");
  const auto group = comm.split_by([](int) { return 0; });
  int count = 0;
  for_each_child(module, "",
                 [&](const std::string&, torch::nn::Module& parent, const std::string& key, torch::nn::Module& child,
                     torch::nn::AnyModule* slot) {
                   const auto made = any_converted(child, group);
                   if (!made) return;
                   *slot = torch::nn::AnyModule(parent.replace_module(key, made));
                   ++count;
                 });
  return count;
}

}  // namespace tessera
