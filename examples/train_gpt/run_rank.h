#pragma once

#include <memory>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/folder_lock.h>
#include "corpus.h"
#include "options.h"

namespace train_gpt {

// What a run needs, read and checked: mistakes of the user show up here, before any rank starts.
struct Job {
  TrainOptions options;
  Corpus corpus;
  std::vector<uint16_t> prompt;  // at least one token
};

// Reads the data. Throws OptionsError and std::runtime_error.
Job prepare(TrainOptions options);

// Makes the folder --out and checks that files can be written there, and that no other job does while the lock is held.
// Throws std::runtime_error.
[[nodiscard]] tessera::FolderLock prepare_output(const TrainOptions& options);

// Trains on this rank of the group, and on rank 0 shows it. Collective.
void run_rank(const Job& job, std::shared_ptr<tessera::Communicator> comm);

}  // namespace train_gpt
