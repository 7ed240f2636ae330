// Trains by an eager loop or by a CapturedStep, so that tests can compare the results bitwise.
#pragma once

#include <filesystem>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "tests/accelerator/training.h"

namespace tessera::captured_training {
using namespace internal;

constexpr int64_t kFeatures = 16;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(double dropout) : dropout_(dropout) {
    for (int i = 0; i < 4; ++i) blocks->push_back(torch::nn::Linear(kFeatures, kFeatures));
    register_module("blocks", blocks);
    register_module("norm", norm);
  }
  at::Tensor forward(at::Tensor x) {
    for (int i = 0; i < 4; ++i) {
      x = torch::tanh(blocks->ptr<torch::nn::LinearImpl>(i)->forward(x));
      if (dropout_ > 0) x = torch::dropout(x, dropout_, is_training());
    }
    return norm(x);
  }
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({kFeatures})};

 private:
  const double dropout_;
};
TORCH_MODULE(Net);

struct Case {
  std::string name;
  enum Wrapper { kFsdp, kSdp, kDdp } wrapper = kFsdp;
  int world = 2;
  FsdpOptions fsdp{};
  DdpOptions ddp{};
  double dropout = 0;
  bool clips = true;
  bool schedules = true;  // changes the learning rate in each step
  bool evaluates = false;
  bool loads = false;  // gives the module's parameters other data, as torch::load() does, when steps are replayed
  // torch's optimizers, derived classes (kOwnStep), and optimizers with fp64 parameters cannot be recorded.
  enum Stepper { kTorchAdamW, kAdamW, kAdam, kSgd, kSgdMomentum, kOwnStep } optimizer = kTorchAdamW;
  bool interrupts = false;  // between replays: runs an eager step, saves and loads a checkpoint, replaces states
  bool is_fp64 = false;
  bool rank_order_sums = false;
  int shapes = 1;  // number of shapes of batches, which alternate; each shape has its own CapturedStep
};

// Trains by a CapturedStep if `captures`, otherwise by an eager loop. Returns the state and the losses, on the host.
// `folder` is for checkpoints. Collective.
accelerator_training::State train(const Case& of, bool captures, const std::filesystem::path& folder,
                                  const std::shared_ptr<Communicator>& comm);

inline void PrintTo(const Case& of, std::ostream* out) { *out << of.name; }  // for GoogleTest
std::vector<Case> cases();

}  // namespace tessera::captured_training
