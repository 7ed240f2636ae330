#pragma once

#include <resolv.h>

#include <algorithm>
#include <utility>

namespace tessera::internal {

// Limits each query of this thread to its name server to one second, instead of five. c10d's TCPStore asks for the name
// of each peer, for its log alone, and a name server that loses the query would delay a group's start or its failure.
// Changes nothing in other threads. Without glibc, whose resolver has a state for each thread, a no-op.
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
