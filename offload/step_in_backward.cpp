#include "tessera/offload/step_in_backward.h"

#include <ATen/Parallel.h>

#include <utility>

namespace tessera {

StepInBackward::StepInBackward(GradientSource& source, PartialStep& optimizer, StepInBackwardOptions options)
    : source_(source), optimizer_(optimizer), options_(options) {
  subscription_.emplace(source.on_gradients([this](const std::vector<at::Tensor>& parameters) { arrived(parameters); }));
  // As many threads for a step as the caller would take.
  worker_ = std::thread([this, threads = at::get_num_threads()] { run(threads); });
}

StepInBackward::~StepInBackward() {
  subscription_.reset();
  {
    std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  worker_.join();
}

void StepInBackward::arrived(const std::vector<at::Tensor>& parameters) {
  if (options_.max_norm) {
    deferred_.insert(deferred_.end(), parameters.begin(), parameters.end());
    return;
  }
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(parameters);
  }
  changed_.notify_all();
}

void StepInBackward::run(int threads) {
  at::set_num_threads(threads);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return is_closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::vector<at::Tensor> parameters = std::move(queue_.front());
    queue_.pop_front();
    is_stepping_ = true;
    lock.unlock();
    std::exception_ptr failure;
    try {
      optimizer_.step_parameters(parameters);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    is_stepping_ = false;
    if (failure && !failure_) failure_ = failure;
    changed_.notify_all();
  }
}

void StepInBackward::wait_until_idle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty() && !is_stepping_; });
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

std::optional<double> StepInBackward::finish() {
  if (!options_.max_norm) {
    wait_until_idle();
    return std::nullopt;
  }
  const double norm = source_.clip_grad_norm_(*options_.max_norm, options_.norm_type, /*error_if_nonfinite=*/false);
  optimizer_.step_parameters(std::exchange(deferred_, {}));
  return norm;
}

}  // namespace tessera
