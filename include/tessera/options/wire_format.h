#pragma once

#include <cstdint>

namespace tessera {

// The format in which floating-point parameters or gradients are sent to other ranks. Other values are sent as kDtype.
enum class WireFormat : uint8_t {
  kDtype,       // numbers of their dtype: exact
  kInt8Blocks,  // 8 bit and an fp32 scale for each 256 elements (ZeRO++, Wang et al., 2023); rounds
};

}  // namespace tessera
