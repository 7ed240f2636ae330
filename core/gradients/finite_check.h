#pragma once

#include <vector>

#include <tessera/communicator.h>
#include "core/gradients/gradient_bucket.h"

namespace tessera::internal {

// Throws std::runtime_error on all ranks if a reduced gradient of a bucket is infinite or NaN on any rank. The error
// names buckets and ranks. `reduced` has a flag for each bucket: whether to check the bucket. Collective. The host
// waits for the device once, and once more before it throws.
void require_finite(const std::vector<GradientBucket>& buckets, const std::vector<bool>& reduced, Communicator& comm);

}  // namespace tessera::internal
