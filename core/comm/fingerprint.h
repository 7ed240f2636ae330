#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::internal {

// A 64-bit hash (FNV-1a) of a sequence of texts and numbers. Equal sequences have equal hashes on all machines.
class Fingerprint {
 public:
  Fingerprint& add(std::string_view text) {
    for (const char character : text) mix(static_cast<unsigned char>(character));
    mix(0xff);  // ends the text, so that "ab", "c" and "a", "bc" differ
    return *this;
  }
  Fingerprint& add(int64_t number) {
    for (int shift = 0; shift < 64; shift += 8) mix(static_cast<unsigned char>(number >> shift));
    return *this;
  }
  uint64_t value() const { return hash_; }

 private:
  void mix(unsigned char byte) { hash_ = (hash_ ^ byte) * 0x100000001b3ULL; }

  uint64_t hash_ = 0xcbf29ce484222325ULL;
};

}  // namespace tessera::internal
