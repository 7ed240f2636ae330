#include "tessera/recompute/saved_inputs.h"

#include <utility>

namespace tessera {
namespace {

thread_local SavedInputs* current_inputs = nullptr;

}  // namespace

SavedInputs::Use::Use(SavedInputs& inputs) : before_(std::exchange(current_inputs, &inputs)) {}
SavedInputs::Use::~Use() { current_inputs = before_; }

SavedInputs* SavedInputs::current() { return current_inputs; }

}  // namespace tessera
