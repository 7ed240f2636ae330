#include <tessera/detail/listed_optimizer.h>

namespace tessera::internal {

void require_option(bool holds, const char* optimizer, const char* option, double value, const char* expected) {
  if (!holds) throw std::invalid_argument(c10::str(optimizer, ": ", option, " is ", value, ", expected ", expected));
}

void listed::require_fields(const std::vector<std::string>& missing, const std::vector<std::string>& unknown) {
  if (missing.empty() && unknown.empty()) return;
  throw std::invalid_argument(c10::str("an archive of another optimizer: ", missing.empty() ? "it has " : "it lacks ",
                                       missing.empty() ? unknown[0] : missing[0]));
}

void require_dense(const at::Tensor& parameter, const char* optimizer) {
  auto require = [&](bool holds, const auto&... problem) {
    if (!holds)
      throw std::invalid_argument(c10::str(optimizer, ": a parameter of shape ", parameter.sizes(), problem...));
  };
  require(!parameter.is_meta(), " has no values, expected those of materialize() or of a wrapper");
  require(at::isFloatingType(parameter.scalar_type()), " is ", parameter.scalar_type(),
          ", expected a floating-point type");
  require(parameter.is_non_overlapping_and_dense(), " has strides ", parameter.strides(), ", expected dense ones");
  require(!parameter.grad().defined() || parameter.grad().layout() == at::kStrided, " has a gradient of layout ",
          parameter.grad().defined() ? parameter.grad().layout() : at::kStrided, ", expected a dense one");
}

}  // namespace tessera::internal
