#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "tessera/comm/fingerprint.h"

namespace tessera {

// What a rank did since the last backward, to be compared with the others: each operation's
// unit and number of elements, as a rolling fingerprint and, for the error, as text.
class OrderLog {
 public:
  // `operation` is a literal; `unit` outlives the log.
  void add(const char* operation, const std::string& unit, int64_t numel) {
    fingerprint_.add(operation).add(unit).add(numel);
    entries_.push_back({operation, &unit, numel});
    if (entries_.size() > kEntries) entries_.pop_front(), ++dropped_;  // a long evaluation
  }
  // A forward through the wrapper whose backward will reduce. A rank that leaves out one backward would otherwise
  // average its gradients with those of the others' step before, from then on.
  void add_forward() {
    static const std::string model = "the model";
    add("forward", model, -1);
  }
  uint64_t fingerprint() const { return fingerprint_.value(); }
  std::vector<std::string> lines() const {
    std::vector<std::string> lines;
    if (dropped_ > 0) lines.push_back(std::to_string(dropped_) + " earlier operations");
    for (const Entry& entry : entries_)
      lines.push_back(std::string(entry.operation) + " of " + *entry.unit +
                      (entry.numel < 0 ? "" : " (" + std::to_string(entry.numel) + " elements)"));
    return lines;
  }
  void clear() { *this = OrderLog(); }

 private:
  struct Entry {
    const char* operation;
    const std::string* unit;
    int64_t numel;
  };
  static constexpr size_t kEntries = 4096;

  Fingerprint fingerprint_;
  std::deque<Entry> entries_;
  int64_t dropped_ = 0;
};

}  // namespace tessera
