#include <tessera/wrap.h>

#include <stdexcept>
#include <utility>

namespace tessera {

WrapPolicy wrap_by_size(int64_t min_numel) {
  if (min_numel < 1)
    throw std::invalid_argument("wrap_by_size: min_numel is " + std::to_string(min_numel) + ", expected at least 1");
  return [min_numel](const std::string&, const torch::nn::Module&, int64_t unclaimed_numel) {
    return unclaimed_numel >= min_numel;
  };
}

WrapPolicy wrap_if(std::function<bool(const std::string&, const torch::nn::Module&)> predicate) {
  if (!predicate) throw std::invalid_argument("wrap_if: the predicate is empty");
  return [predicate = std::move(predicate)](const std::string& fqn, const torch::nn::Module& module, int64_t) {
    return predicate(fqn, module);
  };
}

}  // namespace tessera
