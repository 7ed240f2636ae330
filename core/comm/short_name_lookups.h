#pragma once

#include <resolv.h>

#include <algorithm>
#include <utility>

namespace tessera::internal {

// While an object exists, a DNS query of its thread times out after one second instead of five, with at least four
// tries. c10d's TCPStore looks up each peer's name for its log, so lost queries would delay the start or the failure of
// a group. glibc keeps a resolver state for each thread, so other threads are not affected.
class ShortNameLookups {
 public:
  ShortNameLookups() : is_ready_((_res.options & RES_INIT) != 0 || ::res_init() == 0) {
    if (!is_ready_) return;
    retrans_ = std::exchange(_res.retrans, 1);
    retry_ = std::exchange(_res.retry, std::max(_res.retry, kLeastTries));
  }
  ~ShortNameLookups() {
    if (!is_ready_) return;
    _res.retrans = retrans_;
    _res.retry = retry_;
  }
  ShortNameLookups(const ShortNameLookups&) = delete;
  ShortNameLookups& operator=(const ShortNameLookups&) = delete;

 private:
  static constexpr int kLeastTries = 4;
  const bool is_ready_;
  int retrans_ = 0, retry_ = 0;
};

}  // namespace tessera::internal
