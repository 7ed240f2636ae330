#pragma once

#include <vector>

#include <tessera/communicator.h>
#include "core/gradients/gradient_bucket.h"

namespace tessera::internal {

// Throws std::runtime_error on all ranks if a reduced gradient of a bucket is infinite or NaN on any rank. The error
// names buckets and ranks. `reduced` says by bucket whether to check it. Collective. The host blocks for the device
// once, and a second time before it throws.
void require_finite(const std::vector<GradientBucket>& buckets, const std::vector<bool>& reduced, Communicator& comm);

}  // namespace tessera::internal
