#include "core/comm/watchdog/heartbeat.h"

#include <c10/util/StringUtil.h>

namespace tessera::internal {
namespace {

std::string beats_key(int rank) { return c10::str("tessera/beats/", rank); }

}  // namespace

std::string Heartbeat::beat(bool is_stalled) {
  const auto now = std::chrono::steady_clock::now();
  const auto since = now - std::exchange(last_beat_, now);
  store_->add(beats_key(rank_), 1);
  if (!is_stalled) {
    beats_of_next_ = -1;
    return "";
  }
  const int next = (rank_ + 1) % size_;
  const int64_t beats = store_->add(beats_key(next), 0);
  missed_ = std::exchange(beats_of_next_, beats) == beats && since < 3 * every_ ? missed_ + 1 : 0;
  if (missed_ < kBeatsMissed) return "";
  const double silent_s = std::chrono::duration<double>(missed_ * every_).count();
  return c10::str("rank ", next, " has given no sign of life for ", silent_s,
                  " s: its process has ended or has stopped, or it has left the group");
}

}  // namespace tessera::internal
