#pragma once

#include <cstdint>
#include <string>

namespace tessera::internal {

// Checks that this process can open so many more descriptors (files, sockets). Raises its soft limit (RLIMIT_NOFILE) up
// to the hard limit if necessary. Throws CommError with the needed and the available number: gloo would end the process
// while it connects. `for_what` is for example "the connections of 256 ranks".
void require_descriptors(int64_t needed, const std::string& for_what);

// Opens /dev/null as stdin, stdout or stderr if these are closed. Otherwise a socket could get their number, and
// receive the program's output.
void open_standard_descriptors();

}  // namespace tessera::internal
