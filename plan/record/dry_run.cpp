#include <tessera/plan/dry_run.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>
#include <string>
#include <vector>

#include "core/memory/without_data.h"
#include "core/runtime/require.h"
#include "plan/record/counting_communicator.h"
#include "plan/record/dry_operators.h"
#include "plan/record/recorder.h"

namespace tessera {
using namespace internal;
namespace {

int checked_steps(int steps) {
  require(steps >= 2, "a dry or recorded run of ", steps,
          " steps, expected at least 2: the first makes the optimizer's state");
  return steps;
}

}  // namespace

// The scope of a run without data: this thread's new tensors have no values. The destructor restores the CPU generator.
struct RunScope::Without {
  // Disables, in the whole process, libtorch's fill of new memory, a part of its deterministic algorithms. A fill would
  // write to pages that a dry run only reserves.
  class UnfilledScope {
   public:
    UnfilledScope() {
      std::lock_guard lock(mutex);
      if (alive++ == 0) before = at::globalContext().deterministicFillUninitializedMemory();
      at::globalContext().setDeterministicFillUninitializedMemory(false);
    }
    ~UnfilledScope() {
      std::lock_guard lock(mutex);
      if (--alive == 0) at::globalContext().setDeterministicFillUninitializedMemory(before);
    }
    UnfilledScope(const UnfilledScope&) = delete;
    UnfilledScope& operator=(const UnfilledScope&) = delete;

   private:
    static inline std::mutex mutex;
    static inline int alive = 0;
    static inline bool before = false;
  };

  Without() {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard lock(generator.mutex());
    state = generator.get_state();
  }
  ~Without() {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
  at::Tensor state;
  UnfilledScope unfilled;
  WithoutDataScope scope;
};

struct RunScope::Recording {
  explicit Recording(std::shared_ptr<Recorder> recorder) : current(std::move(recorder)) {}
  Recorder::Current current;
  WaitForTransfersScope wait;
  RecordedOperators operators;
};

RunScope::RunScope(const DryRunOptions& options)
    : comm_(CountingCommunicator::make(options.rank, options.world_size, options.ranks_sharing_memory)),
      steps_(checked_steps(options.steps)),
      recorder_(Recorder::make(/*with_data=*/false)),
      without_data_(std::make_unique<Without>()),
      recording_(std::make_unique<Recording>(recorder_)) {}

RunScope::RunScope(std::shared_ptr<Communicator> comm, int steps)
    : comm_(std::move(comm)),
      steps_(checked_steps(steps)),
      recorder_(Recorder::make(/*with_data=*/true)),
      recording_(std::make_unique<Recording>(recorder_)) {
  require(comm_ != nullptr, "record_run: the communicator is null");
  require(comm_->device().is_cpu(), "record_run on ", comm_->device().str(), ", expected a communicator on the CPU");
}

RunScope::~RunScope() = default;

void RunScope::end_step() { recorder_->end_step(); }

void RunScope::name_parameters(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  for (const auto& item : module.named_parameters()) parameters.emplace_back(item.key(), item.value());
  recorder_->name_parameters(parameters);
}

RunRecord RunScope::finish() { return recorder_->finish(); }

}  // namespace tessera
