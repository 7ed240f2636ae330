#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <utility>

#include <tessera/communicator.h>
#include <tessera/plan/run_record.h>

namespace tessera {

namespace internal {
class Recorder;
}

// Options of dry_run(): the simulated rank and world size, and the number of steps.
struct DryRunOptions {
  int world_size = 1;
  int rank = 0;
  // At least 2, because the first step creates the optimizer's state. All later steps have equal costs.
  int steps = 2;
  // Number of consecutive ranks that read each other's memory, like gloo's ranks of a host. 0: all. 1: none (NCCL).
  int ranks_sharing_memory = 0;
};

// The part of dry_run() and record_run() that is not a template.
class RunScope {
 public:
  explicit RunScope(const DryRunOptions& options);          // for dry_run(); tensors have no data
  RunScope(std::shared_ptr<Communicator> comm, int steps);  // for record_run(); real data and ranks
  ~RunScope();
  RunScope(const RunScope&) = delete;
  RunScope& operator=(const RunScope&) = delete;

  // Returns the communicator with which the model must be built.
  const std::shared_ptr<Communicator>& comm() const { return comm_; }
  int steps() const { return steps_; }                    // number of steps to run
  void end_step();                                        // must be called after make_model() and each step
  void name_parameters(const torch::nn::Module& module);  // lets operators of the record name their modules
  RunRecord finish();                                     // must be called while the model exists

 private:
  struct Without;

  const std::shared_ptr<Communicator> comm_;
  const int steps_;
  const std::shared_ptr<internal::Recorder> recorder_;
  std::unique_ptr<Without> without_data_;  // null for record_run()
  struct Recording;
  std::unique_ptr<Recording> recording_;
};

// Returns the module in `model`, the result of make_model(): a wrapper, a pointer or a module holder. For any other
// type, returns null, and operators in the record name no module.
template <class Model>
const torch::nn::Module* module_in(Model& model) {
  if constexpr (requires { static_cast<const torch::nn::Module&>(*model.module()); }) {
    return &static_cast<const torch::nn::Module&>(*model.module());
  } else if constexpr (requires { static_cast<const torch::nn::Module&>(*model->module()); }) {
    return &static_cast<const torch::nn::Module&>(*model->module());
  } else if constexpr (requires { static_cast<const torch::nn::Module&>(*model); }) {
    return &static_cast<const torch::nn::Module&>(*model);
  } else {
    return nullptr;
  }
}

// Calls make_model, and then runs scope.steps() steps. Returns the record of the run.
template <class MakeModel, class Step>
RunRecord run_recorded(RunScope& scope, MakeModel& make_model, Step& step) {
  auto model = make_model(scope.comm());
  if (const torch::nn::Module* module = module_in(model)) scope.name_parameters(*module);
  scope.end_step();
  for (int i = 0; i < scope.steps(); ++i) {
    step(model);
    scope.end_step();
  }
  return scope.finish();
}

// Runs a training program's constructor and steps as one rank of any world size. Needs no data, no other ranks and no
// memory for tensors. Returns a record of the memory and work:
//
//   auto record = tessera::dry_run(
//       [&](auto comm) { return tessera::zero(Gpt(config), torch::optim::AdamWOptions(3e-4), comm, {.stage = 3}); },
//       [&](auto& model) {
//         model.zero_grad();
//         loss_of(model(torch::zeros({8, 1024}, torch::kLong))).backward();
//         model.clip_grad_norm_(1.0);
//         model.step();
//       },
//       {.world_size = 65536, .rank = 17});
//   std::cout << record.summary();
//
// make_model(communicator) must return the object that step(model) trains, wrapped by Tessera with that communicator.
// Wrappers, autograd and optimizer are real and create all their tensors. Operators on floating-point values do not
// run, and collectives move no data (CountingCommunicator). The run assumes that all ranks have equal data and use the
// same parameters.
//
// Counts CPU tensors when they are allocated and freed. Tensors on a GPU have the same sizes. However, some operators
// (attention, convolutions) have other kernels on a GPU, which save other tensors for backward. The allocator's
// rounding and the kernels' scratch memory are not counted.
//
// Numbers, counters, integer tensors (tokens, masks), floating-point tensors of at most 4 KiB, and values computed from
// them alone are real. A value that was not computed (a loss's item(), a norm) reads as 0, and RunRecord::stand_ins
// lists the operator. Code that reads memory without the dispatcher reads zeros. Throws std::invalid_argument, naming
// the operator, if a result's shape depends on missing values. Also throws it if libtorch cannot infer a shape in C++
// and the operator is too large to run, and if `steps` is below 2. Throws std::logic_error in a nested run on this
// thread. Restores the default CPU generator. Not collective. Uses one thread. While the first dry run of a process
// starts, no other thread may create tensors.
template <class MakeModel, class Step>
RunRecord dry_run(MakeModel make_model, Step step, const DryRunOptions& options = {}) {
  RunScope scope(options);
  return run_recorded(scope, make_model, step);
}

// Records this rank's part of a real run on the CPU, for comparison with a dry run. `comm` is real; its internal
// tensors are not recorded. Collective, like make_model and step. Throws like dry_run(), and if `comm` is on a device.
template <class MakeModel, class Step>
RunRecord record_run(MakeModel make_model, Step step, std::shared_ptr<Communicator> comm, int steps = 2) {
  RunScope scope(std::move(comm), steps);
  return run_recorded(scope, make_model, step);
}

}  // namespace tessera
