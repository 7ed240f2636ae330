#pragma once

#include <atomic>
#include <thread>

namespace tessera::internal {

// Tells when a second thread comes while another one is in a call. Ranks number what they start, so two threads that
// start at once do so in another order on each rank, and their operations, where they look alike, would mix their data.
class OneCaller {
 public:
  // Of the calling thread, maybe within another one of its calls.
  class Call {
   public:
    explicit Call(OneCaller& caller) : caller_(caller) {
      std::thread::id inside;
      is_outermost_ = caller.inside_.compare_exchange_strong(inside, std::this_thread::get_id());
      is_alone_ = is_outermost_ || inside == std::this_thread::get_id();
    }
    ~Call() {
      if (is_outermost_) caller_.inside_ = std::thread::id();
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    // No other thread is in a call.
    bool is_alone() const { return is_alone_; }
    // This one is not within another one of its thread.
    bool is_outermost() const { return is_outermost_; }

   private:
    OneCaller& caller_;
    bool is_outermost_, is_alone_;
  };

 private:
  std::atomic<std::thread::id> inside_;
};

}  // namespace tessera::internal
