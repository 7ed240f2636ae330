#pragma once

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>

#include <tessera/communicator.h>

namespace tessera::internal {

// Detects that a second thread calls an object while another thread is in a call. Ranks number their operations in the
// order of start. If two threads start operations, that order may differ between ranks, and similar operations would
// exchange wrong data.
class SingleThreadChecker {
 public:
  // Marks this thread as in a call while this object exists. Calls may nest. `what` names the call; must be a literal.
  class Call {
   public:
    explicit Call(SingleThreadChecker& caller, const char* what = "a call") : caller_(caller) {
      std::thread::id inside;
      is_outermost_ = caller.inside_.compare_exchange_strong(inside, std::this_thread::get_id());
      is_alone_ = is_outermost_ || inside == std::this_thread::get_id();
      if (is_outermost_) caller.what_ = what;
    }
    ~Call() {
      if (is_outermost_) caller_.inside_ = std::thread::id();
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    // Whether no other thread was in a call when this call began.
    bool is_alone() const { return is_alone_; }
    // Whether no call, of this thread or another one, was in progress when this call began.
    bool is_outermost() const { return is_outermost_; }

   private:
    SingleThreadChecker& caller_;
    bool is_outermost_, is_alone_;
  };

  // Like Call. If another thread is in a call, throws std::logic_error, whose text begins with the result of `who`.
  class OnlyCall : public Call {
   public:
    template <class Who>
    OnlyCall(SingleThreadChecker& caller, const char* what, const Who& who) : Call(caller, what) {
      if (!is_alone())
        throw std::logic_error(who() + ": a second thread calls " + what + " while another thread is in " +
                               caller.what_.load() + "; expected one thread at a time: guard the calls by a mutex");
    }
  };

 private:
  std::atomic<std::thread::id> inside_;
  std::atomic<const char*> what_ = "a call";  // the outermost call
};

// Must be called if Call::is_alone() is false. Aborts the group and throws CommError, whose text begins with `what`.
[[noreturn]] void refuse_second_thread(Communicator& comm, const std::string& what);

}  // namespace tessera::internal
