#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/format/manifest.h"
#include "checkpoint/format/shard_writer.h"

namespace tessera::internal {

// What this rank has to write, taken from the model at one moment.
struct SavePlan {
  std::vector<Piece> pieces;
  std::optional<SavedOptimizer> optimizer;
  GeneratorStates rng;
  nlohmann::json extra;  // rank 0's, as is the next
  std::map<std::string, StateValues> beside;
  // Tensors that may be copied later, since it can be told whether they were written to meanwhile.
  struct Watched {
    std::string fqn;
    at::Tensor tensor;
    int64_t writes;
  };
  std::vector<Watched> watched;
};

// Grows with each write that autograd counts; for a shard, also with those that it does not see, through data().
int64_t writes_to(const at::Tensor& tensor);

// Throws std::invalid_argument for an `extra` that the format cannot hold: too deep, not finite, not UTF-8.
void check_extra(const nlohmann::json& extra);

// Copies of a plan's pieces in host memory, which one save leaves to the next. begin() and end() make each piece's
// data() its copy. From a device they go straight to page-locked memory, and the host waits in end() alone.
class HostCopies {
 public:
  explicit HostCopies(at::Tensor memory = {}) : memory_(std::move(memory)) {}

  // Copies what cannot wait for end(): all but what is watched, and state in host memory that is frozen instead, which
  // may be written to. `device` is the model's, whose copies come after what the current stream was given so far and
  // before what it is given from now on.
  void begin(SavePlan& plan, at::Device device);
  // Copies the rest and waits for all, on any thread. Throws std::invalid_argument if it was written to meanwhile.
  // `progress` is told of each that is copied.
  void end(SavePlan& plan, at::Device device, const std::function<void()>& progress);

  // After end(), or in its place.
  at::Tensor take_memory();

 private:
  void copy(Piece& piece, const at::Tensor& room);
  void await_copies();

  at::Tensor memory_;
  std::vector<at::Tensor> room_;     // in it, of each piece
  std::vector<size_t> later_;        // pieces left to end()
  std::vector<at::Tensor> sources_;  // on a device, while they are copied
  std::optional<c10::Event> begun_;  // of a device: what was started so far
};

}  // namespace tessera::internal
