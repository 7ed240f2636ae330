#include "vocabulary.h"

#include <charconv>
#include <sstream>
#include <stdexcept>

namespace train_gpt {
namespace {

std::string shown(unsigned char byte) {
  if (byte > 0x20 && byte < 0x7f) return std::string("'") + static_cast<char>(byte) + "'";
  return "byte " + std::to_string(byte);
}

uint16_t parse_id(const std::string& word, int64_t size) {
  int64_t id = -1;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
  if (error != std::errc() || end != word.data() + word.size() || id < 0 || id >= size) {
    throw std::invalid_argument("'" + word + "' is not a token id below " + std::to_string(size));
  }
  return static_cast<uint16_t>(id);
}

}  // namespace

Vocabulary Vocabulary::of_bytes(std::string_view text) {
  std::array<bool, 256> occurs{};
  for (const unsigned char byte : text) occurs[byte] = true;
  Vocabulary vocabulary;
  vocabulary.token_of_byte_.fill(-1);
  for (int byte = 0; byte < 256; ++byte) {
    if (!occurs[byte]) continue;
    vocabulary.token_of_byte_[byte] = static_cast<int16_t>(vocabulary.byte_of_token_.size());
    vocabulary.byte_of_token_ += static_cast<char>(byte);
  }
  vocabulary.size_ = static_cast<int64_t>(vocabulary.byte_of_token_.size());
  return vocabulary;
}

Vocabulary Vocabulary::of_ids(int64_t size) {
  Vocabulary vocabulary;
  vocabulary.size_ = size;
  return vocabulary;
}

std::vector<uint16_t> Vocabulary::encode(std::string_view text) const {
  std::vector<uint16_t> tokens;
  if (!is_text()) {
    std::istringstream words{std::string(text)};
    for (std::string word; words >> word;) tokens.push_back(parse_id(word, size_));
    return tokens;
  }
  tokens.reserve(text.size());
  for (const unsigned char byte : text) {
    const int16_t token = token_of_byte_[byte];
    if (token < 0) throw std::invalid_argument(shown(byte) + " does not occur in the data");
    tokens.push_back(static_cast<uint16_t>(token));
  }
  return tokens;
}

std::string Vocabulary::decode(std::span<const uint16_t> tokens) const {
  std::string text;
  for (const uint16_t token : tokens) {
    if (is_text()) {
      text += byte_of_token_.at(token);
    } else {
      if (!text.empty()) text += ' ';
      text += std::to_string(token);
    }
  }
  return text;
}

uint16_t Vocabulary::start_token() const {
  return is_text() && token_of_byte_['\n'] >= 0 ? static_cast<uint16_t>(token_of_byte_['\n']) : 0;
}

}  // namespace train_gpt
