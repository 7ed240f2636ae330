#pragma once

#include <cstdint>
#include <string>

namespace tessera::internal {

// Makes sure that this process may open so many descriptors (files, sockets) more, and raises its soft limit
// (RLIMIT_NOFILE) as far as the hard one if it must. Throws CommError that says how many are needed and how many there
// are: gloo would end the process in the middle of connecting. `for_what`: "the connections of 256 ranks".
void require_descriptors(int64_t needed, const std::string& for_what);

// Opens /dev/null as those of stdin, stdout and stderr that are closed: a socket would get that number, and with it
// what anybody prints.
void open_standard_descriptors();

}  // namespace tessera::internal
