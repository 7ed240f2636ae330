#pragma once

#include <memory>

#include <tessera/launch.h>
#include "core/comm/gloo/transport.h"

namespace tessera::internal {

// Carries the messages of a group by the program's message library, such as MPI. The library is called by the thread
// that starts and awaits operations, and by no other. Its messages progress while that thread waits.
std::shared_ptr<TransportSource> message_transports(std::shared_ptr<MessageLibrary> library);

}  // namespace tessera::internal
