#include "tessera/memory/switches.h"

#include <cstdlib>
#include <string_view>

namespace tessera {

bool is_switched_off(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::string_view(value) == "0";
}

}  // namespace tessera
