#pragma once

#include <resolv.h>

#include <algorithm>
#include <utility>

namespace tessera::internal {

// Limits each query of this thread to its name server to one second, instead of five. c10d's TCPStore looks up the name
// of each peer, only to log it. If the name server loses the query, the start or failure of a group would be late. Does
// not affect other threads. Without glibc, whose resolver has a state for each thread, a no-op.
class ShortNameLookups {
 public:
#ifdef __GLIBC__
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
#else
  ShortNameLookups() {}
#endif
  ShortNameLookups(const ShortNameLookups&) = delete;
  ShortNameLookups& operator=(const ShortNameLookups&) = delete;

#ifdef __GLIBC__
 private:
  static constexpr int kLeastTries = 4;
  const bool is_ready_;
  int retrans_ = 0, retry_ = 0;
#endif
};

}  // namespace tessera::internal
