#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>

#include <tessera/communicator.h>
#include <tessera/plan/run_record.h>
#include "run_rank.h"
#include "trainer.h"

namespace train_gpt {

// --plan: what memory a training takes, known before it runs.

// A rank's training as run_rank() makes it, without files: weights are as they are drawn, and no
// checkpoints are saved.
class Rehearsal {
 public:
  // How often it steps: the optimizer's state is made in the first.
  static constexpr int kSteps = 2;

  // The job must outlive it. Collective.
  Rehearsal(const Job& job, std::shared_ptr<tessera::Communicator> comm);

  // A step; the last also validates. Collective.
  void step();

 private:
  const std::shared_ptr<tessera::Communicator> comm_;
  const std::unique_ptr<Trainable> model_;
  Trainer trainer_;
  int64_t steps_ = 0;
};

// What one of --ranks would take: tessera::dry_run() of a Rehearsal. Not collective.
tessera::RunRecord plan_of(const Job& job, int rank);

// The peak of each rank by kind, in MiB: of all of them up to eight, else of the first seven and the last; with a disk
// what is claimed there beside it, which is no memory.
void print_plan(std::ostream& out, const Job& job);

}  // namespace train_gpt
