#include "trainer.h"

#include <tessera/tessera.h>
#include "optim/state/optimizer_state.h"

namespace train_step {
namespace {

int64_t bytes_of(torch::optim::Optimizer& optimizer) {
  int64_t bytes = 0;
  for (const auto& [parameter, state] : optimizer.state())
    for (const auto& [name, tensor] : tessera::read_state(*state).tensors)
      bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

double sum_of(const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  double sum = 0;
  for (const auto& entry : tensors) sum += entry.value().detach().sum(torch::kFloat64).item<double>();
  return sum;
}

// The baseline: trains without a wrapper.
class Local : public Trainer {
 public:
  explicit Local(const Options& options) : model_(make_model(options)) {
    if (options.optimizer == "adam") {
      optimizer_ = std::make_unique<tessera::Adam>(model_->parameters(), torch::optim::AdamOptions(1e-3));
    } else {
      optimizer_ = std::make_unique<torch::optim::SGD>(model_->parameters(), torch::optim::SGDOptions(1e-2));
    }
  }

  at::Tensor step(const Batch& batch) override {
    auto loss = model_->forward(batch.inputs, batch.targets);
    loss.backward();
    optimizer_->step();
    return loss.detach();
  }
  void zero_grad() override { model_->zero_grad(); }
  tessera::MemoryReport memory() const override {
    tessera::MemoryReport report;
    for (const auto& parameter : model_->parameters()) {
      report.shard_bytes += static_cast<int64_t>(parameter.nbytes());
      if (parameter.grad().defined()) report.grad_bytes += static_cast<int64_t>(parameter.grad().nbytes());
    }
    report.unsharded_bytes = report.shard_bytes;
    return report;
  }
  std::vector<tessera::NamedShard> shards() const override {
    std::vector<tessera::NamedShard> shards;
    for (const auto& entry : model_->named_parameters()) {
      const at::Tensor& parameter = entry.value();
      shards.push_back(
          {entry.key(), {}, parameter.sizes().vec(), parameter.strides().vec(), {0, parameter.numel()}, parameter});
    }
    return shards;
  }
  int64_t optimizer_bytes() override { return bytes_of(*optimizer_); }
  double parameter_sum() override { return sum_of(model_->named_parameters()); }

 private:
  Model model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

template <class Optimizer>
class Wrapped : public Trainer {
 public:
  using Zero = tessera::Zero<Model, Optimizer>;
  template <class OptimizerOptions>
  Wrapped(Model model, const OptimizerOptions& optimizer, const std::shared_ptr<tessera::Communicator>& comm,
          const tessera::ZeroOptions& options)
      : zero_(std::move(model), optimizer, comm, options) {}

  at::Tensor step(const Batch& batch) override {
    auto loss = zero_.forward(batch.inputs, batch.targets);
    loss.backward();
    zero_.step();
    return loss.detach();
  }
  void zero_grad() override { zero_.zero_grad(); }
  tessera::MemoryReport memory() const override { return zero_.memory(); }
  std::vector<tessera::NamedShard> shards() const override { return zero_.named_shards(); }
  int64_t optimizer_bytes() override { return bytes_of(zero_.optimizer()); }
  double parameter_sum() override { return sum_of(zero_.full_state_dict()); }

 private:
  Zero zero_;
};

tessera::ZeroOptions zero_options(const Options& options) {
  tessera::ZeroOptions zero;
  zero.stage = options.wrapper == "ddp" ? 0 : options.wrapper == "oss" ? 1 : options.wrapper == "sdp" ? 2 : 3;
  zero.fsdp.auto_wrap = units_of(options);
  zero.fsdp.prefetch = options.prefetch;
  if (options.int8_wire) {
    zero.fsdp.wire = {tessera::WireFormat::kInt8Blocks, tessera::WireFormat::kInt8Blocks};
    zero.sdp.wire = tessera::WireFormat::kInt8Blocks;
  }
  zero.fsdp.reshard_after_forward = options.reshard;
  return zero;
}

}  // namespace

std::unique_ptr<Trainer> make_trainer(const Options& options, const std::shared_ptr<tessera::Communicator>& comm) {
  std::unique_ptr<Trainer> trainer;
  torch::manual_seed(0);  // gives all ranks equal initial values
  const auto model = [&] { return make_model(options); };
  if (options.wrapper == "local") {
    trainer = std::make_unique<Local>(options);
  } else {
    Model made = options.wrapper == "fsdp" && options.deferred ? tessera::deferred(model) : model();
    if (options.optimizer == "adam") {
      trainer =
          std::make_unique<Wrapped<tessera::Adam>>(made, torch::optim::AdamOptions(1e-3), comm, zero_options(options));
    } else {
      trainer = std::make_unique<Wrapped<torch::optim::SGD>>(made, torch::optim::SGDOptions(1e-2), comm,
                                                             zero_options(options));
    }
  }
  set_values(options, trainer->shards());
  return trainer;
}

}  // namespace train_step
