// Linked into every test program: fills new tensors with NaN or the largest value instead of leftover memory, which is
// often zero or an earlier run's correct values. So reads of unwritten memory fail, in every run.
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
