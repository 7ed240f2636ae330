// Training by a loop and by a CapturedStep, for a comparison of bits.
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
  bool schedules = true;  // the learning rate changes from step to step
  bool evaluates = false;
  bool loads = false;  // gives the module's parameters other data, as torch::load() does, when steps are replayed
  // Those of torch and of a derived class cannot be recorded, nor can any with fp64 parameters.
  enum Stepper { kTorchAdamW, kAdamW, kAdam, kSgd, kSgdMomentum, kOwnStep } optimizer = kTorchAdamW;
  bool interrupts = false;  // between replays: an eager step, a checkpoint saved and loaded, states replaced
  bool is_fp64 = false;
  bool rank_order_sums = false;
  int shapes = 1;  // of batches, in turn, each with a CapturedStep of its own
};

// Trains, and returns the state and the losses, on the host. `captures`: by a CapturedStep. `folder` is for
// checkpoints. Must be called by each rank of a group with the case's options.
accelerator_training::State train(const Case& of, bool captures, const std::filesystem::path& folder,
                                  const std::shared_ptr<Communicator>& comm);

inline void PrintTo(const Case& of, std::ostream* out) { *out << of.name; }  // for GoogleTest
std::vector<Case> cases();

}  // namespace tessera::captured_training
