#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace train_step {

// The options of one run. A size of 0 means the model's default.
struct Options {
  std::string model = "gpt";       // gpt, deep, recipe, mlp, archive
  std::string wrapper = "fsdp";    // local, ddp, oss, sdp, fsdp
  std::string optimizer = "adam";  // adam: fused; sgd: torch::optim::SGD
  int ranks = 2;
  int64_t batch = 0;  // rows (sequences) per rank
  int steps = 10;     // timed steps, after `warmup` steps
  int warmup = 3;
  int threads = 1;                    // intra-operator threads of each rank
  at::ScalarType dtype = at::kFloat;  // dtype of parameters, inputs and gradients
  bool json = false;

  // For the model "archive", exported by Python: maps [batch, context] tokens and targets to a scalar.
  std::string archive;
  std::string unit;  // Python class whose modules become units

  int64_t layers = 0;  // gpt: blocks; deep, recipe: linear layers
  int64_t width = 0;
  int64_t heads = 6;         // gpt: attention heads
  int64_t context = 128;     // gpt and archive: tokens in a sequence
  int64_t vocabulary = 256;  // gpt and archive: number of different tokens

  int prefetch = 1;        // FsdpOptions::prefetch
  bool int8_wire = false;  // sends 8-bit values; fsdp: parameters and gradients; sdp: gradients
  bool reshard = true;
  bool deferred = true;  // fsdp: builds the model with deferred(), so that no rank holds the whole model
};

// Parses the command line and fills in default sizes. With --help, prints the help and returns nullopt. Throws
// boost::program_options::error for invalid options.
std::optional<Options> parse(int argc, char** argv);

}  // namespace train_step
