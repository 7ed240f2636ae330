// Measures the step of one model under one of Tessera's wrappers, for bench/gpu/run.py, which lists the settings:
//
//     gpu_bench device=cuda model=gpt layers=12 width=768 heads=12 vocabulary=50304 context=1024 batch=16 wrapper=fsdp
//
// One rank, so the figures show the overhead of a wrapper over the kernels. bench/gpu/peers.py takes the same settings
// and trains the same models under PyTorch. Prints one line of JSON. trace=FILE also writes a profile of two steps.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <tessera/tessera.h>
#include "bench/number_argument.h"
#include "gpt.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr double kLargestNorm = 100;  // as in peers.py; so large that no step is clipped or repeated

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
    if (!has(name)) return 0;
    const auto number = number_in<double>(text(name));
    if (!number) throw std::invalid_argument("gpu_bench: " + name + "=" + text(name) + "; expected a number");
    return *number;
  }
  bool has(const std::string& name) const { return values_.contains(name); }
  bool flag(const std::string& name) const { return has(name) && number(name) != 0; }

 private:
  std::map<std::string, std::string> values_;
};

// Replaces at::uniform_() and at::normal_() for large tensors by hashes of the index, uniform in [from, to). libtorch
// draws random values on one thread. For billions of values, this takes longer than the steps.
at::Tensor& fill(at::Tensor& self, double from, double to) {
  if (self.scalar_type() != at::kFloat || !self.is_contiguous()) {
    at::Tensor values = at::empty(self.sizes(), self.options().dtype(at::kFloat));
    return self.copy_(fill(values, from, to));
  }
  float* const values = self.data_ptr<float>();
  at::parallel_for(0, self.numel(), 1 << 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      uint64_t hash = static_cast<uint64_t>(i + 1) * 0x9E3779B97F4A7C15U;  // SplitMix64
      hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9U;
      hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EBU;
      values[i] = static_cast<float>(from + (to - from) * (static_cast<double>(hash >> 40) * 0x1p-24));
    }
  });
  return self;
}
at::Tensor& fill_uniform(at::Tensor& self, double from, double to, std::optional<at::Generator> /*generator*/) {
  return fill(self, from, to);
}
at::Tensor& fill_normal(at::Tensor& self, double mean, double std, std::optional<at::Generator> /*generator*/) {
  return fill(self, mean - std::sqrt(3) * std, mean + std::sqrt(3) * std);
}
TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("uniform_", TORCH_FN(fill_uniform));
  library.impl("normal_", TORCH_FN(fill_normal));
}

void synchronize(at::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

double milliseconds_since(Clock::time_point began) {
  return std::chrono::duration<double, std::milli>(Clock::now() - began).count();
}

// Results of measure(). Times are means over steps after a warm-up.
struct Measured {
  double step_ms = 0;
  double host_ms = 0;  // time in which the host launches a step that begins on an idle device
  // Peak device memory of tensors. With `captured`, the peak of the allocator's reserved memory, because the allocator
  // does not count the tensors of a graph. 0 on CPUs.
  int64_t peak_bytes = 0;
  double suggested_fraction = 0;  // with in_backward: StepInBackward::suggested_device_fraction()
  int64_t times_taken_back = 0;   // with in_backward: number of steps that were undone, including warm-up
};

// Writes a profile of two steps, which chrome://tracing shows: the operators of the host and the kernels of the device.
void write_trace(const std::string& path, at::Device device, const std::function<void()>& step) {
  using namespace torch::profiler::impl;
  const ProfilerConfig config(ProfilerState::KINETO);
  const std::set<ActivityType> activities{ActivityType::CPU, ActivityType::CUDA};
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
  for (int i = 0; i < 2; ++i) step();
  synchronize(device);
  torch::autograd::profiler::disableProfiler()->save(path);
}

Measured measure(const Settings& settings, at::Device device, const std::function<void()>& step) {
  const int64_t steps = settings.number("steps");
  const auto warm_up = std::max<int64_t>(5, steps / 4);  // CapturedStep captures in its fourth step
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
    const auto& bytes = settings.flag("captured") ? stats.reserved_bytes : stats.allocated_bytes;
    measured.peak_bytes = bytes[static_cast<size_t>(StatType::AGGREGATE)].peak;
  }
  if (settings.has("trace")) write_trace(settings.text("trace"), device, step);
  return measured;
}

