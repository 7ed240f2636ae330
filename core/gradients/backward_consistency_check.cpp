#include "core/gradients/backward_consistency_check.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <utility>

#include <tessera/host_results.h>
#include "core/comm/agreement.h"
#include "core/runtime/graph_recorder.h"

namespace tessera::internal {
namespace {

constexpr const char* kSubject = "what was gathered and reduced since the last backward";

}  // namespace

PassUse BackwardConsistencyCheck::exchange(PassUse own, const std::function<bool()>& meanwhile) {
  if (!first_.used.empty()) {
    require_first_use(own);
    meanwhile();
    return first_;
  }
  const auto is_any_used = [&] { return std::ranges::count(own.used, true) > 0; };  // false: only autograd::grad() ran
  if (CapturedWork* const work = CapturedWork::recording_on(mesh_.world->device())) {
    if (meanwhile() && is_any_used()) refuse_unused(own);
    if (!is_any_used()) work->add_collective("the end of a backward without gradients of parameters");
    return own;
  }
  ReducedReport report(*mesh_.world, log_.fingerprint(), encoded(own), "the end of backward");
  const bool must_know = meanwhile() || options_.refuse_uneven_use;
  report.finish();
  if (mesh_.world->device().is_cpu()) {
    if (report.unlike_ranks()) require_same_work(report);
    own = read(report);
  } else {
    const std::string subject = std::string(kSubject) + ", in this one or a few before";
    if (must_know) {  // ranks may take different branches: reading a report is not collective
      report.require_alike(subject);
      own.used = read(report).used;
    } else {
      late_reports_.add(std::move(report), [subject](ReducedReport& earlier) { earlier.require_alike(subject); });
    }
    late_reports_.look();
  }
  if (options_.is_static && is_any_used()) first_ = own;
  return own;
}

// Throws if a parameter in a bucket has no gradient: a replay cannot tell the other ranks which parameters it used.
void BackwardConsistencyCheck::refuse_unused(const PassUse& own) const {
  for (const GradientBucket& bucket : buckets_)
    for (const size_t i : bucket.members)
      if (!own.used[i])
        throw std::invalid_argument(c10::str("CapturedStep on rank ", mesh_.world->rank(), ": parameter '",
                                             parameters_[i].fqn, "' of ", bucket.name,
                                             " has no gradient on this rank: every parameter of a bucket must have "
                                             "one, so use it, or freeze whole units"));
}

// Must be called if fingerprints differ. Throws std::invalid_argument unless ranks differ only in failed or repeated
// forwards, or in empty gradients (CollectiveLog::Uncompared). Collective.
void BackwardConsistencyCheck::require_same_work(ReducedReport& report) const {
  const CollectiveLog::Uncompared& own = log_.uncompared();
  const std::string text = c10::str(log_.certain(), ' ', own.forwards, ' ', own.failed_forwards, ' ', own.kept);
  bool is_alike = true;
  uint64_t first = 0;
  int64_t most = 0, least = std::numeric_limits<int64_t>::max();  // over ranks: most completed, fewest begun forwards
  std::vector<std::string> kept;
  for (const std::string& of_rank : gather_texts(*mesh_.world, text, kSubject)) {
    std::istringstream words(of_rank);
    uint64_t certain = 0;
    int64_t forwards = 0, failed = 0;
    words >> certain >> forwards >> failed >> kept.emplace_back();
    if (kept.size() == 1) first = certain;
    is_alike = is_alike && certain == first && kept.back().size() == kept[0].size();
    most = std::max(most, forwards), least = std::min(least, forwards + failed);
  }
  if (!is_alike || most > least) {
    require_agreement(*mesh_.world, kSubject, log_.lines());
    report.require_alike(kSubject);  // reached if the logs have dropped the entries that differ
  }
  require_same_gradients(kept);
}

// Throws if a parameter kept a gradient on one rank but not on another. kUnknown matches kKept and kNotKept.
void BackwardConsistencyCheck::require_same_gradients(const std::vector<std::string>& of_ranks) const {
  for (size_t i = 0; i < of_ranks[0].size(); ++i) {
    const auto rank_with = [&](char kept) {
      return std::ranges::find_if(of_ranks, [&](const std::string& text) { return text[i] == kept; }) -
             of_ranks.begin();
    };
    const auto with = rank_with(CollectiveLog::kKept), without = rank_with(CollectiveLog::kNotKept);
    if (std::max(with, without) == std::ssize(of_ranks)) continue;
    throw std::invalid_argument(c10::str("the ranks disagree about ", kSubject, ": parameter '",
                                         parameters_[i % parameters_.size()].fqn, "' has a gradient to add to on rank ",
                                         with, ", but none on rank ", without,
                                         " (zero_grad() on one rank alone, say)"));
  }
}

// Returns this rank's numbers for an all-reduce of maxima. By parameter: 1 if used. By bucket: 1 if recomputed. With
// refuse_uneven_use, again by parameter: 0 if used, else size - rank: the maximum gives the lowest rank without use.
std::vector<int64_t> BackwardConsistencyCheck::encoded(const PassUse& own) const {
  std::vector<int64_t> numbers(own.used.begin(), own.used.end());
  numbers.insert(numbers.end(), own.recomputed.begin(), own.recomputed.end());
  if (options_.refuse_uneven_use)
    for (const bool used : own.used) numbers.push_back(used ? 0 : mesh_.world->size() - mesh_.world->rank());
  return numbers;
}

PassUse BackwardConsistencyCheck::read(ReducedReport& report) const {
  const int64_t* used = report.largest();
  const int64_t* recomputed = used + parameters_.size();
  const int64_t* missing_by = recomputed + buckets_.size();
  PassUse use{std::vector<bool>(used, recomputed), std::vector<bool>(recomputed, missing_by)};
  for (const GradientBucket& bucket : buckets_)
    for (const size_t i : bucket.members)
      if (options_.refuse_uneven_use && use.used[i] && missing_by[i] > 0)
        throw std::invalid_argument(c10::str("parameter '", parameters_[i].fqn, "' of ", bucket.name,
                                             " had no gradient on rank ", mesh_.world->size() - missing_by[i],
                                             ", but had one on others (refuse_uneven_use)"));
  return use;
}

// With a static graph, throws if this pass used a parameter or recomputed a bucket that the first pass did not.
void BackwardConsistencyCheck::require_first_use(const PassUse& own) const {
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket)
    if (own.recomputed[bucket] && !first_.recomputed[bucket])
      throw std::logic_error(buckets_[bucket].name + " on rank " + std::to_string(mesh_.world->rank()) +
                             " came in several parts, but in one on every rank in the first backward, and a static "
                             "graph promises that every iteration is the same");
  for (size_t i = 0; i < own.used.size(); ++i)
    if (own.used[i] && !first_.used[i])
      throw std::logic_error("parameter '" + parameters_[i].fqn + "' on rank " + std::to_string(mesh_.world->rank()) +
                             " has a gradient, but had none on any rank in the first backward, and a static graph "
                             "promises that every iteration is the same");
}

}  // namespace tessera::internal
