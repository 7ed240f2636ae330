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

// The meaning of a corpus's tokens: the bytes that occur in a text, in byte order, or ids without a known meaning
// (token files), which are written as numbers with spaces between.
class Vocabulary {
 public:
  static Vocabulary of_bytes(std::string_view text);
  static Vocabulary of_ids(int64_t size);

  int64_t size() const { return size_; }
  bool is_text() const { return !byte_of_token_.empty(); }

  // Throws std::invalid_argument for a byte that is not in the vocabulary or, with ids, for a word that is not a number
  // below size().
  std::vector<uint16_t> encode(std::string_view text) const;

  std::string decode(std::span<const uint16_t> tokens) const;

  // The first token of a sample without a prompt: a new line if the vocabulary has it, else token 0.
  uint16_t start_token() const;

 private:
  int64_t size_ = 0;
  std::string byte_of_token_;                 // empty for ids
  std::array<int16_t, 256> token_of_byte_{};  // -1: not in the vocabulary
};

// The training data, as tokens in memory.
struct Corpus {
  std::string description;  // one line for the user: the path, the number of files read and left out
  Vocabulary vocabulary;
  std::vector<uint16_t> tokens;

  // The last tenth of the tokens is for validation.
  std::span<const uint16_t> train() const;
  std::span<const uint16_t> validation() const;
};

// Reads
//  - a text file: its bytes are the tokens;
//  - a directory: the text files below it, in the order of their paths, each starting a new line; hidden files, and
//    binary files (those with a zero byte), are left out;
//  - a .json file (also within a directory): SQuAD's contexts, each once, one a line;
//  - a .bin file: 16-bit token ids, bare or with llm.c's header of 256 32-bit integers.
// Throws std::runtime_error that names the file and the problem.
Corpus read_corpus(const std::filesystem::path& path);

// Throws std::runtime_error if a part of the corpus has no window of context + 1 tokens.
void check_length(const Corpus& corpus, int64_t context);

// The loss on `targets`, in nats a token, of predicting each token with its frequency in `train`. Each token is counted
// once more, so that no frequency is 0.
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
// An epoch cuts the text into windows of context + 1 tokens that do not overlap, from an offset that changes with the
// epoch, and visits each window once in random order. Epochs form one endless sequence of windows. Each step takes the
// next global() windows, and each rank a run of per_rank() of these, so ranks never share a window.
//
// The sequence does not depend on the shape. Two shapes with the same global() therefore see the same sequences in each
// step, and give the same losses to rounding, whatever the number of ranks.
class WindowSampler {
 public:
  // text_numel must be more than context.
  WindowSampler(int64_t text_numel, int64_t context, uint64_t seed, BatchShape shape);

  // Makes `step` begin at this position of the sequence, for steps before it that had another shape.
  void set_origin(int64_t step, int64_t position);
  int64_t position(int64_t step) const { return origin_ + (step - origin_step_) * shape_.global(); }

  int64_t windows_per_epoch() const { return windows_; }

  // The positions of the `batch` windows of a micro-batch.
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

// The positions of at most `count` validation windows, spread evenly over the text, in order. They do not depend on the
// number of ranks.
std::vector<int64_t> validation_starts(int64_t text_numel, int64_t context, int64_t count);

struct Batch {
  at::Tensor inputs;   // [B, context], int64
  at::Tensor targets;  // [B, context], int64: the token after each input token
};

// The windows of context + 1 tokens that start at `starts`.
Batch make_batch(std::span<const uint16_t> tokens, const std::vector<int64_t>& starts, int64_t context,
                 at::Device device);

// Mean cross-entropy in nats a token, of logits [B, T, vocabulary].
at::Tensor language_model_loss(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace train_gpt
