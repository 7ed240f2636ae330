#pragma once

#include <pthread.h>
#include <signal.h>

#include <cerrno>
#include <ctime>

namespace tessera::internal {

// Blocks SIGPIPE for this thread, and for the threads that it creates meanwhile, which inherit the mask. gloo and libuv
// write to sockets without MSG_NOSIGNAL. With SIGPIPE blocked, a failed write returns EPIPE instead of ending the
// process. The destructor discards a SIGPIPE that arrived meanwhile. Changes nothing in other threads.
class SigpipeBlock {
 public:
  SigpipeBlock() {
    ::sigemptyset(&sigpipe_);
    ::sigaddset(&sigpipe_, SIGPIPE);
    sigset_t pending;
    ::sigpending(&pending);
    was_pending_ = ::sigismember(&pending, SIGPIPE) == 1;
    ::pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  ~SigpipeBlock() {
    const timespec no_time{};
    while (!was_pending_ && ::sigtimedwait(&sigpipe_, nullptr, &no_time) < 0 && errno == EINTR) {
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SigpipeBlock(const SigpipeBlock&) = delete;
  SigpipeBlock& operator=(const SigpipeBlock&) = delete;

 private:
  sigset_t sigpipe_, before_;
  bool was_pending_;
};

}  // namespace tessera::internal
