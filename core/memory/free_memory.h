#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace tessera::internal {

// How much more the processes here may take on `device` before something fails: on the CPU what the system has
// available (file pages that it can drop among it), no more than the control group allows; on an accelerator what its
// driver says is free. Nothing where that is not known. Other processes may take it first. Any thread.
std::optional<int64_t> free_memory_bytes(c10::Device device);

}  // namespace tessera::internal
