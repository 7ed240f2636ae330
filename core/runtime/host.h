#pragma once

#include <limits.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <string>

namespace tessera::internal {

// Returns the name of this host; "localhost" if it has none.
inline std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 && name[0] != '\0' ? name.data() : "localhost";
}

// Returns an id that changes at each boot of this host; "" if the system has none.
inline std::string boot_id() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id") >> std::ws, boot);
  return boot;
}

}  // namespace tessera::internal
