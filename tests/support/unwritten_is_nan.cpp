// Fills new tensors with NaN or the largest value, in every test program. So tests that read unwritten memory fail.
// Otherwise, such memory often contains zeros, or the correct values of an earlier tensor.
#include <ATen/Context.h>

namespace tessera::testing_support {
namespace {

[[maybe_unused]] const bool kIsOn = [] {
  at::globalContext().setDeterministicAlgorithms(/*on=*/true, /*warn_only=*/true);
  at::globalContext().setDeterministicFillUninitializedMemory(true);
  return true;
}();

}  // namespace
}  // namespace tessera::testing_support
