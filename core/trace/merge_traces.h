#pragma once

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

namespace tessera::internal {

// A host clock in a merged trace: the ranks of one run that use it, and its offset to the run's reference clock.
struct MergedClock {
  std::string host;
  std::filesystem::path file;
  int64_t run = 0;        // number of the run, in the order of their starts
  std::set<int> ranks;    // ranks of that run that use this clock
  int64_t offset_ns = 0;  // to be added to the host's steady clock to get the reference rank's clock
  int64_t error_ns = 0;   // bound of the error of offset_ns at the start of the run; 0 for the reference's clock
};

// The result of merge_traces().
struct MergedTrace {
  std::vector<MergedClock> clocks;  // ordered by file, run and offset
  int64_t events = 0;               // number of events, without metadata events
  std::vector<std::string> notes;   // remarks on the inputs, such as "a.json: ends in a part of an event"
};

// Merges traces that TESSERA_TRACE wrote on several hosts into one: JSON for Perfetto and chrome://tracing, with times
// on one clock from 0, and a process for each rank and run. Aligns clocks of one run by the offsets that init()
// measured, and runs by the Unix clocks of their reference ranks. Reads the inputs three times, line by line.
//
// Writes `out` atomically at the end; an existing file must be a merged trace, and is replaced. Throws
// std::runtime_error, with file and line, if an input cannot be read, is no trace, or is damaged (except for a missing
// end). Also throws if two inputs have one rank of a run, or if `out` is another kind of file or cannot be written.
MergedTrace merge_traces(const std::filesystem::path& out, const std::vector<std::filesystem::path>& in);

}  // namespace tessera::internal
