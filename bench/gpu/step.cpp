// Measures the step of one model under one of Tessera's wrappers, for bench/gpu/run.py, which lists the settings:
//
//     gpu_bench device=cuda model=gpt layers=12 width=768 heads=12 vocabulary=50304 context=1024 batch=16 wrapper=fsdp
//
// One rank, so the figures show the overhead of a wrapper over the kernels. bench/gpu/peers.py takes the same settings
// and trains the same models under PyTorch. Prints one line of JSON.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include <tessera/tessera.h>
#include "bench/number_argument.h"
#include "gpt.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr double kLargestNorm = 100;  // as in peers.py: clips no step, and StepInBackward repeats none

class Settings {
 public:
  Settings(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string word = argv[i];
      const auto equals = word.find('=');
      if (equals == std::string::npos)
        throw std::invalid_argument("gpu_bench: '" + word + "' is not of the form name=value");
      values_[word.substr(0, equals)] = word.substr(equals + 1);
    }
  }
  const std::string& text(const std::string& name) const {
    const auto found = values_.find(name);
    if (found == values_.end()) throw std::invalid_argument("gpu_bench: there is no setting " + name + "=");
    return found->second;
  }
  int64_t number(const std::string& name) const {
    const std::string& value = text(name);
    const auto number = number_in<int64_t>(value);
    if (!number) throw std::invalid_argument("gpu_bench: " + name + "=" + value + "; expected a whole number");
    return *number;
  }
  double real(const std::string& name) const {
    if (!values_.contains(name)) return 0;
    const auto number = number_in<double>(text(name));
    if (!number) throw std::invalid_argument("gpu_bench: " + name + "=" + text(name) + "; expected a number");
    return *number;
  }
  bool flag(const std::string& name) const { return values_.contains(name) && number(name) != 0; }

 private:
  std::map<std::string, std::string> values_;
};

void synchronize(at::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

double milliseconds_since(Clock::time_point began) {
  return std::chrono::duration<double, std::milli>(Clock::now() - began).count();
}

// The means over `steps`, after a warm-up.
struct Measured {
  double step_ms = 0;
  double host_ms = 0;             // until the host has started all work of a step that begins with an idle device
  int64_t peak_bytes = 0;         // device memory of tensors; 0 on CPUs
  double suggested_fraction = 0;  // with in_backward: StepInBackward::suggested_device_fraction()
  int64_t times_taken_back = 0;   // with in_backward: of all steps, warm-up included
};

Measured measure(int64_t steps, at::Device device, const std::function<void()>& step) {
  const auto warm_up = std::max<int64_t>(2, steps / 4);
  for (int64_t i = 0; i < warm_up; ++i) step();
  synchronize(device);
  if (!device.is_cpu()) c10::getDeviceAllocator(device.type())->resetPeakStats(device.index());
  Measured measured;
  const auto began = Clock::now();
  for (int64_t i = 0; i < steps; ++i) step();
  synchronize(device);
  measured.step_ms = milliseconds_since(began) / static_cast<double>(steps);
  for (int64_t i = 0; i < warm_up; ++i) {
    const auto idle = Clock::now();
    step();
    measured.host_ms += milliseconds_since(idle) / static_cast<double>(warm_up);
    synchronize(device);
  }
  if (!device.is_cpu()) {
    using c10::CachingAllocator::StatType;
    const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
    measured.peak_bytes = stats.allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)].peak;
  }
  return measured;
}

// The rate that the card reaches at best, in a product of large matrices: operations a second.
double matmul_rate(const Settings& settings, at::Device device) {
  const int64_t width = settings.number("width");
  const auto options = at::TensorOptions().dtype(at::kBFloat16).device(device);
  const at::Tensor a = torch::randn({width, width}, options), b = torch::randn({width, width}, options);
  at::Tensor c = torch::empty({width, width}, options);
  const Measured measured = measure(settings.number("steps"), device, [&] { at::matmul_out(c, a, b); });
  return 2.0 * static_cast<double>(width * width * width) / (measured.step_ms / 1e3);
}

// A model and its batch: the loss of a forward.
struct GptLoss {
  explicit GptLoss(const Settings& settings)
      : model(train_gpt::GptOptions{.vocabulary = settings.number("vocabulary"),
                                    .layers = settings.number("layers"),
                                    .width = settings.number("width"),
                                    .heads = settings.number("heads"),
                                    .context = settings.number("context"),
                                    .tie = true}),
        tokens(torch::randint(settings.number("vocabulary"), {settings.number("batch"), settings.number("context") + 1},
                              at::kLong)) {}
  void to(at::Device device) { tokens = tokens.to(device); }
  template <class Wrapper>
  at::Tensor operator()(Wrapper& wrapper) const {
    const at::Tensor logits = wrapper(tokens.slice(1, 0, -1));
    return at::cross_entropy_loss(logits.flatten(0, 1), tokens.slice(1, 1).flatten());
  }
  static auto units() { return tessera::wrap_modules<train_gpt::BlockImpl>(); }
  train_gpt::Gpt model;
  at::Tensor tokens;
};

