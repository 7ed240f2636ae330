#include "data.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <new>
#include <nlohmann/json.hpp>
#include <set>
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

namespace {

namespace fs = std::filesystem;

constexpr int64_t kValidationShare = 10;  // one token in ten
constexpr int32_t kLlmcMagic = 20240520;
constexpr int32_t kLlmcUint16Version = 1;
constexpr size_t kLlmcHeaderBytes = 256 * sizeof(int32_t);

[[noreturn]] void fail(const fs::path& path, const std::string& problem) {
  throw std::runtime_error("--data " + path.string() + ": " + problem);
}

std::string read_bytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(path, "cannot be read");
  std::string bytes(fs::file_size(path), '\0');
  if (!file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()))) fail(path, "cannot be read to its end");
  if (const std::string problem = lfs_problem(bytes); !problem.empty()) fail(path, problem);
  return bytes;
}

// Returns the contexts of a SQuAD file, which has the form {"data": [{"paragraphs": [{"context": "..."}]}]}.
std::string squad_contexts(const fs::path& path) {
  std::string text;
  std::set<std::string> seen;
  try {
    const auto document = nlohmann::json::parse(read_bytes(path));
    for (const auto& article : document.at("data")) {
      for (const auto& paragraph : article.at("paragraphs")) {
        const auto& context = paragraph.at("context").get_ref<const std::string&>();
        if (seen.insert(context).second) text += context + "\n";
      }
    }
  } catch (const nlohmann::json::exception& error) {
    fail(path, std::string("a .json file must be SQuAD's (data, paragraphs, context): ") + error.what());
  }
  return text;
}

std::string read_text(const fs::path& path) {
  return path.extension() == ".json" ? squad_contexts(path) : read_bytes(path);
}

bool hidden(const fs::path& path) { return path.filename().string().starts_with("."); }

