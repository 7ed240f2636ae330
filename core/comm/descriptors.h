#pragma once

#include <cstdint>
#include <string>

namespace tessera::internal {

// Checks that this process can open `needed` more descriptors (files, sockets). With `may_raise`, raises the soft limit
// (RLIMIT_NOFILE) up to the hard limit if necessary. If the limit is too low, throws CommError with the needed and the
// available number, because gloo would end the process. `for_what` is e.g. "the connections of 256 ranks". Thread-safe.
void require_descriptors(int64_t needed, const std::string& for_what, bool may_raise);

// Restores the soft limit from before require_descriptors() raised it, unless the program has set another one since.
// Thread-safe.
void restore_descriptor_limit();

// Opens /dev/null as each of stdin, stdout and stderr that is closed. Otherwise a socket could get that descriptor, and
// receive the program's output.
void open_standard_descriptors();

// Closes the descriptors that open_standard_descriptors() opened, if they are still /dev/null.
void close_standard_descriptors();

}  // namespace tessera::internal