struct ChainLoss {
  explicit ChainLoss(const Settings& settings) {
    const int64_t width = settings.number("width");
    for (int64_t i = 0; i < settings.number("layers"); ++i) model->push_back(torch::nn::Linear(width, width));
    x = torch::randn({settings.number("batch"), width});
  }
  void to(at::Device device) { x = x.to(device); }
  template <class Wrapper>
  at::Tensor operator()(Wrapper& wrapper) const {
    return wrapper(x).square().mean();
  }
  static auto units() { return tessera::wrap_modules<torch::nn::LinearImpl>(); }
  torch::nn::Sequential model;
  at::Tensor x;
};

template <class Loss>
Measured measure_wrapper(const Settings& settings, const std::shared_ptr<tessera::Communicator>& comm, Loss& loss) {
  const torch::optim::AdamWOptions adam(1e-4);
  const std::string& wrapper = settings.text("wrapper");
  const bool offloads = settings.flag("offload");
  const auto run = [&](auto& wrapped, torch::optim::Optimizer& optimizer, bool casts,
                       const std::function<void()>& clip_and_step) {
    return measure(settings.number("steps"), comm->device(), [&] {
      optimizer.zero_grad();
      at::Tensor value;
      {
        const tessera::Autocast autocast(comm->device().type(), at::kBFloat16, casts);
        value = loss(wrapped);
      }
      value.backward();
      clip_and_step();
    });
  };
  const auto run_plain = [&](auto& wrapped, torch::optim::Optimizer& optimizer, bool casts) {
    return run(wrapped, optimizer, casts, [&] {
      wrapped.clip_grad_norm_on_device_(kLargestNorm);
      optimizer.step();
    });
  };
  loss.to(comm->device());
  if (!offloads) loss.model->to(comm->device());
  if (wrapper == "fsdp") {
    tessera::FsdpOptions options;
    options.auto_wrap = Loss::units();
    options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    options.offload = {.params = offloads, .grads = offloads, .device_fraction = settings.real("device_fraction")};
    options.reshard_after_forward = !settings.flag("kept");
    tessera::FullyShardedDataParallel fsdp(loss.model, comm, options);
    if (offloads) {
      tessera::HostAdamW optimizer(fsdp.parameters(), adam);
      if (!settings.flag("in_backward")) return run_plain(fsdp, optimizer, false);
      tessera::StepInBackward step(fsdp, optimizer, {.max_norm = kLargestNorm, .speculative = true});
      Measured measured = run(fsdp, optimizer, false, [&] { step.finish(); });
      measured.suggested_fraction = step.suggested_device_fraction();
      measured.times_taken_back = step.times_taken_back();
      return measured;
    }
    tessera::AdamW optimizer(fsdp.parameters(), adam);
    return run_plain(fsdp, optimizer, false);
  }
  if (offloads) throw std::invalid_argument("gpu_bench: offload=1 needs wrapper=fsdp");
  if (wrapper == "ddp") {
    tessera::DistributedDataParallel ddp(loss.model, comm);
    tessera::AdamW optimizer(ddp.parameters(), adam);
    return run_plain(ddp, optimizer, true);
  }
  if (wrapper != "sdp") throw std::invalid_argument("gpu_bench: wrapper=" + wrapper + "; expected fsdp, ddp or sdp");
  tessera::OSS<tessera::AdamW> optimizer(loss.model->parameters(), adam, comm);
  tessera::ShardedDataParallel sdp(loss.model, optimizer, comm);
  return run_plain(sdp, optimizer, true);
}

template <class Loss>
nlohmann::json result_of(const Settings& settings, const std::shared_ptr<tessera::Communicator>& comm) {
  torch::manual_seed(0);
  Loss loss(settings);
  int64_t numel = 0;
  for (const at::Tensor& parameter : loss.model->parameters()) numel += parameter.numel();
  const Measured measured = measure_wrapper(settings, comm, loss);
  return {{"parameters", numel},
          {"step_ms", measured.step_ms},
          {"host_ms", measured.host_ms},
          {"peak_bytes", measured.peak_bytes},
          {"suggested_fraction", measured.suggested_fraction},
          {"times_taken_back", measured.times_taken_back}};
}

}  // namespace

int main(int argc, char** argv) {
  return tessera::run_main([&] {
    const Settings settings(argc, argv);
    tessera::InitOptions options;
    options.device = at::Device(settings.text("device"));
    const auto comm = tessera::init(options);
    const std::string& model = settings.text("model");
    nlohmann::json result;
    if (model == "matmul") {
      result = {{"flops", matmul_rate(settings, comm->device())}};
    } else if (model == "gpt") {
      result = result_of<GptLoss>(settings, comm);
    } else if (model == "chain") {
      result = result_of<ChainLoss>(settings, comm);
    } else {
      throw std::invalid_argument("gpu_bench: model=" + model + "; expected matmul, gpt or chain");
    }
    std::printf("%s\n", result.dump().c_str());
    return 0;
  });
}
