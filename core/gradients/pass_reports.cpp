#include "core/gradients/pass_reports.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/comm/agreement.h"

namespace tessera::internal {
namespace {

constexpr const char* kSubject = "what was gathered and reduced since the last backward";

}  // namespace

PassUse PassReports::exchange(PassUse own, const std::function<bool()>& meanwhile) {
  if (!first_.used.empty()) {
    require_first_use(own);
    meanwhile();
    return first_;
  }
  ReducedReport report(*mesh_.world, log_.fingerprint(), encoded(own), "the end of backward");
  const bool must_know = meanwhile() || options_.refuse_uneven_use;
  report.finish();
  if (mesh_.world->device().is_cpu()) {
    if (report.unlike_ranks()) require_same_work(report);
    own = read(report);
  } else {
    const std::string subject = std::string(kSubject) + ", in this one or a few before";
    if (must_know) {  // maybe not on all ranks
      report.require_alike(subject);
      own.used = read(report).used;
    } else {
      late_reports_.add(std::move(report), [subject](ReducedReport& late) { late.require_alike(subject); });
    }
    late_reports_.look();
  }
  const bool is_any_used = std::ranges::find(own.used, true) != own.used.end();  // not by torch::autograd::grad()
  if (options_.is_static && is_any_used) first_ = own;
  return own;
}

// After fingerprints that differ: returns where that is by what is in doubt alone. Collective.
void PassReports::require_same_work(ReducedReport& report) const {
  const OrderLog::Doubtful& own = log_.doubtful();
  std::ostringstream text;
  text << log_.certain() << ' ' << own.forwards << ' ' << own.failed_forwards << ' ' << own.kept;
  bool is_alike = true;
  uint64_t first = 0;
  int64_t most = 0, least = std::numeric_limits<int64_t>::max();  // forwards, of which some failed
  std::vector<std::string> kept;
  for (const std::string& of_rank : gather_texts(*mesh_.world, text.str(), kSubject)) {
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
    report.require_alike(kSubject);  // in what the log has not kept
  }
  require_same_gradients(kept);
}

// What each rank kept, as the log has it, of one pass after the other.
void PassReports::require_same_gradients(const std::vector<std::string>& of_ranks) const {
  for (size_t i = 0; i < of_ranks[0].size(); ++i) {
    const auto rank_with = [&](char kept) {
      return std::ranges::find_if(of_ranks, [&](const std::string& text) { return text[i] == kept; }) -
             of_ranks.begin();
    };
    const auto with = rank_with(OrderLog::kKept), without = rank_with(OrderLog::kNotKept);
    if (std::max(with, without) == std::ssize(of_ranks)) continue;
    throw std::invalid_argument(c10::str("the ranks disagree about ", kSubject, ": parameter '",
                                         parameters_[i % parameters_.size()].fqn, "' has a gradient to add to on rank ",
                                         with, ", but none on rank ", without,
                                         " (zero_grad() on one rank alone, say)"));
  }
}

// Of each number the ranks learn the largest: whether a parameter was used, whether a bucket had late gradients, and,
// where it may not be, who has not used a parameter: 0, or more the lower the rank.
std::vector<int64_t> PassReports::encoded(const PassUse& own) const {
  std::vector<int64_t> numbers(own.used.begin(), own.used.end());
  numbers.insert(numbers.end(), own.late.begin(), own.late.end());
  if (options_.refuse_uneven_use)
    for (const bool used : own.used) numbers.push_back(used ? 0 : mesh_.world->size() - mesh_.world->rank());
  return numbers;
}

PassUse PassReports::read(ReducedReport& report) const {
  const int64_t* used = report.largest();
  const int64_t* late = used + parameters_.size();
  const int64_t* missing_by = late + buckets_.size();
  PassUse use{std::vector<bool>(used, late), std::vector<bool>(late, missing_by)};
  if (options_.refuse_uneven_use) check_even_use(missing_by, use);
  return use;
}

void PassReports::check_even_use(const int64_t* missing_by, const PassUse& use) const {
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket)
    for (const size_t i : buckets_[bucket].members)
      if (use.used[i] && missing_by[i] > 0)
        throw std::invalid_argument("parameter '" + parameters_[i].fqn + "' of " + buckets_[bucket].name +
                                    " had no gradient on rank " + std::to_string(mesh_.world->size() - missing_by[i]) +
                                    ", but had one on others (refuse_uneven_use)");
}

// With a static graph each rank looks for itself.
void PassReports::require_first_use(const PassUse& own) const {
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket)
    if (own.late[bucket] && !first_.late[bucket])
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
