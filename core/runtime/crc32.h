#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::internal {

// Returns the CRC-32 of zip archives (ISO 3309, polynomial 0xEDB88320, reflected). `before`: CRC-32 of earlier bytes.
uint32_t crc32(std::string_view bytes, uint32_t before = 0);

// Returns the CRC-32C of TensorBoard's files: Castagnoli's polynomial, 0x82F63B78, reflected.
uint32_t crc32c(std::string_view bytes);

}  // namespace tessera::internal
