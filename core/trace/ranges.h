#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

namespace tessera::internal {

// Receives ranges of time for a profiler, which draws them on a timeline. Thread-safe.
class RangeSink {
 public:
  virtual ~RangeSink() = default;
  // Begins a range of this thread. The ranges of a thread nest: pop() ends the newest.
  virtual void push(const std::string& name) = 0;
  virtual void pop() = 0;
  // Begins a range that may overlap others, and may end on another thread. Returns its id.
  virtual uint64_t start(const std::string& name) = 0;
  virtual void end(uint64_t id) = 0;

  // Returns the sink of the process: NVTX if TESSERA_NVTX=1 in a build with TESSERA_CUDA, otherwise null. If it is
  // null, a range costs one comparison.
  static RangeSink* active() noexcept { return current().load(std::memory_order_relaxed); }
  // Replaces the sink, for tests. Returns the previous sink. Must not be called while a range is open.
  static RangeSink* exchange(RangeSink* sink) noexcept { return current().exchange(sink); }

 private:
  static std::atomic<RangeSink*>& current() noexcept {
    static std::atomic<RangeSink*> sink = from_environment();
    return sink;
  }
  static RangeSink* from_environment() noexcept;  // in nvtx_ranges.cpp or no_nvtx_ranges.cpp
};

// A range of this thread that lasts as long as this object.
class NestedRange {
 public:
  // Calls name() if there is a sink.
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

// A range that begins and ends in different calls, at the latest when this object is destroyed.
class OpenRange {
 public:
  OpenRange() = default;
  ~OpenRange() { end(); }
  OpenRange(const OpenRange&) = delete;
  OpenRange& operator=(const OpenRange&) = delete;

  // Ends the open range, if any. Calls name() if there is a sink.
  template <class Name>
  void begin(Name name) {
    end();
    if (RangeSink* const sink = RangeSink::active()) {
      id_ = sink->start(name());
      sink_ = sink;
    }
  }
  // A no-op if no range is open.
  void end() {
    if (RangeSink* const sink = std::exchange(sink_, nullptr)) sink->end(id_);
  }

 private:
  RangeSink* sink_ = nullptr;  // null: no range is open
  uint64_t id_ = 0;
};

}  // namespace tessera::internal
