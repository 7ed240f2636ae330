#include "tessera/optim/step_in_backward.h"

#include <ATen/Parallel.h>

#include <exception>
#include <utility>

namespace tessera {

StepInBackward::StepInBackward(GradientSource& source, PartialStep& optimizer, StepInBackwardOptions options)
    : source_(source), optimizer_(optimizer), options_(options) {
  subscription_.emplace(
      source.on_gradients([this](const std::vector<at::Tensor>& parameters) { arrived(parameters); }));
  // As many threads for a step as the caller would take.
  worker_.add([threads = at::get_num_threads()] { at::set_num_threads(threads); }).get();
}

StepInBackward::~StepInBackward() { subscription_.reset(); }

void StepInBackward::arrived(const std::vector<at::Tensor>& parameters) {
  if (options_.max_norm) {
    deferred_.insert(deferred_.end(), parameters.begin(), parameters.end());
  } else {
    steps_.push_back(worker_.add([this, parameters] { optimizer_.step_parameters(parameters); }));
  }
}

// A step that fails does not keep the others from being taken.
void StepInBackward::wait_for_steps() {
  std::exception_ptr failure;
  for (std::future<void>& step : std::exchange(steps_, {})) {
    try {
      step.get();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

std::optional<double> StepInBackward::finish() {
  if (!options_.max_norm) {
    wait_for_steps();
    return std::nullopt;
  }
  const double norm =
      source_.clip_grad_norm_on_device_(*options_.max_norm, options_.norm_type, /*error_if_nonfinite=*/false);
  optimizer_.step_parameters(std::exchange(deferred_, {}));
  return norm;
}

}  // namespace tessera
