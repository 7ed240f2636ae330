#pragma once

#include <mutex>
#include <string>
#include <utility>

#include "core/runtime/guarded_by.h"

namespace tessera::internal {

// The failure of a group, as known to this rank. Thread-safe.
class GroupFailure {
 public:
  // Returns the reason why the waits of this rank cannot complete; "" if none is known.
  std::string explanation() const {
    std::lock_guard lock(mutex_);
    return explanation_;
  }
  // Sets the explanation, unless one is known. `is_published` says whether all ranks can read the failure in the store.
  void explain(const std::string& explanation, bool is_published) {
    std::lock_guard lock(mutex_);
    if (explanation_.empty()) explanation_ = explanation;
    is_published_ |= is_published;
  }
  // Whether the failure is published, by this rank or another one, and this rank has an explanation.
  bool is_known_to_all() const {
    std::lock_guard lock(mutex_);
    return is_published_ && !explanation_.empty();
  }
  // Returns whether the caller must publish this rank's failure: false if one is published, or if the store is lost.
  bool begin_publishing() {
    std::lock_guard lock(mutex_);
    return !std::exchange(is_published_, true) && store_failure_.empty();
  }

  // Returns the reason why the store does not answer; "" if the store answers.
  std::string store_failure() const {
    std::lock_guard lock(mutex_);
    return store_failure_;
  }
  void set_store_failure(std::string text) {
    std::lock_guard lock(mutex_);
    store_failure_ = std::move(text);
  }

  bool has_failed() const {
    std::lock_guard lock(mutex_);
    return is_published_ || !explanation_.empty() || !store_failure_.empty();
  }

 private:
  mutable std::mutex mutex_;
  std::string explanation_ TESSERA_GUARDED_BY(mutex_);
  bool is_published_ TESSERA_GUARDED_BY(mutex_) = false;
  std::string store_failure_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::internal
