#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

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

// A step of a captured loop, run by one rank on its device: an eager step before the capture, or the capture. At most
// one exists for a device. The rank's thread and autograd's thread of the device use it in turn.
class CapturedWork {
 public:
  // Throws std::logic_error if one exists for the device.
  CapturedWork(c10::Device device, bool is_recording);
  ~CapturedWork();
  CapturedWork(const CapturedWork&) = delete;
  CapturedWork& operator=(const CapturedWork&) = delete;

  // Returns the work that records on this device now; null if none does, and on CPUs.
  static CapturedWork* recording_on(c10::Device device);
  // Throws std::invalid_argument, because `what` cannot be captured, if the device has CapturedWork. `instead`: what to
  // do.
  static void refuse(c10::Device device, const std::string& what, const std::string& instead);

  // Adds to the recorded collectives, which are compared over the ranks.
  void add_collective(std::string description) { collectives_.push_back(std::move(description)); }
  const std::vector<std::string>& collectives() const { return collectives_; }

 private:
  const c10::Device device_;
  const bool is_recording_;
  std::vector<std::string> collectives_;
};

}  // namespace tessera::internal
