#include <tessera/optim/step_in_backward.h>

#include <ATen/Parallel.h>
#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>
#include <typeinfo>
#include <utility>

#include "core/memory/memory_kind_scope.h"
#include "core/memory/without_data.h"
#include "core/model/shard_norm.h"
#include "core/runtime/require.h"
#include "core/runtime/task_queue.h"
#include "core/runtime/warn.h"

using SetThreads = void(int) noexcept;
extern "C" SetThreads omp_set_num_threads;  // of libtorch's OpenMP; not every clang has omp.h

namespace tessera {
using namespace internal;
namespace {

std::unique_ptr<PartialStep::RevocableSteps> speculation_of(PartialStep& optimizer,
                                                            const StepInBackwardOptions& options) {
  if (!options.speculative) return nullptr;
  require(options.max_norm.has_value(),
          "StepInBackward: speculative without max_norm, expected both: no step has to wait where nothing is clipped");
  auto steps = optimizer.revocable_steps();
  require(
      steps != nullptr, "StepInBackward: speculative with a ", c10::demangle(typeid(optimizer).name()),
      ", expected an optimizer whose steps can be taken back (PartialStep::revocable_steps): HostAdam or HostAdamW");
  return steps;
}

// Pins the calling thread, and threads that it starts later (for example in parallel_over()), to `processors`.
void run_on(const std::vector<int>& processors) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int processor : processors)
    if (processor >= 0 && processor < CPU_SETSIZE) CPU_SET(processor, &set);
  if (sched_setaffinity(0, sizeof(set), &set) != 0)
    throw std::system_error(errno, std::generic_category(), "StepInBackward: sched_setaffinity");
}

using std::chrono::steady_clock;
double seconds_since(steady_clock::time_point began) {
  return std::chrono::duration<double>(steady_clock::now() - began).count();
}

int64_t elements_of(const std::vector<at::Tensor>& parameters) {
  int64_t elements = 0;
  for (const at::Tensor& parameter : parameters) elements += parameter.numel();
  return elements;
}

// Returns those of `parameters` that are in host memory, or those that are on a device.
std::vector<at::Tensor> chosen(std::vector<at::Tensor> parameters, bool on_host) {
  std::erase_if(parameters, [&](const at::Tensor& parameter) { return parameter.is_cpu() != on_host; });
  return parameters;
}

[[noreturn]] void throw_second_backward(const at::Tensor& parameter) {
  throw std::logic_error(
      c10::str("StepInBackward: a parameter of shape ", parameter.sizes(),
               " has a gradient of a second backward before finish(), expected finish() after each backward, or "
               "no_sync() in the first"));
}

void require_usable(const std::vector<int>& processors) {
  cpu_set_t usable;
  CPU_ZERO(&usable);
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0)
    throw std::system_error(errno, std::generic_category(), "StepInBackward: sched_getaffinity");
  for (const int processor : processors) {
    if (processor >= 0 && processor < CPU_SETSIZE && CPU_ISSET(processor, &usable)) continue;
    std::string known;
    for (int i = 0; i < CPU_SETSIZE; ++i)
      if (CPU_ISSET(i, &usable)) known.append(" ").append(std::to_string(i));
    throw std::invalid_argument(c10::str("StepInBackward: processors has ", processor,
                                         ", expected some of those that this thread may use:", known));
  }
}

}  // namespace

StepInBackward::StepInBackward(GradientSource& source, PartialStep& optimizer, StepInBackwardOptions options)
    : source_(source),
      optimizer_(optimizer),
      options_(options),
      speculation_(speculation_of(optimizer, options)),
      worker_(std::make_unique<TaskQueue>(1)) {
  const auto* whole = dynamic_cast<const torch::optim::Optimizer*>(&optimizer);
  require(whole == nullptr || !may_have_own_step(*whole), "StepInBackward: ", c10::demangle(typeid(optimizer).name()),
          " is derived from an optimizer of Tessera's, and its own step() would not be called, expected that optimizer "
          "itself, or a PartialStep that is derived from none");
  require_usable(options_.processors);
  subscription_.emplace(source.on_gradients([this](const std::vector<at::Tensor>& parameters) { arrived(parameters); },
                                            [this] {
                                              if (speculation_) return abandon();
                                              for (std::future<void>& step : steps_) step.wait();
                                              refusal_.reset();
                                              arrived_.clear();
                                              deferred_.clear();
                                            }));
  // The worker uses as many threads as the caller, or one thread for each of `processors`.
  worker_
      ->add([&processors = options_.processors, threads = at::get_num_threads()] {
        if (!processors.empty()) run_on(processors);
        // at::set_num_threads() would also set the number of threads that start later.
        at::get_num_threads();  // the first call of a thread sets its number
        omp_set_num_threads(processors.empty() ? threads : static_cast<int>(processors.size()));
      })
      .get();
}

StepInBackward::~StepInBackward() {
  abandon();
  subscription_.reset();
}

void StepInBackward::arrived(const std::vector<at::Tensor>& parameters) {
  if (speculation_) return speculate(parameters);
  // With max_norm, finish() steps each parameter once, even if a second backward before finish() adds to its gradient.
  for (const at::Tensor& parameter : parameters) {
    const bool is_first = arrived_.insert(parameter.unsafeGetTensorImpl()).second;
    if (is_first && (options_.max_norm || !parameter.is_cpu())) deferred_.push_back(parameter);
    if (!is_first && !options_.max_norm && !parameter.is_cpu()) throw_second_backward(parameter);
  }
  if (options_.max_norm) return;
  if (!refusal_)
    refusal_.emplace(
        source_.refuse_use("a step of a backward goes on in its thread: call StepInBackward::finish() first"));
  step_on_host(parameters);
}

