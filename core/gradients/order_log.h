#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/fingerprint.h"

namespace tessera::internal {

// What a rank did since the last backward, to be compared with the others: each operation's
// unit and number of elements, as a rolling fingerprint and, for the error, as text.
class OrderLog {
 public:
  // `operation` is a literal; `unit` outlives the log. `divisor`: what the sums are divided by, other than the world.
  void add(const char* operation, const std::string& unit, int64_t numel, std::optional<double> divisor = {}) {
    fingerprint_.add(operation).add(unit).add(numel);
    if (divisor) fingerprint_.add(std::bit_cast<int64_t>(*divisor));
    add_entry({operation, &unit, numel, divisor.value_or(0)});
  }
  // Of the whole model.
  void add(const char* operation) { add(operation, model(), -1); }
  // A forward through the wrapper whose backward will reduce. A rank that leaves out one backward would otherwise
  // average its gradients with those of the others' step before, from then on.
  void add_forward() {
    add_entry({"forward", &model(), -1});
    ++doubtful_.forwards;
  }
  // One that threw: it may be one that the others have ended, or be called again on this rank alone.
  void add_failed_forward() { ++doubtful_.failed_forwards; }
  // Whether a gradient is there that backward adds to, of one parameter after the other. One of no elements need not be
  // cleared where others clear theirs: who writes an optimizer may pass over what is empty.
  void add_kept(bool is_kept, bool is_empty) {
    doubtful_.kept.push_back(!is_kept ? kNotKept : is_empty ? kUnknown : kKept);
  }
  static constexpr char kKept = '1', kNotKept = '0', kUnknown = '?';

  // What ranks that did the same may have other values of. The fingerprint, which is looked at first, takes what is
  // unknown for kept.
  struct Doubtful {
    int64_t forwards = 0, failed_forwards = 0;
    std::string kept;
  };
  const Doubtful& doubtful() const { return doubtful_; }
  uint64_t fingerprint() const {
    std::string kept = doubtful_.kept;
    std::ranges::replace(kept, kUnknown, kKept);
    return Fingerprint(fingerprint_).add(doubtful_.forwards).add(kept).value();
  }
  uint64_t certain() const { return fingerprint_.value(); }  // the fingerprint of all the rest
  std::vector<std::string> lines() const {
    std::vector<std::string> lines;
    if (dropped_ > 0) lines.push_back(std::to_string(dropped_) + " earlier operations");
    for (const Entry& entry : entries_)
      lines.push_back(std::string(entry.operation) + " of " + *entry.unit +
                      (entry.numel < 0 ? "" : " (" + std::to_string(entry.numel) + " elements)") +
                      (entry.divisor == 0 ? "" : " divided by " + std::to_string(entry.divisor)));
    return lines;
  }
  void clear() { *this = OrderLog(); }

 private:
  struct Entry {
    const char* operation;
    const std::string* unit;
    int64_t numel;
    double divisor = 0;  // none
  };
  static constexpr size_t kEntries = 4096;

  static const std::string& model() {
    static const std::string name = "the model";
    return name;
  }
  void add_entry(Entry entry) {
    entries_.push_back(entry);
    if (entries_.size() > kEntries) entries_.pop_front(), ++dropped_;  // a long evaluation
  }

  Fingerprint fingerprint_;
  Doubtful doubtful_;
  std::deque<Entry> entries_;
  int64_t dropped_ = 0;
};

}  // namespace tessera::internal
