#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/comm/reduced_report.h"
#include "core/gradients/collective_log.h"
#include "core/gradients/gradient_bucket.h"
#include "core/layout/mesh.h"
#include "core/layout/unit_plan.h"

namespace tessera::internal {

// The ranks' consistency check at the end of a pass. One small all-reduce, whose size does not depend on the number of
// ranks, exchanges the used parameters and a fingerprint of all collectives since the last check. Fingerprints must be
// equal. With a static graph only the first pass is exchanged: each rank compares its later passes with that one.
//
// On a device the host blocks only for results that it needs now. A rank that lacks a gradient waits for the result. A
// rank with all gradients reads the result in a later pass. All ranks must then have recomputed gradients for the same
// buckets. While work is recorded for replays (CapturedWork) nothing is exchanged, and every parameter must have a
// gradient. Used by one thread at a time.
class BackwardConsistencyCheck {
 public:
  struct Options {
    bool refuse_uneven_use = false;  // see FsdpOptions
    bool is_static = false;          // see ReducerOptions
  };
  // All references must outlive the check. After the buckets change, forget_first_pass() must be called.
  BackwardConsistencyCheck(const std::vector<PlannedParameter>& parameters, const std::vector<GradientBucket>& buckets,
                           const Mesh& mesh, const CollectiveLog& log, Options options)
      : parameters_(parameters), buckets_(buckets), mesh_(mesh), log_(log), options_(options) {}

  void forget_first_pass() { first_ = {}; }

  // Returns the use by any rank. Calls `meanwhile` once, during the exchange; it returns whether this rank must know
  // the other ranks' use now. Collective. Throws CommError. Throws std::invalid_argument on all ranks if their
  // collectives differ, or if refuse_uneven_use is set and their use differs. Throws std::logic_error if a static graph
  // has changed.
  PassUse exchange(PassUse own, const std::function<bool()>& meanwhile);

 private:
  std::vector<int64_t> encoded(const PassUse& own) const;
  PassUse read(ReducedReport& report) const;
  void check_even_use(const int64_t* missing_by, const PassUse& use) const;
  void refuse_unused(const PassUse& own) const;
  void require_same_work(ReducedReport& report) const;
  void require_same_gradients(const std::vector<std::string>& of_ranks) const;
  void require_first_use(const PassUse& own) const;

  const std::vector<PlannedParameter>& parameters_;
  const std::vector<GradientBucket>& buckets_;
  const Mesh& mesh_;
  const CollectiveLog& log_;
  const Options options_;
  LateReports late_reports_;  // of earlier passes, on a device
  PassUse first_;             // of the first pass, with a static graph
};

}  // namespace tessera::internal
