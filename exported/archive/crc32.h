#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::internal {

// Returns the CRC-32 of zip archives (ISO 3309; polynomial 0xEDB88320, reflected). `crc` continues one of the bytes
// before.
uint32_t crc32(std::string_view bytes, uint32_t crc = 0);

}  // namespace tessera::internal
