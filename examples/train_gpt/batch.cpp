#include "batch.h"

#include <algorithm>

namespace train_gpt {

Batch make_batch(std::span<const uint16_t> tokens, const std::vector<int64_t>& starts, int64_t context,
                 at::Device device) {
  const int64_t window_numel = context + 1;
  auto windows = torch::empty({static_cast<int64_t>(starts.size()), window_numel}, torch::kInt64);
  auto* row = windows.mutable_data_ptr<int64_t>();
  for (const int64_t start : starts) {
    const auto window = tokens.subspan(start, window_numel);
    row = std::copy(window.begin(), window.end(), row);
  }
  windows = windows.to(device);
  return {windows.narrow(1, 0, context).contiguous(), windows.narrow(1, 1, context).contiguous()};
}

at::Tensor language_model_loss(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
}

}  // namespace train_gpt
