#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace train_gpt {

// What the tokens of a corpus stand for: the bytes that occur in a text, in byte order, or nothing
// that we know (token files), in which case text is written as numbers with spaces between.
class Vocabulary {
 public:
  static Vocabulary of_bytes(std::string_view text);
  static Vocabulary of_ids(int64_t size);

  int64_t size() const { return size_; }
  bool is_text() const { return !byte_of_token_.empty(); }

  // Throws std::invalid_argument for a byte that is not in the vocabulary, or for ids: what is not
  // a number below size().
  std::vector<uint16_t> encode(std::string_view text) const;

  std::string decode(std::span<const uint16_t> tokens) const;

  // Where a sample without a prompt starts: a new line if there is one, else token 0.
  uint16_t start_token() const;

 private:
  int64_t size_ = 0;
  std::string byte_of_token_;                 // empty for ids
  std::array<int16_t, 256> token_of_byte_{};  // -1: not in the vocabulary
};

}  // namespace train_gpt
