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
  FsdpOptions fsdp{};         // .offload is OSS's as well
  bool host_adam = false;     // HostAdamW instead of torch's AdamW
  bool checkpointed = false;  // blocks, recomputed in backward
  bool activations = false;   // whose inputs go to host memory
  bool side_stream = false;   // the loop runs on a stream that is not the default one
  bool two_streams = false;   // on two in turn
  bool branches = false;      // every other block computes on a stream of the model's own
  bool towers = false;        // two, one of them on the model's own stream, which also makes the next batch
  bool one_unit = false;      // FSDP's, of all blocks
  bool evaluates = false;     // before the step and after it
  bool clips = false;
  bool accumulates = false;  // under no_sync()
  int unused_on = -1;        // a rank whose model leaves a block out
};

// The state dictionary after a few steps, on the host. Called by each rank.
using State = std::map<std::string, at::Tensor>;
State train(const Case& of, std::shared_ptr<Communicator> comm);

// The same on gloo, from rank 0.
State train_on_gloo(const Case& of);

// The tensors that differ: in any bit, or by more than the tolerance, relative or absolute.
std::string difference(const State& expected, const State& got, double tolerance = 0);

inline void PrintTo(const Case& of, std::ostream* out) { *out << of.name; }  // for GoogleTest
const std::vector<Case>& cases();
const Case& case_named(const std::string& name);

}  // namespace tessera::accelerator_training
