#include "core/launch/clock_exchange.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <limits>
#include <sstream>

namespace tessera::internal {
namespace {

constexpr int kQuestions = 8;
constexpr char kRun[] = "trace/run";

std::string question_key(int asker, int number) { return c10::str("trace/question/", asker, "/", number); }
std::string answer_key(int asker, int number) { return c10::str("trace/answer/", asker, "/", number); }
std::string offset_key(const std::string& clock) { return "trace/offset/" + clock; }

// Returns the first traced rank of each host. The first rank of the result is the reference.
std::vector<int> first_of_each_clock(const std::vector<std::string>& clocks) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < clocks.size(); ++rank) {
    const auto is_same = [&](int other) { return clocks[static_cast<size_t>(other)] == clocks[rank]; };
    if (!clocks[rank].empty() && std::ranges::none_of(ranks, is_same)) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

void answer(c10d::Store& store, int asker, const std::function<int64_t()>& now_ns) {
  for (int i = 0; i < kQuestions; ++i) {
    store.get(question_key(asker, i));  // blocks until the question is asked
    store.set(answer_key(asker, i), std::to_string(now_ns()));
  }
}

void ask(c10d::Store& store, int rank, const std::function<int64_t()>& now_ns, Trace::Run& run) {
  run.error_ns = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < kQuestions; ++i) {
    const int64_t asked = now_ns();
    store.set(question_key(rank, i), "?");
    const auto text = store.get_to_str(answer_key(rank, i));
    const int64_t took = now_ns() - asked;
    const int64_t error = (took + 1) / 2;
    // The first answer may be slow, because the reference answers the questions of one host after another.
    if (error >= run.error_ns) continue;
    run.error_ns = error;
    run.offset_ns = std::stoll(text) - (asked + took / 2);
  }
}

}  // namespace

int64_t steady_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Trace::Clock::now().time_since_epoch()).count();
}

Trace::Run agree_on_traced_run(c10d::Store& store, int rank, const std::vector<std::string>& clocks,
                               const std::function<int64_t()>& now_ns) {
  const auto ranks = first_of_each_clock(clocks);
  Trace::Run run;
  if (rank == ranks[0]) {
    run.id = Trace::new_run_id();
    store.set(kRun, run.id);
    for (const int asker : ranks)
      if (asker != rank) answer(store, asker, now_ns);
    return run;
  }
  run.id = store.get_to_str(kRun);
  const std::string& clock = clocks[static_cast<size_t>(rank)];
  if (clock == clocks[static_cast<size_t>(ranks[0])]) return run;
  // The ranks of a host share a clock, so they must use one offset.
  if (std::ranges::find(ranks, rank) != ranks.end()) {
    ask(store, rank, now_ns, run);
    store.set(offset_key(clock), c10::str(run.offset_ns, " ", run.error_ns));
  } else {
    std::istringstream(store.get_to_str(offset_key(clock))) >> run.offset_ns >> run.error_ns;
  }
  return run;
}

}  // namespace tessera::internal