// Starts the steps of the parameters in host memory. finish() steps the others, on its caller's stream.
void StepInBackward::step_on_host(const std::vector<at::Tensor>& parameters) {
  const std::vector<at::Tensor> on_host = chosen(parameters, true);
  if (on_host.empty()) return;
  const auto step = [this, on_host] {
    const auto began = steady_clock::now();
    speculation_ ? speculation_->step(on_host) : optimizer_.step_parameters(on_host);
    host_steps_.elements += elements_of(on_host);
    host_steps_.seconds += seconds_since(began);
  };
  if (is_without_data()) {  // dry_run() observes only its own thread, not the worker
    const MemoryKindScope kind(MemoryKind::kOptimizer);
    return step();
  }
  steps_.push_back(worker_->add(step));
}

// If this function throws, the backward fails, and the second callback of the subscription calls abandon().
void StepInBackward::speculate(const std::vector<at::Tensor>& parameters) {
  require<std::logic_error>(!must_be_taken_back_,
                            "StepInBackward: a backward after one whose steps could not be taken back: call finish()");
  if (!refusal_)
    refusal_.emplace(source_.refuse_use(
        "steps of a backward have been taken that may be taken back: call StepInBackward::finish() first"));
  for (const at::Tensor& parameter : parameters)
    if (!arrived_.insert(parameter.unsafeGetTensorImpl()).second) throw_second_backward(parameter);
  deferred_.insert(deferred_.end(), parameters.begin(), parameters.end());
  step_on_host(parameters);
}

// Clears `arrived_`. Returns the parameters whose gradient did not arrive in this backward, and adds them to
// `deferred_`, because optimizer.step() would also step them. Returns none if no backward has reduced gradients.
std::vector<at::Tensor> StepInBackward::take_others() {
  const auto arrived = std::exchange(arrived_, {});
  if (arrived.empty()) return {};
  std::vector<at::Tensor> others = source_.parameters_with_gradients();
  std::erase_if(others, [&](const at::Tensor& other) { return arrived.contains(other.unsafeGetTensorImpl()); });
  deferred_.insert(deferred_.end(), others.begin(), others.end());
  return others;
}

// Blocks until all steps have ended, then rethrows the first failure.
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

// Sets the suggested fraction. Must follow wait_for_steps(), which took `waited_s`: the worker writes `host_steps_`.
void StepInBackward::suggest_fraction(double waited_s, const std::vector<at::Tensor>& on_device) {
  const auto [elements, seconds] = std::exchange(host_steps_, {});
  const double waited_for = seconds > 0 ? static_cast<double>(elements) * std::min(1.0, waited_s / seconds) : 0;
  const int64_t device_elements = elements_of(on_device);
  if (elements + device_elements == 0) return;
  suggested_device_fraction_ =
      (static_cast<double>(device_elements) + waited_for) / static_cast<double>(elements + device_elements);
}

void StepInBackward::forget_speculation() {
  if (!deferred_.empty()) speculation_->keep();
  deferred_.clear();
  arrived_.clear();
  refusal_.reset();
  must_be_taken_back_ = false;
}

// Rolls back the steps of a backward. If this fails, uses of the parameters still throw, and the next finish() retries.
void StepInBackward::abandon() noexcept {
  if (!refusal_ || !speculation_) return;
  must_be_taken_back_ = true;
  try {
    try {
      wait_for_steps();
    } catch (const std::exception&) {  // a failed step is rolled back too
    }
    host_steps_ = {};
    speculation_->roll_back();
    forget_speculation();
  } catch (const std::exception& failure) {
    warn(c10::str("StepInBackward: steps could not be taken back: ", failure.what()));
  }
}

// Computes the norm before rethrowing a step's failure, because other ranks wait for this rank in this collective.
double StepInBackward::finish_speculation() {
  try {
    if (must_be_taken_back_) {
      speculation_->roll_back();
      forget_speculation();
    }
    step_on_host(take_others());
    const std::vector<at::Tensor> on_device = chosen(deferred_, /*on_host=*/false);
    std::exception_ptr failure;
    const auto began = steady_clock::now();
    try {
      wait_for_steps();  // clipping may scale the gradients only after the steps have read them
    } catch (...) {
      failure = std::current_exception();
    }
    suggest_fraction(seconds_since(began), on_device);
    const double norm =
        source_.clip_grad_norm_on_device_(*options_.max_norm, options_.norm_type, /*error_if_nonfinite=*/false);
    if (failure) std::rethrow_exception(failure);
    if (clips_gradients(norm, *options_.max_norm)) {
      speculation_->roll_back();
      ++times_taken_back_;
      speculation_->step(deferred_);  // if this step fails, it can be rolled back
    } else if (!on_device.empty()) {
      speculation_->step(on_device);
    }
    forget_speculation();
    return norm;
  } catch (...) {
    abandon();
    throw;
  }
}

std::optional<double> StepInBackward::finish() {
  if (speculation_) return finish_speculation();
  const std::vector<at::Tensor> others = take_others();
  if (!options_.max_norm) {
    const auto refusal = std::exchange(refusal_, std::nullopt);  // released at the end, also by an exception
    step_on_host(others);
    const std::vector<at::Tensor> on_device = chosen(std::exchange(deferred_, {}), /*on_host=*/false);
    const auto began = steady_clock::now();
    wait_for_steps();
    suggest_fraction(seconds_since(began), on_device);
    if (!on_device.empty()) optimizer_.step_parameters(on_device);
    return std::nullopt;
  }
  const double norm =
      source_.clip_grad_norm_on_device_(*options_.max_norm, options_.norm_type, /*error_if_nonfinite=*/false);
  optimizer_.step_parameters(std::exchange(deferred_, {}));
  suggested_device_fraction_ = 1;
  return norm;
}

}  // namespace tessera
