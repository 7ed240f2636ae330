#pragma once

#include <tessera/checkpoint.h>
#include <tessera/communicator.h>
#include <tessera/elastic.h>

#include <memory>
#include <vector>

#include "data.h"
#include "options.h"

namespace train_gpt {

// The checked input of a run. prepare() makes it, so that mistakes of the user are reported before ranks start.
struct Job {
  TrainOptions options;
  Corpus corpus;
  std::vector<uint16_t> prompt;  // at least one token
};

// Reads the data and checks it against the options. Throws OptionsError and std::runtime_error.
Job prepare(TrainOptions options);

// Makes the folders of all outputs, checks that they can be written, and locks --out against other jobs. Unless
// `continues`, renames the metrics and checkpoints of an earlier run. Throws std::runtime_error.
[[nodiscard]] tessera::FolderLock prepare_output(const TrainOptions& options, bool continues);

// Trains on this rank; rank 0 prints. `elastic` is `comm`'s elastic run, or null. Returns the exit code. Collective.
int run_rank(const Job& job, std::shared_ptr<tessera::Communicator> comm, tessera::ElasticRun* elastic = nullptr);

using Planner = void (*)(const TrainOptions& options);

// The body of main(): parses the command line, trains, and prints errors. Returns the exit code. If `plans` is not
// null, calls `plans` instead of training.
int program(int argc, char** argv, Planner plans = nullptr);

}  // namespace train_gpt
