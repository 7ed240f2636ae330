#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/comm/reduced_report.h"
#include "core/gradients/gradient_bucket.h"
#include "core/gradients/order_log.h"
#include "core/layout/mesh.h"
#include "core/layout/unit_plan.h"

namespace tessera::internal {

// What happened in a pass, on this rank or on any.
struct PassUse {
  std::vector<bool> used;  // by parameter: it had a gradient
  std::vector<bool> late;  // by bucket: some came after it had been sent
};

// What the ranks tell each other at the end of a pass, in one small all-reduce, whose bytes do not grow with their
// number: its use, and a fingerprint of all that was exchanged since the last one, which must be the same. With a
// static graph nothing travels after the first pass: each rank sees for itself that its use is that one's.
//
// On a device that stops the host for no more than it must know at once: a rank that left a parameter out waits for the
// others' marks, one that had gradients for all reads them when they have come, in a later pass; and what came late on
// one rank must have done so on all. Used by one thread at a time.
class PassReports {
 public:
  struct Options {
    bool refuse_uneven_use = false;  // see FsdpOptions
    bool is_static = false;          // see ReducerOptions
  };
  // All outlive it; the buckets may become others, see forget_first_pass().
  PassReports(const std::vector<PlannedParameter>& parameters, const std::vector<GradientBucket>& buckets,
              const Mesh& mesh, const OrderLog& log, Options options)
      : parameters_(parameters), buckets_(buckets), mesh_(mesh), log_(log), options_(options) {}

  void forget_first_pass() { first_ = {}; }

  // From this rank's use, that of any. `meanwhile` is called once, while it travels; it says whether the use by others
  // must be known now. Collective. Throws CommError; std::invalid_argument, on all ranks, if they exchanged other
  // things, or used parameters unevenly and that is refused; std::logic_error if a static graph was not.
  PassUse exchange(PassUse own, const std::function<bool()>& meanwhile);

 private:
  std::vector<int64_t> encoded(const PassUse& own) const;
  PassUse read(ReducedReport& report) const;
  void check_even_use(const int64_t* missing_by, const PassUse& use) const;
  void require_same_work(ReducedReport& report) const;
  void require_same_gradients(const std::vector<std::string>& of_ranks) const;
  void require_first_use(const PassUse& own) const;

  const std::vector<PlannedParameter>& parameters_;
  const std::vector<GradientBucket>& buckets_;
  const Mesh& mesh_;
  const OrderLog& log_;
  const Options options_;
  LateReports late_reports_;  // of passes before, on a device
  PassUse first_;             // of the first pass, with a static graph
};

}  // namespace tessera::internal
