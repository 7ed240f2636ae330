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

// Checks at the end of each backward pass that all ranks did the same work. One small all-reduce combines the used
// parameters of all ranks. It also compares fingerprints of the collectives since the last check. The size of the
// message does not depend on the number of ranks. With a static graph (Options::is_static), only the first pass after a
// change of the buckets runs the all-reduce. Each rank then compares its later passes with this pass.
// On a device, a rank that lacks a gradient blocks until the result arrives. A rank with all gradients reads the result
// in a later pass. On a device, no rank reads the other ranks' recomputed buckets, so all ranks must recompute the same
// buckets. While work is recorded for replays (CapturedWork), the check runs no collective, and every parameter must
// have a gradient. Used by one thread at a time.
class BackwardConsistencyCheck {
 public:
  struct Options {
    bool refuse_uneven_use = false;  // see FsdpOptions::refuse_uneven_use
    bool is_static = false;          // see ReducerOptions::is_static
  };
  // All references must outlive the check. Callers must call forget_first_pass() after they change the buckets.
  BackwardConsistencyCheck(const std::vector<PlannedParameter>& parameters, const std::vector<GradientBucket>& buckets,
                           const Mesh& mesh, const CollectiveLog& log, Options options)
      : parameters_(parameters), buckets_(buckets), mesh_(mesh), log_(log), options_(options) {}

  void forget_first_pass() { first_ = {}; }

  // Returns the parameters that any rank used, and the buckets that any rank recomputed. While the all-reduce is in
  // flight, calls `meanwhile`, which returns whether this rank must know the result. If not, and
  // refuse_uneven_use is off, on a device returns only this rank's use. Collective. Throws CommError. All ranks throw
  // std::invalid_argument if their collectives differ (on a device, maybe in a later pass), or, under
  // refuse_uneven_use, their used parameters. Throws std::logic_error if a static graph changed.
  PassUse exchange(PassUse own, const std::function<bool()>& meanwhile);

 private:
  std::vector<int64_t> encoded(const PassUse& own) const;
  PassUse read(ReducedReport& report) const;
  void refuse_unused(const PassUse& own) const;
  void require_same_work(ReducedReport& report) const;
  void require_same_gradients(const std::vector<std::string>& of_ranks) const;
  void require_first_use(const PassUse& own) const;

  const std::vector<PlannedParameter>& parameters_;
  const std::vector<GradientBucket>& buckets_;
  const Mesh& mesh_;
  const CollectiveLog& log_;
  const Options options_;
  LateReports late_reports_;  // on a device: unread reports of earlier passes
  PassUse first_;             // with a static graph: the use in the first pass; else empty
};

}  // namespace tessera::internal
