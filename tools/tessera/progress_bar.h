#pragma once

#include <chrono>
#include <cstdint>
#include <string>

// A progress line on standard error that is redrawn as bytes are processed. Prints nothing if that is not a terminal.
class ProgressBar {
 public:
  ProgressBar(std::string doing, int64_t total_bytes);
  ~ProgressBar();
  void add(int64_t bytes);

 private:
  void draw();
  const std::string doing_;
  const int64_t total_bytes_;
  int64_t bytes_ = 0;
  const bool visible_;
  const std::chrono::steady_clock::time_point begin_;
  std::chrono::steady_clock::time_point drawn_;
};

// Returns a text like "1.5 GiB".
std::string human_bytes(int64_t bytes);
