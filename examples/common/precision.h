// The device and precision of train_gpt and finetune.
#pragma once

#include <ATen/core/Tensor.h>

#include <boost/program_options/options_description.hpp>
#include <memory>
#include <optional>
#include <string>

#include <tessera/autocast.h>
#include <tessera/communicator.h>
#include <tessera/fsdp.h>
#include <tessera/optim/sharded_grad_scaler.h>

namespace examples {

// The device of ranks. kAuto: a GPU for each rank if CUDA is available, else the CPU.
enum class DeviceKind { kAuto, kCpu, kCuda };

// The floating-point type of forward and backward. Parameters, their gradients and the optimizer's state are fp32.
enum class Precision { kFloat, kBFloat16, kHalf };

const char* name_of(Precision precision);

struct ComputeOptions {
  DeviceKind device = DeviceKind::kAuto;
  std::optional<Precision> precision;  // default: kBFloat16 on a GPU, kFloat on the CPU

  // The value of InitOptions::device: a GPU, or nullopt for the CPU.
  std::optional<at::Device> device_of_ranks() const;
  Precision precision_on(at::Device place) const {
    return precision.value_or(place.is_cuda() ? Precision::kBFloat16 : Precision::kFloat);
  }
};

// Add --device or --dtype to `description`. po::notify() writes its value to `options`, and throws OptionsError if the
// value is unknown.
void describe_device(boost::program_options::options_description& description, ComputeOptions& options);
void describe_precision(boost::program_options::options_description& description, ComputeOptions& options);

// Returns a text like "cuda:0, bf16, parameters and optimizer fp32".
std::string describe(const std::string& device, Precision precision);

// Runs forward, backward and steps in a precision. In fp16, scales losses and skips steps with infinite gradients. If
// `autocasts`, computes under autocast; not needed if FSDP casts the unsharded parameters (of_units()).
class Mixed {
 public:
  Mixed(Precision precision, const std::shared_ptr<tessera::Communicator>& comm, bool autocasts);

  // Returns the option for FSDP that casts units to this precision.
  tessera::MixedPrecision of_units() const;
  // Returns compute(), which runs a forward. Calls it under autocast if `autocasts`.
  template <class Compute>
  auto compute(Compute compute) const {
    std::optional<tessera::Autocast> autocast;
    if (dtype_ && autocasts_) autocast.emplace(device_, dtype_);
    return compute();
  }
  void backward(const at::Tensor& loss) const { (scaler_ ? scaler_->scale(loss) : loss).backward(); }
  void before_clipping(torch::optim::Optimizer& optimizer) {
    if (scaler_) scaler_->unscale_(optimizer);
  }
  void step(torch::optim::Optimizer& optimizer) {
    if (!scaler_) return static_cast<void>(optimizer.step());
    scaler_->step(optimizer);
    scaler_->update();
  }
  // Returns null except in fp16.
  tessera::ShardedGradScaler* scaler() { return scaler_ ? &*scaler_ : nullptr; }

 private:
  at::DeviceType device_;
  std::optional<at::ScalarType> dtype_;  // nullopt: fp32
  bool autocasts_;
  std::optional<tessera::ShardedGradScaler> scaler_;  // has a value in fp16 only
};

}  // namespace examples
