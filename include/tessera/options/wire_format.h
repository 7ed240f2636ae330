#pragma once

#include <cstdint>

namespace tessera {

// The format in which floating-point parameters or gradients are sent to other ranks. Other values are sent as kDtype.
enum class WireFormat : uint8_t {
  kDtype,       // values in their own dtype: exact
  kInt8Blocks,  // 8 bits a value and an fp32 scale for 256 values (ZeRO++, Wang et al., 2023): rounds
};

}  // namespace tessera
