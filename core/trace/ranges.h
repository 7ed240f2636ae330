#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

namespace tessera::internal {

// Receives ranges of time for a profiler, which shows them on a timeline. Thread-safe.
class RangeSink {
 public:
  virtual ~RangeSink() = default;
  // push() begins a range of the calling thread. The ranges of a thread nest, so pop() ends the newest open range.
  virtual void push(const std::string& name) = 0;
  virtual void pop() = 0;
  // Begins a range that may overlap others and may end on another thread. Returns the id to pass to end().
  virtual uint64_t start(const std::string& name) = 0;
  virtual void end(uint64_t id) = 0;

  // Returns the process's sink: NVTX if TESSERA_NVTX=1 in a build with TESSERA_CUDA, otherwise null. Without a sink, a
  // range costs only one comparison.
  static RangeSink* active() noexcept { return current().load(std::memory_order_relaxed); }
  // Replaces the sink, for tests. Returns the previous sink. Must not be called while a range is open.
  static RangeSink* exchange(RangeSink* sink) noexcept { return current().exchange(sink); }

 private:
  static std::atomic<RangeSink*>& current() noexcept {
    static std::atomic<RangeSink*> sink = from_environment();
    return sink;
  }
  static RangeSink* from_environment() noexcept;  // in nvtx_ranges.cpp or no_cuda.cpp
};

// A range of this thread that lasts as long as this object.
class NestedRange {
 public:
  // Begins the range. Calls name() only if there is a sink.
  template <class Name>
  explicit NestedRange(Name name) : sink_(RangeSink::active()) {
    if (sink_ != nullptr) sink_->push(name());
  }
  ~NestedRange() {
    if (sink_ != nullptr) sink_->pop();
  }
  NestedRange(const NestedRange&) = delete;
  NestedRange& operator=(const NestedRange&) = delete;

 private:
  RangeSink* const sink_;
};

// A range from a call of begin() to a call of end(). The destructor also ends an open range.
class OpenRange {
 public:
  OpenRange() = default;
  ~OpenRange() { end(); }
  OpenRange(const OpenRange&) = delete;
  OpenRange& operator=(const OpenRange&) = delete;

  // Ends the open range, if any, and begins a new one. Calls name() only if there is a sink.
  template <class Name>
  void begin(Name name) {
    end();
    if (RangeSink* const sink = RangeSink::active()) {
      id_ = sink->start(name());
      sink_ = sink;
    }
  }
  // Ends the open range. A no-op if no range is open.
  void end() {
    if (RangeSink* const sink = std::exchange(sink_, nullptr)) sink->end(id_);
  }

 private:
  RangeSink* sink_ = nullptr;  // null if no range is open
  uint64_t id_ = 0;
};

}  // namespace tessera::internal
