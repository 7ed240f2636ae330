#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include <tessera/communicator.h>
#include <tessera/plan/run_record.h>

namespace tessera {

namespace internal {
class Recorder;
}

// Which rank of which world a dry run is, and for how long.
struct DryRunOptions {
  int world_size = 1;
  int rank = 0;
  // At least 2: the first makes the optimizer's state, every other is like the second.
  int steps = 2;
  // Ranks 0 to this less 1 read each other's memory, as those of a host do on gloo, and so on; 0: all do, 1: none
  // (NCCL).
  int ranks_sharing_memory = 0;
};

// What dry_run() and record_run() share, below their templates.
class RunScope {
 public:
  explicit RunScope(const DryRunOptions& options);          // without data
  RunScope(std::shared_ptr<Communicator> comm, int steps);  // with data, on real ranks
  ~RunScope();
  RunScope(const RunScope&) = delete;
  RunScope& operator=(const RunScope&) = delete;

  // What the model is to be made with, and how often to step.
  const std::shared_ptr<Communicator>& comm() const { return comm_; }
  int steps() const { return steps_; }                    // that many times
  void end_step();                                        // after the constructor, and after each step
  void name_parameters(const torch::nn::Module& module);  // for the record
  RunRecord finish();                                     // while the model is there

 private:
  struct Without;

  const std::shared_ptr<Communicator> comm_;
  const int steps_;
  const std::shared_ptr<internal::Recorder> recorder_;
  std::unique_ptr<Without> without_data_;  // null with data
  struct Recording;
  std::unique_ptr<Recording> recording_;
};

// The module in what make_model() has returned: what a wrapper has, what a pointer points to, or a module's holder.
// Null for anything else; operators are then in no module.
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

// The constructor and the steps within a scope, and what they took.
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

// Runs a training program's own constructor and step as one rank of a world of any size, without data, other ranks or
// memory, and tells what it would take:
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
// make_model(communicator) returns what step(model) trains, made by Tessera's wrappers with that communicator. The
// wrappers, autograd and the optimizer are the real ones and make every tensor that they would make; operators that
// would compute with floating-point values are not run, and collectives go nowhere (CountingCommunicator). So all
// ranks are taken to have the same data and to use the same parameters.
//
// Tensors are on the CPU and are counted as they are made and freed: bytes are those of a run on CPUs. On a GPU tensors
// take the same, but where a library chooses another kernel there (attention, convolutions) what that saves for
// backward may differ, as do the allocator's rounding and the kernels' own scratch, which a dry run does not know.
//
// Small values are there: numbers, counters, integer tensors (tokens, masks) and what is computed of those alone. A
// value that was never computed reads as 0 (a loss's item(), a norm), which RunRecord::stand_ins lists. Reading tensors
// behind the dispatcher finds zeros. Operators whose results' shapes depend on values that are not there throw
// std::invalid_argument, as do those for which libtorch has no shapes in C++ and that are too large to run; the text
// names the operator. std::logic_error inside another one on this thread; std::invalid_argument for fewer than 2 steps.
// The default CPU generator is left as it was. Not collective; on one thread, and the first in a process while no
// other thread makes tensors.
template <class MakeModel, class Step>
RunRecord dry_run(MakeModel make_model, Step step, const DryRunOptions& options = {}) {
  RunScope scope(options);
  return run_recorded(scope, make_model, step);
}

// The same record of a run with data on the CPU, as this rank sees it: what a dry run is to be compared with. `comm` is
// real, and its collectives are not in the record. Collective, as make_model and step are. Throws as dry_run().
template <class MakeModel, class Step>
RunRecord record_run(MakeModel make_model, Step step, std::shared_ptr<Communicator> comm, int steps = 2) {
  RunScope scope(std::move(comm), steps);
  return run_recorded(scope, make_model, step);
}

}  // namespace tessera
