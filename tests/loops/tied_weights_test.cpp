// Parameters under several names.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <limits>
#include <sstream>
#include <utility>
#include <vector>

namespace tessera::loops::tied_weights_test {
using namespace internal;
namespace {

TESSERA_LOOPS(TiedWeights, all_setups);

struct SharedTwice : Net {
  SharedTwice() { register_module("first", fc), register_module("second", fc), register_module("out", out); }
  at::Tensor forward(const at::Tensor& x) override { return out(fc(fc(x).tanh()).tanh()); }
  torch::nn::Linear fc{kFeatures, kFeatures}, out{kFeatures, kFeatures};
};

TEST_P(TiedWeights, OneModuleUnderTwoNames) {
  play(GetParam(), {.model = [] { return seeded_model<SharedTwice>(33); }}, three_steps);
}

// Uses the layer's member instead of the registered module, which is not used any more.
TEST_P(TiedWeights, WeightsTiedByAssignmentBeforeWrapping) {
  auto model = [] {
    Model net = mlp();
    mlp_of(*net).fc3->weight = mlp_of(*net).fc1->weight;
    return net;
  };
  play(GetParam(), {.model = model, .unused = true}, three_steps);
}

TEST_P(TiedWeights, WeightsTiedByAssignmentAfterWrapping) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    run.train(0);
    mlp_of(*run.model).fc3->weight = mlp_of(*run.model).fc1->weight;
    for (int step = 1; step < 4; ++step) run.train(step);
  });
}

TEST_P(TiedWeights, OneLayerTwiceInAForward) {
  struct Twice : Mlp {
    at::Tensor forward(const at::Tensor& x) override { return fc2(fc1(fc2(fc1(x).tanh()).tanh())); }
  };
  play(GetParam(), {.model = [] { return seeded_model<Twice>(26); }, .unused = true}, three_steps);
}

}  // namespace
}  // namespace tessera::loops::tied_weights_test
