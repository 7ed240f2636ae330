#include <tessera/detail/saved_inputs.h>

namespace tessera {
using namespace internal;

// Not inline: inside a std::optional, GCC 12 would warn that before_ may be uninitialized.
SavedInputs::Scope::~Scope() { current_ = before_; }

}  // namespace tessera
