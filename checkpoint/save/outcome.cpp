#include "checkpoint/save/outcome.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <exception>
#include <future>
#include <stdexcept>

#include <tessera/host_results.h>
#include "core/comm/agreement.h"
#include "core/comm/group_process.h"

namespace tessera::internal {
namespace {

int64_t least_over_ranks(Communicator& comm, int64_t own, const std::string& what) {
  c10::InferenceMode quiet;
  const at::Tensor number = at::full({}, own, at::TensorOptions().dtype(at::kLong).device(comm.device()));
  return reduce_to_host(comm, number, ReduceOp::kMin, what).item<int64_t>();
}

}  // namespace

// The text starts with one letter: 'W' for success, or the kind of failure. The result or the error follows.
std::string Outcome::to_text() const { return error.empty() ? "W" + result : std::string(1, kind) + error; }

Outcome Outcome::from_text(const std::string& text) {
  if (text.empty()) return {.error = "no answer"};
  if (text[0] == 'W') return {.result = text.substr(1)};
  return {.kind = static_cast<Kind>(text[0]), .error = text.substr(1)};
}

Outcome attempt(const std::function<std::string()>& part) {
  const auto failure = [](Outcome::Kind kind) -> Outcome {
    return {.kind = kind, .error = text_of(std::current_exception())};
  };
  try {
    return {.result = part()};
  } catch (const CommError&) {
    throw;
  } catch (const std::invalid_argument&) {
    return failure(Outcome::kMisuse);
  } catch (const CheckpointMismatch&) {
    return failure(Outcome::kMismatch);
  } catch (const StorageUnavailable&) {
    return failure(Outcome::kUnavailable);
  } catch (const CheckpointError&) {
    return failure(Outcome::kFailure);
  } catch (...) {
    return failure(Outcome::kOther);
  }
}

void throw_failures(const std::vector<Outcome>& outcomes, const std::string& what) {
  auto failed = [](const Outcome& outcome) { return !outcome.error.empty(); };
  const auto first = std::ranges::find_if(outcomes, failed);
  if (first == outcomes.end()) return;
  std::string message = what + ": rank " + std::to_string(first - outcomes.begin()) + ": " + first->error;
  if (const auto more = std::count_if(first + 1, outcomes.end(), failed); more > 0)
    message += " (and " + std::to_string(more) + (more == 1 ? " more rank)" : " more ranks)");
  if (first->kind == Outcome::kMisuse) throw std::invalid_argument(message);
  if (first->kind == Outcome::kMismatch) throw CheckpointMismatch(message);
  if (first->kind == Outcome::kUnavailable) throw StorageUnavailable(message);
  if (first->kind == Outcome::kOther) throw OtherFailure(message);
  throw CheckpointError(message);
}

std::vector<std::string> gather_results(Communicator& comm, const Outcome& own, const std::string& what) {
  std::vector<Outcome> outcomes;
  for (const auto& text : gather_texts(comm, own.to_text(), what)) outcomes.push_back(Outcome::from_text(text));
  throw_failures(outcomes, what);
  std::vector<std::string> results;
  for (auto& outcome : outcomes) results.push_back(std::move(outcome.result));
  return results;
}

void require_success(Communicator& comm, const Outcome& own, const std::string& what) {
  if (least_over_ranks(comm, own.error.empty() ? 1 : 0, what) == 0) gather_results(comm, own, what);
}

void on_all_ranks(Communicator& comm, const std::string& what, const std::function<void()>& part) {
  require_success(comm, attempt([&] { return part(), std::string(); }), what);
}

void on_all_ranks_slowly(Communicator& comm, const std::string& what, Heartbeat& heartbeat,
                         const std::function<void()>& part) {
  const auto patience = Heartbeat::kMostTimeouts * comm.timeout();
  heartbeat.beat();
  const auto run = [&]() -> Outcome {
    const at::NoGradGuard no_grad;
    try {
      return attempt([&] { return part(), std::string(); });
    } catch (const CommError& error) {  // attempt() does not catch CommError
      return {.error = error.what()};
    }
  };
  std::future<Outcome> end;
  // Starting a thread may throw.
  Outcome own = attempt([&] { return end = std::async(std::launch::async, run), std::string(); });
  auto pause = std::chrono::milliseconds(1);
  for (bool all_ended = false; !all_ended;
       pause = std::min({2 * pause, std::chrono::milliseconds(1000), comm.timeout() / 4})) {
    const bool own_ended = !end.valid() || end.wait_for(pause) == std::future_status::ready;
    const bool is_stuck = !own_ended && heartbeat.is_older_than(patience);
    enum State : int64_t { kStuck, kGetsOn, kEnded };
    const int64_t least = least_over_ranks(comm, own_ended ? kEnded : is_stuck ? kStuck : kGetsOn, what);
    all_ended = least == kEnded;
    if (least != kStuck) continue;
    const auto seconds = std::to_string(std::chrono::duration<double>(patience).count());
    gather_results(comm, {.error = is_stuck ? "gets no further: one step takes longer than " + seconds + " s" : ""},
                   what);
  }
  if (end.valid()) own = end.get();
  require_success(comm, own, what);
}

}  // namespace tessera::internal
