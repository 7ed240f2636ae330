#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include <tessera/checkpoint/options.h>
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/shard_writer.h"

namespace tessera::internal {

// The data that this rank must write. All data is from the same moment of the training.
struct SavePlan {
  std::vector<Piece> pieces;
  SavedOptimizers optimizers;
  std::vector<std::string> models;
  GeneratorStates rng;
  nlohmann::json extra;  // only rank 0 writes `extra`, `models` and `beside`
  std::map<std::string, StateValues> beside;
  // A tensor that is copied in the background. `writes` is writes_to(tensor) in plan_save(), to detect later writes.
  struct Watched {
    std::string fqn;
    at::Tensor tensor;
    int64_t writes;
  };
  std::vector<Watched> watched;
};

struct StateObjects;
// Plans the save of this rank's part of a state. Throws std::invalid_argument for values that a manifest cannot store.
SavePlan plan_save(const StateObjects& state, const nlohmann::json& extra, const SaveOptions& options);

// Returns a tensor's write count: its autograd version counter, plus Page::writes() if the tensor is a page.
int64_t writes_to(const at::Tensor& tensor);

// Throws std::invalid_argument if `extra` is nested too deeply, or has binary data, non-finite numbers or bad UTF-8.
void check_extra(const nlohmann::json& extra);

// Copies a plan's pieces to host memory, which the next save reuses. begin() and end() make each piece's data() return
// the copy. Device data is copied to pinned memory. Only end() and take_memory() wait for device copies to complete.
// The thread that copies contiguous CPU data also computes its checksums in the same pass, in about the time of a plain
// copy. So the writer, on another thread, does not read the data a second time for its checksums.
class HostCopies {
 public:
  explicit HostCopies(at::Tensor memory = {}) : memory_(std::move(memory)) {}

  // Returns the number of bytes of host memory that these pieces need.
  static int64_t bytes_for(const std::vector<Piece>& pieces);

  // Copies all pieces except watched tensors, which end() copies. Copies from the model's device run on the current
  // stream, after earlier and before later work. `block_bytes` is the size of the blocks that have checksums.
  void begin(SavePlan& plan, at::Device device, int64_t block_bytes);
  // Copies the remaining pieces and blocks until all copies have completed. May be called on any thread. Throws
  // std::invalid_argument if a watched tensor was modified since plan_save(). Calls `progress` after each copy.
  void end(SavePlan& plan, at::Device device, const std::function<void()>& progress);

  // Returns the memory for reuse by the next save. Must be called after end(), or instead of end() if the save failed.
  at::Tensor take_memory();

 private:
  void copy(Piece& piece, const at::Tensor& room);
  void await_copies();

  at::Tensor memory_;
  int64_t block_bytes_ = 0;
  std::vector<at::Tensor> room_;     // the destination of each piece in memory_
  std::vector<size_t> later_;        // indices of pieces that end() copies
  std::vector<at::Tensor> sources_;  // sources of device copies in flight
  std::optional<c10::Event> begun_;  // recorded on the stream after the last device copy
};

}  // namespace tessera::internal
