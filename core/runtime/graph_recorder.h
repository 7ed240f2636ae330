#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace tessera::internal {

class BackwardPass;

// Records the work of a device once and replays it on the same memory: a CUDA graph, or a simulation in tests. Must be
// used by one thread.
class GraphRecorder {
 public:
  virtual ~GraphRecorder() = default;
  // Begins to record the work of the current stream, which must not be the device's default stream, and of streams that
  // wait for the current stream. Recorded work does not run, and must not wait for earlier work of other streams. The
  // recorder keeps all memory that the recorded streams allocate before end().
  virtual void begin() = 0;
  // Ends the recording. Must be called on the stream and thread of begin(). Throws if an operation was not recorded.
  virtual void end() = 0;
  // Enqueues the recorded work on the current stream. Must be called after end().
  virtual void replay() = 0;
};

// Returns a recorder from the factory that was set, or else a recorder of CUDA graphs. Throws std::invalid_argument if
// no factory was set in a build without TESSERA_CUDA.
std::unique_ptr<GraphRecorder> make_graph_recorder();
using GraphRecorderFactory = std::unique_ptr<GraphRecorder> (*)();
// Sets the factory, for tests. Null restores CUDA graphs. Must not be called while ranks run.
void set_graph_recorder_factory(GraphRecorderFactory factory);
// Returns null in a build without TESSERA_CUDA.
std::unique_ptr<GraphRecorder> make_cuda_graph_recorder();

// The host's part of an optimizer's recorded step. The optimizer must outlive this object.
struct RecordedStep {
  // Returns an error text if replays would ignore a change that was made since the recording; otherwise "".
  std::function<std::string()> change;
  // Must be called before each replay, on its stream, with each `.grad` undefined or as recorded. Counts the step.
  // Writes the step count, learning rates and replaced states to the recorded memory. Does not wait for the device.
  std::function<void()> prepare_replay;
};

// A step of a captured loop, run by one rank on its device: an eager step before the capture, or the capture. A device
// has at most one CapturedWork. The rank's thread and autograd's thread of the device use it in turn.
class CapturedWork {
 public:
  using Passes = std::set<std::shared_ptr<BackwardPass>>;
  // `leaves`: the tensors that the step may give gradients. Adds to `passes` those of all wrappers that the step uses.
  // Throws std::logic_error if the device has a CapturedWork.
  CapturedWork(c10::Device device, bool is_recording, const std::vector<at::Tensor>& leaves, Passes& passes);
  ~CapturedWork();
  CapturedWork(const CapturedWork&) = delete;
  CapturedWork& operator=(const CapturedWork&) = delete;

  // Returns the device's CapturedWork, eager or recording; null if there is none, and on CPUs.
  static CapturedWork* running_on(c10::Device device);
  // Returns the device's CapturedWork if it is recording; otherwise null.
  static CapturedWork* recording_on(c10::Device device);
  // If the device has a CapturedWork, throws std::invalid_argument, because `what` cannot be captured. The error
  // advises the user to do `instead`.
  static void refuse(c10::Device device, const std::string& what, const std::string& instead);

  // If the device has a CapturedWork, tells it that it uses the wrapper of `pass`.
  static void note_use(c10::Device device, const std::shared_ptr<BackwardPass>& pass);
  // Throws std::invalid_argument if a CapturedWork gives a gradient to a leaf other than its own. `label` names it.
  static void require_own(const at::Tensor& leaf, const std::function<std::string()>& label);

  // Adds a description to the recorded collectives, which are compared over the ranks.
  void add_collective(std::string description) { collectives_.push_back(std::move(description)); }
  const std::vector<std::string>& collectives() const { return collectives_; }

  // An optimizer whose step() can be recorded must call note_recordable() in eager steps, on all ranks or on none. A
  // recorded step() must call add_step().
  void note_recordable(const torch::optim::Optimizer* optimizer) { recordable_.insert(optimizer); }
  void add_step(RecordedStep step) { steps_.push_back(std::move(step)); }
  bool is_recordable(const torch::optim::Optimizer* optimizer) const { return recordable_.contains(optimizer); }
  std::vector<RecordedStep> take_steps() { return std::exchange(steps_, {}); }

  // Sets memory for numbers that the host writes between replays. The memory must be allocated before the recording.
  // Otherwise temporary tensors, which each replay writes, could share the memory.
  void give_numbers(at::Tensor numbers) { numbers_ = std::move(numbers); }
  // Returns memory for `count` numbers. Throws if fewer are left.
  at::Tensor take_numbers(int64_t count);

 private:
  const c10::Device device_;
  const bool is_recording_;
  std::unordered_set<const c10::TensorImpl*> leaves_;
  Passes& passes_;
  std::vector<std::string> collectives_;
  std::unordered_set<const torch::optim::Optimizer*> recordable_;
  std::vector<RecordedStep> steps_;
  at::Tensor numbers_;
};

}  // namespace tessera::internal
