// One small training run under every wrapper, on gloo's CPUs or on the accelerator.
#pragma once

#include <map>
#include <memory>
#include <ostream>
#include <string>

#include "tests/support/reference.h"

namespace tessera::accelerator_training {
using namespace internal;

struct Case {
  std::string name;
  enum Wrapper { kFsdp, kSdp, kDdp } wrapper = kFsdp;
  int world = 2;
  FsdpOptions fsdp{};                    // .offload also applies to OSS
  WireFormat wire = WireFormat::kDtype;  // of SDP
  bool host_adam = false;                // HostAdamW instead of torch's AdamW
  bool checkpointed = false;             // recomputes blocks in backward
  bool activations = false;              // keeps block inputs in host memory
  bool side_stream = false;              // runs the loop on a non-default stream
  bool two_streams = false;              // alternates between two streams
  bool branches = false;                 // every second block uses the model's own stream
  bool towers = false;                   // two towers, one on the model's own stream, which also makes the next batch
  bool one_unit = false;                 // one FSDP unit of all blocks
  bool evaluates = false;                // before and after the step
  bool clips = false;
  bool accumulates = false;  // under no_sync()
  int unused_on = -1;        // the rank whose model skips a block
};

// Trains a few steps; returns the state dictionary, on the host. Must be called by each rank.
using State = std::map<std::string, at::Tensor>;
State train(const Case& of, std::shared_ptr<Communicator> comm);

// Trains on gloo; returns rank 0's state.
State train_on_gloo(const Case& of);

// Returns the names of tensors that differ: in any bit, or by more than the tolerance, relative or absolute.
std::string difference(const State& expected, const State& got, double tolerance = 0);

inline void PrintTo(const Case& of, std::ostream* out) { *out << of.name; }  // for GoogleTest
const std::vector<Case>& cases();
const Case& case_named(const std::string& name);

}  // namespace tessera::accelerator_training
