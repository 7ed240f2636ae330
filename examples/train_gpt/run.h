#pragma once

#include <tessera/checkpoint.h>
#include <tessera/communicator.h>
#include <tessera/elastic.h>

#include <memory>
#include <vector>

#include "data.h"
#include "options.h"

namespace train_gpt {

// The checked input of a run. prepare() reports the user's mistakes before any rank starts.
struct Job {
  TrainOptions options;
  Corpus corpus;
  std::vector<uint16_t> prompt;  // at least one token
};

// Reads the data. Throws OptionsError and std::runtime_error.
Job prepare(TrainOptions options);

// Makes the folders of all outputs, checks that they can be written, and locks --out against other jobs. Keeps the
// metrics of a run that continues. Throws std::runtime_error.
[[nodiscard]] tessera::FolderLock prepare_output(const TrainOptions& options, bool continues);

// Trains on this rank of the group; rank 0 prints. `elastic` is null, or the run of this group. Collective.
int run_rank(const Job& job, std::shared_ptr<tessera::Communicator> comm, tessera::ElasticRun* elastic = nullptr);

using Planner = void (*)(const TrainOptions& options);

// The body of main(): reads the command line, trains, and prints errors. Returns the exit status. If `plans` is given,
// calls it instead of training.
int program(int argc, char** argv, Planner plans = nullptr);

}  // namespace train_gpt
