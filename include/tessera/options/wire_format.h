#pragma once

#include <cstdint>

namespace tessera {

// In what form parameters or gradients travel between ranks.
enum class WireFormat : uint8_t {
  kDtype,       // as numbers of their dtype: exact
  kInt8Blocks,  // 8 bit and an fp32 scale for each 256 elements (ZeRO++, Wang et al., 2023); rounds
};

}  // namespace tessera
