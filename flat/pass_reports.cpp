#include "tessera/flat/pass_reports.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "tessera/comm/agreement.h"

namespace tessera {

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
    const std::string subject = "what was gathered and reduced since the last backward";
    if (report.unlike_ranks()) require_agreement(*mesh_.world, subject, log_.lines());
    report.require_alike(subject);  // in what the log has not kept
    own = read(report);
  } else {
    const std::string subject = "what was gathered and reduced since the last backward, in this one or a few before";
    if (must_know) {  // maybe not on all ranks
      report.require_alike(subject);
      own.used = read(report).used;
    } else {
      late_reports_.add(std::move(report));
    }
    late_reports_.require_alike(subject);
  }
  if (options_.is_static) first_ = own;
  return own;
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

}  // namespace tessera
