#include "tessera/flat/scope.h"

#include <exception>

#include "tessera/comm/errors.h"

namespace tessera {

Scope::~Scope() noexcept(false) {
  if (std::uncaught_exceptions() == 0) {
    leave();
    return;
  }
  try {
    leave();
  } catch (const CommError&) {
    // The exception on its way says more than this one.
  }
}

}  // namespace tessera
