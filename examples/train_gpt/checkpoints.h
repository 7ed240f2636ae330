#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <tessera/tessera.h>
#include "corpus.h"
#include "options.h"
#include "trainable.h"

namespace train_gpt {

// The checkpoints of a run: <out>/checkpoints/step-000200, the newest --keep of them. All ranks make
// one and call the same functions; all are collective.
class Checkpoints {
 public:
  // `windows`: how many windows an epoch has, which with the seed decides the order of the data. Everything must
  // outlive this.
  Checkpoints(const TrainOptions& options, const Corpus& corpus, int64_t windows, tessera::Communicator& comm,
              Trainable& model);

  // What a run goes on with.
  struct Resumed {
    int64_t step = 0;  // how many steps were done: 0 without a checkpoint
    int64_t warmup = 0;
    std::vector<std::string> notes;  // for the user: what is other than it was
  };
  // Loads what --resume asks for; `auto` is the newest that is sound. Throws OptionsError if the run it is of saw other
  // data or batches, since the loss curve would not go on, and for settings that differ without --allow-changes.
  Resumed resume();

  // Before the parameters change: what is being saved must be copied by then.
  void before_update();

  // Saves, in the background, if it is time for it after this step. An error of the save before
  // shows up here.
  void after_step(int64_t step);

  // Returns when the last save is complete.
  void finish();

 private:
  nlohmann::json description() const;
  Resumed compare(const std::string& path, const nlohmann::json& extra) const;

  const TrainOptions& options_;
  const int64_t windows_;
  const std::string data_;  // a checksum of the tokens
  int64_t warmup_;
  tessera::Communicator& comm_;
  Trainable& model_;
  std::optional<tessera::PendingSave> pending_;
};

}  // namespace train_gpt
