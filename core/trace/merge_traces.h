#pragma once

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

namespace tessera::internal {

// A host clock in an input: the ranks of one run in this file that use it, and its offset to the run's reference clock.
struct MergedClock {
  std::string host;
  std::filesystem::path file;
  int64_t run = 0;        // number of the run; runs are numbered from 0 by start time
  std::set<int> ranks;    // ranks of the run that use this clock and are in `file`
  int64_t offset_ns = 0;  // to be added to the host's steady clock to get the reference rank's clock
  int64_t error_ns = 0;   // bound on the error of offset_ns at the start of the run; 0 for the reference clock
};

// The result of merge_traces().
struct MergedTrace {
  std::vector<MergedClock> clocks;  // ordered by input, run, id of the clock, and offset
  int64_t events = 0;               // number of events, without metadata events
  std::vector<std::string> notes;   // remarks on the inputs, such as "a.json: ends in a part of an event"
};

// Merges traces that TESSERA_TRACE wrote on several hosts into one JSON file for Perfetto and chrome://tracing. The
// file has one process for each rank of each run. Aligns clocks within a run by the offsets that init() measured, and
// runs by the Unix clock of the rank with the least error_ns. Times start at 0. Reads inputs three times, line by line.
//
// Writes `out` atomically at the end. An existing `out` must be a merged trace, which is then replaced. Throws
// std::runtime_error, naming the file, if an input is unreadable, no trace or damaged (then also the line). A missing
// end is allowed. Also throws if inputs contain the same rank of a run, or if `out` is another file or not writable.
MergedTrace merge_traces(const std::filesystem::path& out, const std::vector<std::filesystem::path>& in);

}  // namespace tessera::internal
