#include "tessera/flat/scope.h"

#include <exception>

namespace tessera {

Scope::~Scope() noexcept(false) {
  if (std::uncaught_exceptions() == 0) {
    leave();
    return;
  }
  try {
    leave();
  } catch (const std::exception&) {
    // The exception on its way says more than this one.
  }
}

}  // namespace tessera
