#pragma once

#include <cstdint>
#include <string>

namespace tessera::internal {

// Ensures that this process can open `needed` more descriptors (files, sockets). With `may_raise`, raises the soft
// limit (RLIMIT_NOFILE) if necessary, at most to the hard limit. Throws CommError if the limit is too low: gloo would
// then end the process. The error begins with `for_what`, e.g. "the connections of 256 ranks". Thread-safe.
void require_descriptors(int64_t needed, const std::string& for_what, bool may_raise);

// Restores the soft limit that require_descriptors() has raised. A no-op if the limit was not raised, or if the program
// has changed the limit since. Thread-safe.
void restore_descriptor_limit();

// If stdin, stdout or stderr is closed, opens /dev/null in its place. Otherwise a new socket could use the free
// descriptor, and the program's output would be written to that socket.
void open_standard_descriptors();

// Closes the descriptors that open_standard_descriptors() opened, if they are still /dev/null.
void close_standard_descriptors();

}  // namespace tessera::internal
