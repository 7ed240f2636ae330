#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "corpus.h"
#include "options.h"
#include "trainable.h"

namespace train_gpt {

// What the run is about, before it starts.
struct RunFacts {
  std::string layout;  // Trainable::describe()
  int ranks = 1;
  int threads = 1;
  int64_t parameters_numel = 0;
  int64_t adapters_numel = 0;  // what alone is trained; 0: the model is
  int64_t tokens_per_step = 0;
  double unigram_loss = 0.0;
};
void print_header(std::ostream& out, const TrainOptions& options, const Corpus& corpus, const RunFacts& facts);

// What each rank held, against one process that holds everything.
void print_memory_table(std::ostream& out, const std::vector<MemoryUse>& ranks, int64_t unsharded_parameter_bytes);

struct RunResult {
  double train_loss = 0.0;  // the mean over the last steps
  double val_loss = 0.0;
  double unigram_loss = 0.0;
  double train_s = 0.0;
};
void print_result(std::ostream& out, const RunResult& result);

void print_sample(std::ostream& out, const std::string& text);

}  // namespace train_gpt
