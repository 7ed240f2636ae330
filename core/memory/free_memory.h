#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

#include "core/memory/container_limits.h"

namespace tessera::internal {

// Returns the memory that processes can still allocate on `device`. On the CPU, this is the system's available memory
// (including droppable file pages) within the control groups' limits. On an accelerator, it is the driver's free
// memory. Returns nullopt if unknown. Other processes may allocate the memory first. Thread-safe.
std::optional<int64_t> free_memory_bytes(c10::Device device,
                                         const ControlGroups& groups = ControlGroups::of_this_process());

}  // namespace tessera::internal