std::vector<fs::path> files_below(const fs::path& directory) {
  std::vector<fs::path> files;
  for (auto it = fs::recursive_directory_iterator(directory); it != fs::recursive_directory_iterator(); ++it) {
    if (hidden(it->path())) {
      if (it->is_directory()) it.disable_recursion_pending();
    } else if (it->is_regular_file()) {
      files.push_back(it->path());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

Corpus corpus_of_text(const fs::path& path, const std::string& text, const std::string& note) {
  if (text.empty()) fail(path, "holds no text");
  Corpus corpus;
  corpus.vocabulary = Vocabulary::of_bytes(text);
  corpus.tokens = corpus.vocabulary.encode(text);
  corpus.description = path.string() + note;
  return corpus;
}

Corpus read_directory(const fs::path& directory) {
  std::string text;
  int64_t taken = 0, skipped = 0;
  for (const auto& path : files_below(directory)) {
    const auto content = read_text(path);
    if (content.find('\0') != std::string::npos) {
      ++skipped;
      continue;
    }
    if (!text.empty() && text.back() != '\n') text += '\n';
    text += content;
    ++taken;
  }
  auto note = " (" + std::to_string(taken) + (taken == 1 ? " file" : " files");
  if (skipped > 0) note += "; " + std::to_string(skipped) + " binary left out";
  return corpus_of_text(directory, text, note + ")");
}

// Returns the size of llm.c's header, or 0 if the file has none. Throws std::runtime_error if the header is wrong.
size_t token_offset_bytes(const fs::path& path, const std::string& bytes) {
  int32_t header[3] = {};  // magic, version, number of tokens
  if (bytes.size() >= sizeof(header)) std::memcpy(header, bytes.data(), sizeof(header));
  if (header[0] != kLlmcMagic) return 0;
  if (bytes.size() < kLlmcHeaderBytes) fail(path, "ends within llm.c's header");
  if (header[1] != kLlmcUint16Version) {
    fail(path,
         "has llm.c's header of version " + std::to_string(header[1]) + "; only version 1, 16-bit tokens, is read");
  }
  const auto tokens = (bytes.size() - kLlmcHeaderBytes) / sizeof(uint16_t);
  if (tokens != static_cast<size_t>(header[2])) {
    fail(path, "holds " + std::to_string(tokens) + " tokens, but its header says " + std::to_string(header[2]));
  }
  return kLlmcHeaderBytes;
}

Corpus read_token_file(const fs::path& path) {
  const auto bytes = read_bytes(path);
  const auto offset = token_offset_bytes(path, bytes);
  const auto body = bytes.size() - offset;
  if (body == 0) fail(path, "holds no tokens");
  if (body % sizeof(uint16_t) != 0) fail(path, "has an odd number of bytes, so it does not hold 16-bit tokens");
  Corpus corpus;
  corpus.tokens.resize(body / sizeof(uint16_t));
  std::memcpy(corpus.tokens.data(), bytes.data() + offset, body);
  corpus.vocabulary = Vocabulary::of_ids(*std::max_element(corpus.tokens.begin(), corpus.tokens.end()) + 1);
  corpus.description = path.string() + " (token ids)";
  return corpus;
}

size_t train_numel(const std::vector<uint16_t>& tokens) { return tokens.size() - tokens.size() / kValidationShare; }

}  // namespace

std::span<const uint16_t> Corpus::train() const { return std::span(tokens).first(train_numel(tokens)); }

std::span<const uint16_t> Corpus::validation() const { return std::span(tokens).subspan(train_numel(tokens)); }

Corpus read_corpus(const fs::path& path) try {
  if (!fs::exists(path)) fail(path, "does not exist");
  if (fs::is_directory(path)) return read_directory(path);
  if (!fs::is_regular_file(path)) fail(path, "is neither a file nor a directory");
  if (path.extension() == ".bin") return read_token_file(path);
  return corpus_of_text(path, read_text(path), "");
} catch (const fs::filesystem_error& error) {  // thrown for a file in the directory
  fail(path, error.path1().string() + ": " + error.code().message());
} catch (const std::bad_alloc&) {
  fail(path, "does not fit in memory");
} catch (const std::length_error&) {
  fail(path, "does not fit in memory");
}

void check_length(const Corpus& corpus, int64_t context) {
  const auto check = [&](std::span<const uint16_t> part, const char* name) {
    if (static_cast<int64_t>(part.size()) > context) return;
    throw std::runtime_error("--data " + corpus.description + ": its " + name + " part has " +
                             std::to_string(part.size()) + " tokens; a context of " + std::to_string(context) +
                             " needs at least " + std::to_string(context + 1));
  };
  check(corpus.train(), "training");
  check(corpus.validation(), "validation");
}

double unigram_loss(std::span<const uint16_t> train, std::span<const uint16_t> targets, int64_t vocabulary) {
  std::vector<double> count(vocabulary, 1.0);
  for (const uint16_t token : train) count[token] += 1.0;
  const double total = static_cast<double>(train.size()) + static_cast<double>(vocabulary);
  double loss = 0.0;
  for (const uint16_t token : targets) loss -= std::log(count[token] / total);
  return loss / static_cast<double>(targets.size());
}

namespace {

// Returns the number of windows of an epoch: as many as fit after an offset of `context`, the largest. So all epochs
// have the same length. A text too short for this has one window, and smaller offsets.
int64_t windows_in(int64_t text_numel, int64_t context) {
  return std::max<int64_t>(1, (text_numel - context) / (context + 1));
}

}  // namespace

WindowSampler::WindowSampler(int64_t text_numel, int64_t context, uint64_t seed, BatchShape shape)
    : window_numel_(context + 1),
      windows_(windows_in(text_numel, context)),
      max_offset_(std::min(context, text_numel - windows_ * window_numel_)),
      shape_(shape),
      order_(windows_, seed) {}

void WindowSampler::set_origin(int64_t step, int64_t position) {
  origin_step_ = step;
  origin_ = position;
}

std::vector<int64_t> WindowSampler::starts(int64_t step, int64_t micro_batch, int64_t rank) {
  const int64_t first = position(step) + rank * shape_.per_rank() + micro_batch * shape_.batch;
  std::vector<int64_t> starts(shape_.batch);
  for (int64_t i = 0; i < shape_.batch; ++i) starts[i] = start_of(first + i);
  return starts;
}

int64_t WindowSampler::start_of(int64_t position) {
  const int64_t offset = order_.draw_of_epoch(position / windows_, max_offset_ + 1);
  return offset + order_.item(position) * window_numel_;
}

std::vector<int64_t> validation_starts(int64_t text_numel, int64_t context, int64_t count) {
  const int64_t available = text_numel / (context + 1);
  const int64_t taken = std::min(count, available);
  std::vector<int64_t> starts(taken);
  for (int64_t i = 0; i < taken; ++i) starts[i] = i * available / taken * (context + 1);
  return starts;
}

Batch make_batch(std::span<const uint16_t> tokens, const std::vector<int64_t>& starts, int64_t context,
                 at::Device device) {
  const int64_t window_numel = context + 1;
  auto windows = torch::empty({static_cast<int64_t>(starts.size()), window_numel}, torch::kInt64);
  auto* row = windows.mutable_data_ptr<int64_t>();
  for (const int64_t start : starts) {
    const auto window = tokens.subspan(start, window_numel);
    row = std::copy(window.begin(), window.end(), row);
  }
  windows = windows.to(device);
  return {windows.narrow(1, 0, context).contiguous(), windows.narrow(1, 1, context).contiguous()};
}

at::Tensor language_model_loss(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits.flatten(0, 1).to(at::kFloat), targets.flatten());
}

}  // namespace train_gpt
