#pragma once

#include <tessera/communicator.h>
#include <tessera/plan/run_record.h>

#include <cstdint>
#include <iosfwd>
#include <memory>

#include "run.h"
#include "trainer.h"

namespace train_gpt {

// --plan: the memory of a training, by a dry run.

// One rank's training as in run_rank(), but without files: no pretrained weights, no checkpoints.
class Rehearsal {
 public:
  // The first step makes the optimizer's state; the second shows the peak with it.
  static constexpr int kSteps = 2;

  // The job must outlive it. Collective.
  Rehearsal(const Job& job, std::shared_ptr<tessera::Communicator> comm);

  // Runs one step; the last also validates. Collective.
  void step();

 private:
  const std::shared_ptr<tessera::Communicator> comm_;
  const std::unique_ptr<Trainable> model_;
  Trainer trainer_;
  int64_t steps_ = 0;
};

// The memory and operations of one of --ranks, by tessera::dry_run(). Not collective.
tessera::RunRecord plan_of(const Job& job, int rank);

// Prints the peak of each rank by kind of memory, in MiB, and the use of the disk with --offload disk. With more than
// eight ranks, prints the first seven and the last.
void print_plan(std::ostream& out, const Job& job);

}  // namespace train_gpt
