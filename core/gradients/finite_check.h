#pragma once

#include <vector>

#include <tessera/communicator.h>
#include "core/gradients/gradient_bucket.h"

namespace tessera::internal {

// Throws std::runtime_error, on all ranks, if some rank's part of the gradients of one of the buckets is infinite or
// NaN, with buckets and ranks. `reduced`: by bucket, whether to look. Collective; waits for the device once, and
// once more where it throws. One flag a rank travels, and a launch looks at all gradients of a dtype.
void require_finite(const std::vector<GradientBucket>& buckets, const std::vector<bool>& reduced, Communicator& comm);

}  // namespace tessera::internal
