#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::internal {

// The file of TESSERA_TRACE: Chrome's trace events in the JSON array format, whose last bracket may be missing, one
// event a line:
//
//   [{"name":"tessera_trace","ph":"i","pid":0,...,"args":{"run":"5f..","rank":0,"host":"a","clock":"..",...}}
//   ,{"name":"unit 'layers.0'","ph":"X","pid":0,"tid":0,"ts":12.5,"dur":3.25,...}
//
// So the file is only ever added to: with "]" behind any of its lines it is JSON. Processes, and runs, may share one.
// Before the first event of a rank stands its "tessera_trace", which tells `tessera trace merge` what that rank's
// clock is. Times are those of the host's steady clock, in microseconds.

// How the file of every trace of ours begins, and how the line of a rank begins behind its "[" or ",".
inline constexpr std::string_view kTraceBegin = R"([{"name":"tessera_trace",)";
inline constexpr std::string_view kRankBegin = kTraceBegin.substr(1);

// An event's "pid" is the rank, and in the second run of a file this number more, and so on: viewers show a process a
// rank and run.
inline constexpr int64_t kPidsOfRun = 1'000'000;

// Whether a trace may be written to `path`: there is nothing yet, or what is there is a trace of ours or an empty file.
// Opens no file that is not a regular one.
bool may_hold_trace(const std::string& path);

// The first bytes of a file, at most so many; none of one that cannot be read.
std::string begin_of_file(const std::string& path, size_t bytes);

// The file, open to be added to by this object alone, among all processes that come here (flock). Not thread-safe.
class TraceAppender {
 public:
  // Makes the file if there is none, and waits until no other appender has it. A line whose end is missing, since a
  // process was killed in the middle of writing it, is taken off. Throws std::runtime_error, which names the file, if
  // it cannot be written or is not a trace; such a file is left as it is.
  explicit TraceAppender(std::string path);
  ~TraceAppender();
  TraceAppender(const TraceAppender&) = delete;
  TraceAppender& operator=(const TraceAppender&) = delete;

  // Whether there is no line in it.
  bool is_empty() const { return bytes_ == 0; }

  // The place of a run among those of the file, from 0; the next one if it is not there. Reads the whole file.
  int64_t number_of(const std::string& run) const;

  // Adds lines that begin with a comma; the first of a file has to be a rank's. All of them, or, where the disk
  // refuses, none, and std::runtime_error.
  void append(std::string lines);

 private:
  [[noreturn]] void fail(const std::string& why) const;
  int64_t end_of_lines(int64_t bytes) const;

  const std::string path_;
  const int descriptor_;
  int64_t bytes_ = 0;  // whole lines
};

}  // namespace tessera::internal
