#include "tessera/trace/trace.h"

#include <c10/util/StringUtil.h>
#include <c10/util/env.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace tessera {
namespace {

constexpr std::string_view kBegin = R"({"displayTimeUnit":"ms",)";  // of every trace of ours
constexpr size_t kMaxSpans = size_t{1} << 20;                       // about 100 MB
constexpr std::array<const char*, 5> kCategories = {"compute", "gather", "reduce", "wait", "optimizer"};

std::atomic<int> rank_of_process = 0;
thread_local int rank_of_thread = -1;

// Operations under way at the same time would overlap on one line of the picture: each kind gets as
// many lines ("threads") as it needs, numbered from here.
constexpr int kGatherLines = 100, kReduceLines = 200;

bool is_in_flight(SpanKind kind) { return kind == SpanKind::kGather || kind == SpanKind::kReduce; }

std::string name_of_line(int line) {
  if (line == 0) return "thread of the rank";
  return line < kReduceLines ? c10::str("gathers ", line - kGatherLines + 1)
                             : c10::str("reduces ", line - kReduceLines + 1);
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

// Whether a trace may be written there: what is there, if anything, is one. (One of ours, by how it begins: nlohmann's
// dump() has keys in their order, and a trace can have 100 MB.)
bool may_be_replaced(const std::string& path) {
  // Opened once: the process of another rank may remove it meanwhile. A pipe would block.
  const int file = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) return errno == ENOENT;
  struct stat status {};
  std::string text(kBegin.size(), '\0');
  const bool is_file = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  const ssize_t read_bytes = is_file ? ::pread(file, text.data(), text.size(), 0) : -1;
  ::close(file);
  return read_bytes == 0 || (read_bytes == std::ssize(text) && text == kBegin);
}

nlohmann::json name_event(const char* what, int rank, int line, const std::string& name) {
  return {{"ph", "M"}, {"name", what}, {"pid", rank}, {"tid", line}, {"args", {{"name", name}}}};
}

}  // namespace

Trace* Trace::make() noexcept {
  const auto path = c10::utils::get_env("TESSERA_TRACE").value_or("");
  if (path.empty()) return nullptr;
  if (!may_be_replaced(path)) {
    std::cerr << "TESSERA_TRACE: " << path << " is not a trace; it is left as it is, and none is written\n";
    return nullptr;
  }
  static auto* const trace = new Trace(path);  // lives as long as the process: destructors of others may still add
  ::unlink(path.c_str());                      // an earlier run's
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
      while (lines[{span.rank, line}] > span.begin) ++line;
    }
    lines[{span.rank, line}] = span.end;
    events.push_back({{"ph", "X"},
                      {"name", span.name},
                      {"cat", kCategories.at(static_cast<size_t>(span.kind))},
                      {"pid", span.rank},
                      {"tid", line},
                      {"ts", microseconds(span.begin.time_since_epoch())},
                      {"dur", microseconds(span.end - span.begin)}});
    if (span.operation != nullptr) events.back()["args"] = {{"operation", span.operation}};
  }
  for (const auto& [key, end] : lines) {
    const auto [rank, line] = key;
    if (line == 0) events.push_back(name_event("process_name", rank, 0, c10::str("rank ", rank)));
    events.push_back(name_event("thread_name", rank, line, name_of_line(line)));
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
  if (dropped_ > 0) document["otherData"][c10::str("spans dropped by rank ", spans_.front().rank)] = dropped_;
  std::ofstream file(path_);
  file << document.dump() << "\n";
  if (!file.flush()) throw std::runtime_error("TESSERA_TRACE: cannot write " + path_);
  spans_.clear();
  dropped_ = 0;
}

}  // namespace tessera
