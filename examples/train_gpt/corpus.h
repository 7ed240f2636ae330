#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "vocabulary.h"

namespace train_gpt {

// The training data, as tokens in memory.
struct Corpus {
  std::string description;  // a line for the reader: what was read, and what was left out
  Vocabulary vocabulary;
  std::vector<uint16_t> tokens;

  // The last tenth validates.
  std::span<const uint16_t> train() const;
  std::span<const uint16_t> validation() const;
};

// Reads
//  - a text file: its bytes are the tokens;
//  - a directory: the text files below it, in the order of their paths, with a line between; files
//    with a zero byte in them are not text, and hidden files are not looked at;
//  - a .json file (also within a directory): SQuAD's contexts, each once, a line each;
//  - a .bin file: 16-bit token ids, bare or with llm.c's header of 256 32-bit integers.
// Throws std::runtime_error that names the file and what is wrong with it.
Corpus read_corpus(const std::filesystem::path& path);

// Throws std::runtime_error if a part of the corpus has no window of context + 1 tokens.
void check_length(const Corpus& corpus, int64_t context);

// The loss, in nats a token, of always predicting how often each token occurs in `train` (each
// counted once more, so that none is impossible), on `targets`.
double unigram_loss(std::span<const uint16_t> train, std::span<const uint16_t> targets, int64_t vocabulary);

}  // namespace train_gpt
