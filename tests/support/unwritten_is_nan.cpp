// In every test program: memory of a tensor that nobody has written is NaN, or as large as can be, and not what lay
// there before, which is mostly zeros or an earlier run's right values. Who reads it is found, and at each run.
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
