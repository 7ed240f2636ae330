#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace train_step {

// What one run measures. Sizes that are not given are the model's own.
struct Options {
  std::string model = "gpt";       // gpt, deep, recipe, mlp, archive
  std::string wrapper = "fsdp";    // local, ddp, oss, sdp, fsdp
  std::string optimizer = "adam";  // adam: fused; sgd: torch::optim::SGD
  int ranks = 2;
  int64_t batch = 0;  // rows (sequences) a rank
  int steps = 10;     // timed, after `warmup` ones
  int warmup = 3;
  int threads = 1;                    // intra-operator threads of each rank
  at::ScalarType dtype = at::kFloat;  // of parameters, inputs and gradients
  bool json = false;

  // Of the model "archive", which Python has exported: from [batch, context] tokens and targets to a scalar.
  std::string archive;
  std::string unit;  // the class of what is wrapped by itself

  int64_t layers = 0;  // blocks of gpt, linear layers of deep and recipe
  int64_t width = 0;
  int64_t heads = 6;         // of gpt
  int64_t context = 128;     // tokens in a sequence of gpt and of an archive
  int64_t vocabulary = 256;  // of these

  int prefetch = 1;        // FsdpOptions
  bool int8_wire = false;  // of fsdp parameters and gradients, of sdp gradients
  bool reshard = true;
  bool deferred = true;  // fsdp: the model is never whole in memory
};

// The command line, with sizes filled in; none if it asked for help, which has been printed then.
// Throws boost::program_options::error for what cannot be meant.
std::optional<Options> parse(int argc, char** argv);

}  // namespace train_step
