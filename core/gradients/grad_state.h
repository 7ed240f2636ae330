#pragma once

namespace tessera::internal {

// The content of a tensor's `.grad`, as its wrapper knows it.
enum class GradState {
  kEmpty,         // none: there was no backward, or zero_grad() cleared it
  kPlaceholder,   // FSDP, in the module's own parameter: the gradient is in the shard
  kAccumulating,  // this rank's own sum, made under no_sync(); a step must not use it
  kFinal,         // the average over ranks
  kLost,          // a failed backward lost it; a step must not run before zero_grad()
  kUsers          // a tensor that the user has put there
};

}  // namespace tessera::internal
