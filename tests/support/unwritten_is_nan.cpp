// Linked into every test program: fills new tensors with NaN or the largest value. So reads of unwritten memory fail,
// in every run. Leftover memory is often zero or has an earlier run's correct values.
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
