#include "core/comm/interruptible_store.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <stdexcept>
#include <thread>

#include "core/runtime/run_clock.h"

namespace tessera::internal {

void InterruptibleStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  constexpr std::chrono::microseconds kLongestPause{50'000};
  const auto began = RunClock::now();
  for (std::chrono::microseconds pause{100}; !check(keys); pause = std::min(2 * pause, kLongestPause)) {
    if (is_interrupted_) throw std::runtime_error("the group is closed");
    if (RunClock::now() - began > timeout) {
      has_timed_out_ = true;
      throw std::runtime_error(c10::str("timed out after ", static_cast<double>(timeout.count()) * 1e-3, " s"));
    }
    std::this_thread::sleep_for(pause);
  }
}

std::vector<uint8_t> InterruptibleStore::get(const std::string& key) {
  wait({key});
  return PrefixStore::get(key);
}

std::vector<std::vector<uint8_t>> InterruptibleStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys);
  return PrefixStore::multiGet(keys);
}

}  // namespace tessera::internal
