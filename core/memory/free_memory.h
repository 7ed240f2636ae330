#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace tessera::internal {

// The memory that processes can still allocate on `device`: on the CPU, the system's available memory (including
// droppable file pages) within the control group's limit; on an accelerator, the driver's free memory. nullopt if
// unknown. Other processes may take it first. Thread-safe.
std::optional<int64_t> free_memory_bytes(c10::Device device);

}  // namespace tessera::internal
