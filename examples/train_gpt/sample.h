#pragma once

#include <cstdint>
#include <vector>

#include "trainable.h"

namespace train_gpt {

struct SampleOptions {
  int64_t length = 400;      // tokens to add
  int64_t context = 128;     // how many tokens the model looks back at
  double temperature = 0.8;  // 0: the likeliest token always
  int64_t top_k = 20;        // 0: all
  uint64_t seed = 1;
};

// Continues `prompt` (at least one token) and returns prompt and continuation. Collective: each
// forward pass of a sharded model gathers its parameters from all ranks. All ranks get the same.
std::vector<uint16_t> generate(Trainable& model, std::vector<uint16_t> prompt, const SampleOptions& options,
                               at::Device device);

}  // namespace train_gpt
