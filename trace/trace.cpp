#include "tessera/trace/trace.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace tessera {
namespace {

constexpr size_t kMaxSpans = size_t{1} << 20;  // about 100 MB
constexpr std::array<const char*, 5> kCategories = {"compute", "gather", "reduce", "wait", "optimizer"};

std::atomic<int> rank_of_process = 0;
thread_local int rank_of_thread = -1;

// Operations under way at the same time would overlap on one line of the picture: each kind gets as
// many lines ("threads") as it needs, numbered from here.
constexpr int kGatherLines = 100, kReduceLines = 200;

bool is_in_flight(SpanKind kind) { return kind == SpanKind::kGather || kind == SpanKind::kReduce; }

std::string name_of_line(int line) {
  if (line == 0) return "thread of the rank";
  return line < kReduceLines ? "gathers " + std::to_string(line - kGatherLines + 1)
                             : "reduces " + std::to_string(line - kReduceLines + 1);
}

double microseconds(Trace::Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

// The lock is held as long as the object lives, by one process of the host.
class LockedFile {
 public:
  explicit LockedFile(const std::string& path) : fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
    if (fd_ < 0 || ::flock(fd_, LOCK_EX) != 0)
      throw std::runtime_error("TESSERA_TRACE: cannot write " + path + ": " + std::generic_category().message(errno));
  }
  ~LockedFile() { ::close(fd_); }
  LockedFile(const LockedFile&) = delete;
  LockedFile& operator=(const LockedFile&) = delete;

 private:
  int fd_;
};

nlohmann::json name_event(const char* what, int rank, int line, const std::string& name) {
  return {{"ph", "M"}, {"name", what}, {"pid", rank}, {"tid", line}, {"args", {{"name", name}}}};
}

}  // namespace

Trace* Trace::make() noexcept {
  const char* path = std::getenv("TESSERA_TRACE");
  if (path == nullptr || *path == '\0') return nullptr;
  static auto* const trace = new Trace(path);  // lives as long as the process: destructors of others may still add
  ::unlink(path);                              // an earlier run's
  std::atexit([] {
    try {
      trace->write();
    } catch (const std::exception& error) {
      std::cerr << error.what() << "\n";
    }
  });
  return trace;
}

void Trace::set_rank_of_thread(int rank) noexcept { rank_of_thread = rank; }

void Trace::set_rank_of_process(int rank) noexcept {
  rank_of_process = rank;
  active();
}

void Trace::add(SpanKind kind, std::string_view name, const char* operation, Clock::time_point begin,
                Clock::time_point end) {
  const int rank = rank_of_thread >= 0 ? rank_of_thread : rank_of_process.load();
  std::lock_guard lock(mutex_);
  if (spans_.size() >= kMaxSpans) {
    ++dropped_;
    return;
  }
  spans_.push_back({kind, rank, std::string(name), operation, begin, end});
}

void Trace::write() {
  std::lock_guard lock(mutex_);
  if (spans_.empty()) return;
  std::stable_sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  nlohmann::json events = nlohmann::json::array();
  std::map<std::pair<int, int>, Clock::time_point> lines;  // by rank and line: when it is free again
  for (const Span& span : spans_) {
    int line = 0;
    if (is_in_flight(span.kind)) {
      line = span.kind == SpanKind::kGather ? kGatherLines : kReduceLines;
      for (auto taken = lines.find({span.rank, line}); taken != lines.end() && taken->second > span.begin;
           taken = lines.find({span.rank, line}))
        ++line;
    }
    lines[{span.rank, line}] = span.end;
    nlohmann::json event = {{"ph", "X"},
                            {"name", span.name},
                            {"cat", kCategories.at(static_cast<size_t>(span.kind))},
                            {"pid", span.rank},
                            {"tid", line},
                            {"ts", microseconds(span.begin.time_since_epoch())},
                            {"dur", microseconds(span.end - span.begin)}};
    if (span.operation != nullptr) event["args"] = {{"operation", span.operation}};
    events.push_back(std::move(event));
  }
  for (const auto& [key, end] : lines) {
    if (key.second == 0)
      events.push_back(name_event("process_name", key.first, 0, "rank " + std::to_string(key.first)));
    events.push_back(name_event("thread_name", key.first, key.second, name_of_line(key.second)));
  }

  const LockedFile lock_of_file(path_);
  nlohmann::json document = {{"displayTimeUnit", "ms"}, {"traceEvents", nlohmann::json::array()}};
  if (std::ifstream earlier(path_); earlier && earlier.peek() != std::ifstream::traits_type::eof()) {
    document = nlohmann::json::parse(earlier, nullptr, /*allow_exceptions=*/false);
    if (!document.is_object() || !document["traceEvents"].is_array())
      throw std::runtime_error("TESSERA_TRACE: " + path_ + " is not a trace; nothing was written");
  }
  auto& all = document["traceEvents"];
  all.insert(all.end(), events.begin(), events.end());
  if (dropped_ > 0) document["otherData"]["spans dropped by rank " + std::to_string(spans_.front().rank)] = dropped_;
  std::ofstream file(path_);
  file << document.dump() << "\n";
  if (!file.flush()) throw std::runtime_error("TESSERA_TRACE: cannot write " + path_);
  spans_.clear();
  dropped_ = 0;
}

}  // namespace tessera
