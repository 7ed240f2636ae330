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

// The data that this rank must write, captured from the model at one moment.
struct SavePlan {
  std::vector<Piece> pieces;
  SavedOptimizers optimizers;
  std::vector<std::string> models;
  GeneratorStates rng;
  nlohmann::json extra;  // rank 0 alone writes `extra`, `models` and `beside`
  std::map<std::string, StateValues> beside;
  // A tensor that may be copied in the background, because a write to it meanwhile can be detected.
  struct Watched {
    std::string fqn;
    at::Tensor tensor;
    int64_t writes;
  };
  std::vector<Watched> watched;
};

struct StateObjects;
// Captures this rank's part of a state. Throws std::invalid_argument for values that a manifest cannot hold.
SavePlan plan_save(const StateObjects& state, const nlohmann::json& extra, const SaveOptions& options);

// Returns a number that grows with each write that autograd counts; for a page, also with each write through data().
int64_t writes_to(const at::Tensor& tensor);

// Throws std::invalid_argument if JSON cannot store `extra`: too deep, not finite, binary or not UTF-8.
void check_extra(const nlohmann::json& extra);

// Copies a plan's pieces to host memory, which the next save reuses. begin() and end() make each piece's data() return
// the piece's copy. Device data is copied to pinned memory; only end() and take_memory() wait for it.
class HostCopies {
 public:
  explicit HostCopies(at::Tensor memory = {}) : memory_(std::move(memory)) {}

  // Returns the bytes of host memory that these pieces need.
  static int64_t bytes_for(const std::vector<Piece>& pieces);

  // Copies all pieces that must not wait for end(). end() copies watched tensors, and optimizer state and Stateful
  // tensors in host memory, which copy-on-write protects until then. Copies from the model's device are ordered between
  // earlier and later work of the current stream.
  void begin(SavePlan& plan, at::Device device);
  // Copies the remaining pieces and waits for all copies; may run on any thread. Throws std::invalid_argument if a
  // watched tensor was modified since begin(). Calls `progress` after each copy.
  void end(SavePlan& plan, at::Device device, const std::function<void()>& progress);

  // Returns the memory for reuse. Must be called after end(), or instead of it.
  at::Tensor take_memory();

 private:
  void copy(Piece& piece, const at::Tensor& room);
  void await_copies();

  at::Tensor memory_;
  std::vector<at::Tensor> room_;     // the part of memory_ for each piece
  std::vector<size_t> later_;        // indices of pieces that end() copies
  std::vector<at::Tensor> sources_;  // device tensors that are being copied
  std::optional<c10::Event> begun_;  // recorded after the device copies started last
};

}  // namespace tessera::internal
