#pragma once

#include <cstdint>
#include <optional>

#include "options.h"
#include "tessera/tessera.h"
#include "trainable.h"

namespace train_gpt {

// The checkpoints of a run: <out>/checkpoints/step-000200, the newest --keep of them. All ranks make
// one and call the same functions; all are collective.
class Checkpoints {
 public:
  // `windows`: how many windows an epoch has, which with the seed decides the order of the data.
  Checkpoints(const TrainOptions& options, int64_t windows, tessera::Communicator& comm, Trainable& model);

  // Loads what --resume asks for and returns how many steps were done: 0 without a checkpoint.
  // Throws OptionsError if the run it is of saw other data or batches, since the loss curve would
  // not go on.
  int64_t resume();

  // Saves, in the background, if it is time for it after this step. An error of the save before
  // shows up here.
  void after_step(int64_t step);

  // Returns when the last save is complete.
  void finish();

 private:
  nlohmann::json run_description() const;

  const TrainOptions& options_;
  int64_t windows_;
  tessera::Communicator& comm_;
  Trainable& model_;
  std::optional<tessera::PendingSave> pending_;
};

}  // namespace train_gpt
