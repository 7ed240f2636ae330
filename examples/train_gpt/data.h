#pragma once

#include <tessera/distributed_sampler.h>
#include <torch/torch.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace train_gpt {

// Returns an error text if a file's first bytes are those of a Git LFS pointer; otherwise "".
inline std::string lfs_problem(std::string_view beginning) {
  if (!beginning.starts_with("version https://git-lfs")) return "";
  return "is a pointer of Git LFS, not the file itself: fetch it by `git lfs pull`";
}

// Maps text to tokens and back. A text's tokens are the bytes that occur in it, numbered in byte order. Tokens of a
// token file have no known text: their text is their ids as numbers, separated by spaces.
class Vocabulary {
 public:
  static Vocabulary of_bytes(std::string_view text);
  static Vocabulary of_ids(int64_t size);

  int64_t size() const { return size_; }
  bool is_text() const { return !byte_of_token_.empty(); }

  // Returns the tokens of a text. Throws std::invalid_argument for a byte that is not in the vocabulary or, with ids,
  // for a word that is not a number below size().
  std::vector<uint16_t> encode(std::string_view text) const;

  std::string decode(std::span<const uint16_t> tokens) const;

  // Returns the first token of a sample without a prompt: a new line if the vocabulary has it, else token 0.
  uint16_t start_token() const;

 private:
  int64_t size_ = 0;
  std::string byte_of_token_;                 // empty for ids
  std::array<int16_t, 256> token_of_byte_{};  // -1: not in the vocabulary
};

// The training data, as tokens in memory.
struct Corpus {
  std::string description;  // one line for the user: the path; of a directory, the numbers of files read and left out
  Vocabulary vocabulary;
  std::vector<uint16_t> tokens;

  // train() returns the first nine tenths of the tokens, and validation() the last tenth.
  std::span<const uint16_t> train() const;
  std::span<const uint16_t> validation() const;
};

// Reads
//  - a text file: its bytes are the tokens;
//  - a directory: the text files below it, in the order of their paths, each starting on a new line; hidden files and
//    binary files (with a zero byte) are left out;
//  - a .json file (also within a directory): SQuAD's contexts, each once, one a line;
//  - a .bin file: 16-bit token ids, bare or with llm.c's header of 256 32-bit integers.
// Throws std::runtime_error that names the file and the problem.
Corpus read_corpus(const std::filesystem::path& path);

// Throws std::runtime_error if the training or the validation part has fewer than context + 1 tokens (a window).
void check_length(const Corpus& corpus, int64_t context);

// Returns the loss in nats per token of a model that predicts each token of `targets` with its frequency in `train`.
// Adds 1 to the count of each token, so that no frequency is 0.
double unigram_loss(std::span<const uint16_t> train, std::span<const uint16_t> targets, int64_t vocabulary);

// The distribution of one optimizer step's sequences over ranks and micro-batches.
struct BatchShape {
  int64_t ranks = 1;
  int64_t batch = 1;         // sequences per rank and micro-batch
  int64_t accumulation = 1;  // micro-batches per step

  int64_t per_rank() const { return batch * accumulation; }
  int64_t global() const { return ranks * per_rank(); }
};

// Chooses the training sequences of each step and rank.
//
// An epoch cuts the text into windows of context + 1 tokens that do not overlap, and visits each window once in random
// order. The offset of the first window changes with the epoch. Epochs form one endless sequence of windows. Each step
// takes the next global() windows. Of these, each rank takes per_rank() consecutive ones: ranks never share a window.
//
// The sequence does not depend on `shape`. If two runs have the same global(), their steps have the same windows, and
// their losses are equal up to rounding, whatever the number of ranks.
class WindowSampler {
 public:
  // `text_numel` must be greater than `context`.
  WindowSampler(int64_t text_numel, int64_t context, uint64_t seed, BatchShape shape);

  // Makes `step` begin at `position` of the sequence. Needed if earlier steps had another BatchShape::global().
  void set_origin(int64_t step, int64_t position);
  int64_t position(int64_t step) const { return origin_ + (step - origin_step_) * shape_.global(); }

  int64_t windows_per_epoch() const { return windows_; }

  // Returns the offsets in the text of a micro-batch's `batch` windows.
  std::vector<int64_t> starts(int64_t step, int64_t micro_batch, int64_t rank);

 private:
  int64_t start_of(int64_t position);

  int64_t window_numel_;  // context + 1
  int64_t windows_;       // per epoch
  int64_t max_offset_;
  BatchShape shape_;
  int64_t origin_step_ = 0, origin_ = 0;
  tessera::EpochOrder order_;
};

// Returns the offsets of at most `count` validation windows, in order and spread evenly over the text. They do not
// depend on the number of ranks.
std::vector<int64_t> validation_starts(int64_t text_numel, int64_t context, int64_t count);

struct Batch {
  at::Tensor inputs;   // [B, context], int64
  at::Tensor targets;  // [B, context], int64: the token after each input token
};

// Returns the inputs and targets of the windows of context + 1 tokens that start at `starts`.
Batch make_batch(std::span<const uint16_t> tokens, const std::vector<int64_t>& starts, int64_t context,
                 at::Device device);

// Returns the mean cross-entropy of logits [B, T, vocabulary], in nats per token.
at::Tensor language_model_loss(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace train_gpt