// Returns the highest rate of the GPU in operations per second, measured in products of large matrices.
double matmul_rate(const Settings& settings, at::Device device) {
  const int64_t width = settings.number("width");
  const auto options = at::TensorOptions().dtype(at::kBFloat16).device(device);
  const at::Tensor a = torch::randn({width, width}, options), b = torch::randn({width, width}, options);
  at::Tensor c = torch::empty({width, width}, options);
  const Measured measured = measure(settings, device, [&] { at::matmul_out(c, a, b); });
  return 2.0 * static_cast<double>(width * width * width) / (measured.step_ms / 1e3);
}

// A GPT and its batch. Computes the loss of a forward.
struct GptLoss {
  explicit GptLoss(const Settings& settings)
      : model(train_gpt::GptOptions{.vocabulary = settings.number("vocabulary"),
                                    .layers = settings.number("layers"),
                                    .width = settings.number("width"),
                                    .heads = settings.number("heads"),
                                    .context = settings.number("context"),
                                    .tie = true}),
        inputs(torch::randint(settings.number("vocabulary"), {settings.number("batch"), settings.number("context") + 1},
                              at::kLong)) {}
  template <class Wrapper>
  static at::Tensor of(Wrapper& wrapper, const at::Tensor& tokens) {
    const at::Tensor logits = wrapper(tokens.slice(1, 0, -1));
    return at::cross_entropy_loss(logits.flatten(0, 1), tokens.slice(1, 1).flatten());
  }
  static auto units() { return tessera::wrap_modules<train_gpt::BlockImpl>(); }
  train_gpt::Gpt model;
  at::Tensor inputs;
};

// A chain of linear layers of equal width, or a small network whose step is mostly the host's launches. The small one
// has `width` inputs, half as many hidden values, and 10 outputs.
struct LayersLoss {
  explicit LayersLoss(const Settings& settings) {
    const int64_t width = settings.number("width");
    if (settings.text("model") == "mlp") {
      model->push_back(torch::nn::Linear(width, width / 2));
      model->push_back(torch::nn::ReLU());
      model->push_back(torch::nn::Linear(width / 2, 10));
    } else {
      for (int64_t i = 0; i < settings.number("layers"); ++i) model->push_back(torch::nn::Linear(width, width));
    }
    inputs = torch::randn({settings.number("batch"), width});
  }
  template <class Wrapper>
  static at::Tensor of(Wrapper& wrapper, const at::Tensor& x) {
    return wrapper(x).square().mean();
  }
  static auto units() { return tessera::wrap_modules<torch::nn::LinearImpl>(); }
  torch::nn::Sequential model;
  at::Tensor inputs;
};

template <class Loss>
Measured measure_wrapper(const Settings& settings, const std::shared_ptr<tessera::Communicator>& comm, Loss& loss) {
  const torch::optim::AdamWOptions adam(1e-4);
  const std::string& wrapper = settings.text("wrapper");
  const bool offloads = settings.flag("offload");
  loss.inputs = loss.inputs.to(comm->device());
  const auto loss_of = [&](auto& wrapped, bool casts, const at::Tensor& inputs) {
    const tessera::Autocast autocast(comm->device().type(), at::kBFloat16, casts);
    return loss.of(wrapped, inputs);
  };
  const auto run = [&](auto& wrapped, torch::optim::Optimizer& optimizer, bool casts,
                       const std::function<void()>& clip_and_step) {
    return measure(settings, comm->device(), [&] {
      optimizer.zero_grad();
      loss_of(wrapped, casts, loss.inputs).backward();
      clip_and_step();
    });
  };
  const auto run_plain = [&](auto& wrapped, torch::optim::Optimizer& optimizer, bool casts) {
    if (settings.flag("captured")) {
      tessera::CapturedStep step(
          wrapped, optimizer, [&](const auto& in) { return loss_of(wrapped, casts, in[0]); }, kLargestNorm);
      return measure(settings, comm->device(), [&] { step({loss.inputs}); });
    }
    return run(wrapped, optimizer, casts, [&] {
      wrapped.clip_grad_norm_on_device_(kLargestNorm);
      optimizer.step();
    });
  };
  loss.model->to(comm->device());
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
    } else if (model == "chain" || model == "mlp") {
      result = result_of<LayersLoss>(settings, comm);
    } else {
      throw std::invalid_argument("gpu_bench: model=" + model + "; expected matmul, gpt, chain or mlp");
    }
    std::printf("%s\n", result.dump().c_str());
    return 0;
  });
}
