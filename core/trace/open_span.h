#pragma once

#include <string>
#include <utility>

#include "core/trace/ranges.h"
#include "core/trace/trace.h"

namespace tessera::internal {

// A trace span with its profiler range, from a call of begin() to a call of end(). The destructor ends an open range.
class OpenSpan {
 public:
  // Returns whether a trace or a profiler is active.
  static bool is_recorded() noexcept { return Trace::active() != nullptr || RangeSink::active() != nullptr; }

  // Begins a span. `operation` is a literal such as "forward". The range is named "<operation> of <name>".
  void begin(std::string name, const char* operation) {
    name_ = std::move(name);
    operation_ = operation;
    since_ = Trace::Clock::now();
    range_.begin([&] { return std::string(operation) + " of " + name_; });
  }
  // Ends the span, and adds it to the trace if one is active. A no-op if no span is open.
  void end(SpanKind kind) {
    if (name_.empty()) return;
    range_.end();
    if (Trace* const trace = Trace::active()) trace->add(kind, name_, operation_, since_, Trace::Clock::now());
    name_.clear();
  }

 private:
  std::string name_;
  const char* operation_ = nullptr;
  Trace::Clock::time_point since_;
  OpenRange range_;
};

}  // namespace tessera::internal
