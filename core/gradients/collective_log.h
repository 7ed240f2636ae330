#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "core/comm/fingerprint.h"

namespace tessera::internal {

// Logs the collectives of one rank since the last backward, for a comparison with the logs of other ranks. Keeps a
// rolling fingerprint of all collectives. For errors, also keeps the names of the latest collectives.
class CollectiveLog {
 public:
  // `operation` must be a string literal; `unit` must outlive the log. An empty `divisor` means the world size.
  void add(const char* operation, const std::string& unit, int64_t numel, std::optional<double> divisor = {}) {
    fingerprint_.add(operation).add(unit).add(numel);
    if (divisor) fingerprint_.add(std::bit_cast<int64_t>(*divisor));
    add_entry({operation, &unit, numel, divisor.value_or(0)});
  }
  // Adds an operation on the whole model.
  void add(const char* operation) { add(operation, model(), -1); }
  // Adds a forward whose backward will reduce gradients. This entry detects a rank that skips a backward. Without the
  // entry, later reductions would average that rank's gradients with gradients of the other ranks' previous step.
  void add_forward() {
    add_entry({"forward", &model(), -1});
    ++uncompared_.forwards;
  }
  // Adds a forward that threw on this rank. Other ranks may have completed the forward, or this rank may repeat it.
  void add_failed_forward() { ++uncompared_.failed_forwards; }
  // Must be called for each parameter in turn. `is_kept`: whether backward will add to an existing gradient, which has
  // no elements if `is_empty`. An optimizer may leave empty gradients in place, so their entries match any entry.
  void add_kept(bool is_kept, bool is_empty) {
    uncompared_.kept.push_back(!is_kept ? kNotKept : is_empty ? kUnknown : kKept);
  }
  static constexpr char kKept = '1', kNotKept = '0', kUnknown = '?';

  // Entries that may differ between ranks that did equal work: repeated forwards, and empty gradients. fingerprint()
  // counts kUnknown as kKept.
  struct Uncompared {
    int64_t forwards = 0, failed_forwards = 0;
    std::string kept;
  };
  const Uncompared& uncompared() const { return uncompared_; }
  uint64_t fingerprint() const {
    std::string kept = uncompared_.kept;
    std::ranges::replace(kept, kUnknown, kKept);
    return Fingerprint(fingerprint_).add(uncompared_.forwards).add(kept).value();
  }
  uint64_t certain() const { return fingerprint_.value(); }  // the fingerprint without the uncompared entries
  std::vector<std::string> lines() const {
    std::vector<std::string> lines;
    if (dropped_ > 0) lines.push_back(std::to_string(dropped_) + " earlier operations");
    for (const Entry& entry : entries_)
      lines.push_back(std::string(entry.operation) + " of " + *entry.unit +
                      (entry.numel < 0 ? "" : " (" + std::to_string(entry.numel) + " elements)") +
                      (entry.divisor == 0 ? "" : " divided by " + std::to_string(entry.divisor)));
    return lines;
  }
  void clear() { *this = CollectiveLog(); }

 private:
  struct Entry {
    const char* operation;
    const std::string* unit;
    int64_t numel;
    double divisor = 0;  // 0: no divisor was set
  };
  static constexpr size_t kEntries = 4096;

  static const std::string& model() {
    static const std::string name = "the model";
    return name;
  }
  void add_entry(Entry entry) {
    entries_.push_back(entry);
    if (entries_.size() > kEntries) entries_.pop_front(), ++dropped_;  // a long evaluation drops its oldest entries
  }

  Fingerprint fingerprint_;
  Uncompared uncompared_;
  std::deque<Entry> entries_;
  int64_t dropped_ = 0;
};

}  // namespace tessera::internal
