// A small training run under each wrapper, on CPUs with gloo or on the accelerator.
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
  WireFormat wire = WireFormat::kDtype;  // SdpOptions::wire
  bool host_adam = false;                // HostAdamW instead of torch's AdamW
  bool checkpointed = false;             // recomputes blocks in backward
  bool activations = false;              // keeps block inputs in host memory
  bool side_stream = false;              // runs the loop on a non-default stream
  bool two_streams = false;              // alternates between two streams
  bool branches = false;                 // every second block uses the model's own stream
  bool towers = false;                   // two towers, one on the model's own stream, which also makes the next batch
  bool one_unit = false;                 // one FSDP unit of all blocks
  bool evaluates = false;                // runs an evaluation before and after each step
  bool clips = false;
  bool accumulates = false;  // accumulates gradients under no_sync()
  int unused_on = -1;        // the rank whose model skips a block; -1: none
};

// Trains a few steps. Returns the state dictionary, on the host. Collective.
using State = std::map<std::string, at::Tensor>;
State train(const Case& of, std::shared_ptr<Communicator> comm);

// Trains on CPUs with gloo. Returns rank 0's state.
State train_on_gloo(const Case& of);

// Returns the names of tensors that differ by more than `tolerance`, relative or absolute; with 0, that differ bitwise.
std::string difference(const State& expected, const State& got, double tolerance = 0);

inline void PrintTo(const Case& of, std::ostream* out) { *out << of.name; }  // for GoogleTest
const std::vector<Case>& cases();
const Case& case_named(const std::string& name);

}  // namespace tessera::accelerator_training
