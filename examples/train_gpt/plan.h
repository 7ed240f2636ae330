#pragma once

#include <tessera/communicator.h>
#include <tessera/plan/run_record.h>

#include <cstdint>
#include <iosfwd>
#include <memory>

#include "run.h"
#include "trainer.h"

namespace train_gpt {

// Implements --plan, which predicts the memory of a training by a dry run.

// One rank's training as in run_rank(), but without files: no pretrained weights and no checkpoints.
class Rehearsal {
 public:
  // The first step allocates the optimizer's state, so only the second step shows the peak.
  static constexpr int kSteps = 2;

  // `job` must outlive this object. Collective.
  Rehearsal(const Job& job, std::shared_ptr<tessera::Communicator> comm);

  // Runs one step; the last also validates. Collective.
  void step();

 private:
  const std::shared_ptr<tessera::Communicator> comm_;
  const std::unique_ptr<Trainable> model_;
  Trainer trainer_;
  int64_t steps_ = 0;
};

// Returns the record of a tessera::dry_run() as `rank` of --ranks ranks. Is not collective.
tessera::RunRecord plan_of(const Job& job, int rank);

// Prints the peak memory of each rank by kind, in MiB, and with --offload disk also the disk space. If there are more
// than eight ranks, prints the first seven and the last.
void print_plan(std::ostream& out, const Job& job);

}  // namespace train_gpt
