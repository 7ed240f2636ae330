#pragma once

#include <cstdint>

namespace tessera {

// The format in which ranks send floating-point parameters or gradients. Other values are always sent as kDtype.
enum class WireFormat : uint8_t {
  kDtype,       // values in their own dtype: exact
  kInt8Blocks,  // 8 bits a value and an fp32 scale per 256 values (ZeRO++, Wang et al., 2023): rounded
};

}  // namespace tessera
