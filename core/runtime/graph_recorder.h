#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace tessera::internal {

// Records the work of a device once and replays it on the same memory: a CUDA graph, or a simulation in tests. Used by
// one thread.
class GraphRecorder {
 public:
  virtual ~GraphRecorder() = default;
  // Begins to record the work of the current stream, which must not be the device's default stream, and of streams that
  // wait for it. Recorded work does not run. It must not wait for earlier work of other streams. The recorder keeps the
  // memory that these streams allocate until end().
  virtual void begin() = 0;
  // Ends the recording, on the stream and the thread of begin(). Throws if an operation could not be recorded.
  virtual void end() = 0;
  // Enqueues the recorded work on the current stream. Must be called after end().
  virtual void replay() = 0;
};

// Returns the recorder of CUDA graphs, or one of the factory that is set. Throws std::invalid_argument in a build
// without TESSERA_CUDA.
std::unique_ptr<GraphRecorder> make_graph_recorder();
using GraphRecorderFactory = std::unique_ptr<GraphRecorder> (*)();
// For tests. Null restores CUDA graphs. Must not be called while ranks run.
void set_graph_recorder_factory(GraphRecorderFactory factory);
// Null in a build without TESSERA_CUDA.
std::unique_ptr<GraphRecorder> make_cuda_graph_recorder();

// The host's part of a recorded step of an optimizer. The optimizer must outlive it.
struct RecordedStep {
  // Returns the change since the recording that replays do not follow, as words of an error; "" if there is none.
  std::function<std::string()> change;
  // Must be called before each replay, on its stream, with the `.grad` of the recording or without. Counts the step.
  // Writes step counts, learning rates and replaced states to the recorded memory, without a wait for the device.
  std::function<void()> prepare_replay;
};

// A step of a captured loop, run by one rank on its device: an eager step before the capture, or the capture. At most
// one exists for a device. The rank's thread and autograd's thread of the device use it in turn.
class CapturedWork {
 public:
  // Throws std::logic_error if one exists for the device.
  CapturedWork(c10::Device device, bool is_recording);
  ~CapturedWork();
  CapturedWork(const CapturedWork&) = delete;
  CapturedWork& operator=(const CapturedWork&) = delete;

  // Returns the work that runs on this device now, eagerly or recording; null if none does, and on CPUs.
  static CapturedWork* running_on(c10::Device device);
  // Like running_on(), but null also in an eager step.
  static CapturedWork* recording_on(c10::Device device);
  bool is_recording() const { return is_recording_; }
  // Throws std::invalid_argument, because `what` cannot be captured, if the device has CapturedWork. `instead`: what to
  // do.
  static void refuse(c10::Device device, const std::string& what, const std::string& instead);

  // Adds to the recorded collectives, which are compared over the ranks.
  void add_collective(std::string description) { collectives_.push_back(std::move(description)); }
  const std::vector<std::string>& collectives() const { return collectives_; }

  // An optimizer whose step() can be recorded must call the first in eager steps, alike on all ranks. A recorded step()
  // must call the second.
  void note_recordable(const torch::optim::Optimizer* optimizer) { recordable_.insert(optimizer); }
  void add_step(RecordedStep step) { steps_.push_back(std::move(step)); }
  bool is_recordable(const torch::optim::Optimizer* optimizer) const { return recordable_.contains(optimizer); }
  std::vector<RecordedStep> take_steps() { return std::exchange(steps_, {}); }

  // Memory for numbers that the host writes between replays. It must be allocated before the recording: memory that is
  // allocated meanwhile may also be that of temporary tensors, which each replay writes.
  void give_numbers(at::Tensor numbers) { numbers_ = std::move(numbers); }
  // Returns `count` of them. Throws if fewer are left.
  at::Tensor take_numbers(int64_t count);

 private:
  const c10::Device device_;
  const bool is_recording_;
  std::vector<std::string> collectives_;
  std::unordered_set<const torch::optim::Optimizer*> recordable_;
  std::vector<RecordedStep> steps_;
  at::Tensor numbers_;
};

}  // namespace tessera::internal
