#pragma once

#include <cstdint>
#include <string>

namespace tessera::internal {

// Checks that this process can open `needed` more descriptors (files, sockets). With `may_raise`, raises its soft limit
// (RLIMIT_NOFILE) up to the hard limit if necessary. Throws CommError with the needed and the available number: gloo
// would end the process while it connects. `for_what` is for example "the connections of 256 ranks". Thread-safe.
void require_descriptors(int64_t needed, const std::string& for_what, bool may_raise);

// Restores the soft limit from before require_descriptors() raised it, unless the program has set another one since.
// Thread-safe.
void restore_descriptor_limit();

// Opens /dev/null as stdin, stdout or stderr if these are closed. Otherwise a socket could get their number, and
// receive the program's output.
void open_standard_descriptors();

// Closes the descriptors that open_standard_descriptors() opened, if they are still /dev/null.
void close_standard_descriptors();

}  // namespace tessera::internal
