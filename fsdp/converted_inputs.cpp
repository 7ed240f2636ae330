#include <tessera/detail/converted_inputs.h>

#include <algorithm>

namespace tessera {
using namespace internal;
namespace {

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? -1 : static_cast<int64_t>(tensor._version());
}

}  // namespace

at::Tensor ConvertedInputs::convert(const at::Tensor& own, at::ScalarType dtype) {
  for (const Input& input : inputs_)
    if (input.own.is_same(own)) return input.given;
  const at::Tensor given = own.to(dtype);
  if (!given.is_same(own)) inputs_.push_back({own, given, version_of(given)});
  return given;
}

void ConvertedInputs::copy_changes() const {
  for (const Input& input : inputs_)
    if (version_of(input.given) != input.version) input.own.copy_(input.given);
}

at::Tensor ConvertedInputs::own_of(const at::Tensor& tensor) const {
  for (const Input& input : inputs_)
    if (input.given.is_same(tensor)) return input.own;
  return tensor;
}

bool ConvertedInputs::are_same(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others) {
  return std::ranges::equal(some, others, [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); });
}

}  // namespace tessera
