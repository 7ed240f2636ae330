#include "progress_bar.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

using Clock = std::chrono::steady_clock;

ProgressBar::ProgressBar(std::string doing, int64_t total_bytes)
    : doing_(std::move(doing)),
      total_bytes_(total_bytes),
      visible_(::isatty(STDERR_FILENO) != 0),
      begin_(Clock::now()) {}

ProgressBar::~ProgressBar() {
  if (visible_ && bytes_ > 0) std::fprintf(stderr, "\r\033[K");
}

void ProgressBar::add(int64_t bytes) {
  bytes_ += bytes;
  if (!visible_ || Clock::now() - drawn_ < std::chrono::milliseconds(100)) return;
  drawn_ = Clock::now();
  draw();
}

void ProgressBar::draw() {
  constexpr int kWidth = 30;
  const double part =
      total_bytes_ > 0 ? std::min(1.0, static_cast<double>(bytes_) / static_cast<double>(total_bytes_)) : 1.0;
  const double seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
  const std::string bar(static_cast<size_t>(part * kWidth), '#');
  std::fprintf(stderr, "\r%s [%-*s] %3.0f %%, %s/s\033[K", doing_.c_str(), kWidth, bar.c_str(), 100 * part,
               human_bytes(static_cast<int64_t>(static_cast<double>(bytes_) / std::max(seconds, 1e-3))).c_str());
  std::fflush(stderr);
}

std::string human_bytes(int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) value /= 1024, ++unit;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}
