#include <tessera/wait_report.h>

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <sstream>

#include "core/comm/agreement.h"

namespace tessera {
using namespace internal;
namespace {

using Clock = std::chrono::steady_clock;

// The record that each rank sends.
struct Own {
  double elapsed_s, wait_s, longest_s;
  char operation[WaitReport::kOperationBytes];
};
static_assert(sizeof(Own) == 24 + WaitReport::kOperationBytes);

double median_without(const std::vector<WaitReport::Rank>& ranks, size_t left_out) {
  std::vector<double> waits;
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (rank != left_out) waits.push_back(ranks[rank].wait_s);
  const auto middle = waits.begin() + static_cast<std::ptrdiff_t>(waits.size() / 2);
  std::nth_element(waits.begin(), middle, waits.end());
  return *middle;
}

bool waits_less(const WaitReport::Rank& a, const WaitReport::Rank& b) { return a.wait_s < b.wait_s; }

}  // namespace

std::optional<int> WaitReport::waited_for(double least_share) const {
  if (ranks.size() < 2) return std::nullopt;
  const auto rank = static_cast<size_t>(std::ranges::min_element(ranks, waits_less) - ranks.begin());
  if (median_without(ranks, rank) - ranks[rank].wait_s < least_share * elapsed_s) return std::nullopt;
  return static_cast<int>(rank);
}

std::string WaitReport::text() const {
  if (ranks.size() < 2) return "no rank is waited for: there is one";
  const auto percent = [&](double wait_s) { return elapsed_s > 0 ? 100 * wait_s / elapsed_s : 0; };
  std::ostringstream text;
  text << std::fixed << std::setprecision(0);
  const auto [fewest, most] = std::minmax_element(ranks.begin(), ranks.end(), waits_less);
  const auto rank = waited_for();
  if (!rank) {
    text << "no rank is waited for: ranks waited " << percent(fewest->wait_s) << "% to " << percent(most->wait_s)
         << "% of " << std::setprecision(1) << elapsed_s << " s";
    return text.str();
  }
  text << "rank " << *rank << " is waited for: it waited " << percent(fewest->wait_s) << "% of " << std::setprecision(1)
       << elapsed_s << std::setprecision(0) << " s, the others "
       << percent(median_without(ranks, static_cast<size_t>(*rank))) << "% (median), most in " << most->operation;
  return text.str();
}

WaitReporter::WaitReporter(Communicator& comm) : comm_(comm), since_(Clock::now()) { comm_.reset_wait_times(); }

WaitReport WaitReporter::report() {
  const auto now = Clock::now();
  Own own{.elapsed_s = std::chrono::duration<double>(now - since_).count()};
  since_ = now;
  for (const auto& [operation, wait_s] : comm_.reset_wait_times()) {
    own.wait_s += wait_s;
    if (wait_s <= own.longest_s) continue;
    own.longest_s = wait_s;
    std::memset(own.operation, 0, sizeof own.operation);
    operation.copy(own.operation, sizeof own.operation - 1);
  }
  WaitReport report;
  for (const std::string& text :
       gather_texts(comm_, std::string(reinterpret_cast<const char*>(&own), sizeof own), "waits")) {
    std::memcpy(&own, text.data(), sizeof own);
    report.ranks.push_back({own.wait_s, own.longest_s, own.operation});
    report.elapsed_s = std::max(report.elapsed_s, own.elapsed_s);
  }
  return report;
}

}  // namespace tessera
