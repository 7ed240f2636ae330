#include "sample.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <span>

namespace train_gpt {
namespace {

at::Tensor last_tokens(std::span<const uint16_t> tokens, int64_t context, at::Device device) {
  const auto seen = tokens.last(std::min<size_t>(tokens.size(), context));
  const std::vector<int64_t> ids(seen.begin(), seen.end());
  return torch::tensor(ids, torch::kInt64).unsqueeze(0).to(device);
}

// logits: [vocabulary], on the CPU
uint16_t draw(at::Tensor logits, const SampleOptions& options, const at::Generator& random) {
  if (options.temperature == 0.0) return static_cast<uint16_t>(logits.argmax().item<int64_t>());
  logits = logits / options.temperature;
  if (options.top_k > 0 && options.top_k < logits.numel()) {
    const auto threshold = std::get<0>(logits.topk(options.top_k)).min();
    logits = logits.masked_fill(logits < threshold, -std::numeric_limits<double>::infinity());
  }
  return static_cast<uint16_t>(at::multinomial(logits.softmax(0), 1, false, random).item<int64_t>());
}

}  // namespace

std::vector<uint16_t> generate(Trainable& model, std::vector<uint16_t> prompt, const SampleOptions& options,
                               at::Device device) {
  const torch::NoGradGuard no_grad;
  const auto random = at::detail::createCPUGenerator(options.seed);
  auto tokens = std::move(prompt);
  for (int64_t i = 0; i < options.length; ++i) {
    const auto logits = model.forward(last_tokens(tokens, options.context, device));
    tokens.push_back(draw(logits[0][-1].to(torch::kCPU, torch::kFloat64), options, random));
  }
  return tokens;
}

}  // namespace train_gpt
