#pragma once

#include <limits.h>
#include <sys/random.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <string>
#include <system_error>

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

// Returns 64 random bits of the system, for identities and tokens. Throws std::system_error if the system has none.
inline uint64_t random_bits() {
  uint64_t bits = 0;
  if (::getrandom(&bits, sizeof(bits), 0) == sizeof(bits)) return bits;
  throw std::system_error(errno, std::generic_category(), "getrandom");
}

}  // namespace tessera::internal
