#pragma once

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

namespace tessera::internal {

// How the spans of some ranks came into a merged trace.
struct MergedClock {
  std::string host;
  std::filesystem::path file;
  int64_t run = 0;        // in the order in which runs began, from 0
  std::set<int> ranks;    // of that run, whose clock this is
  int64_t offset_ns = 0;  // was added to the host's steady clock: that of the run's reference rank
  int64_t error_ns = 0;   // of offset_ns at the run's begin, at most; 0: the reference's own clock
};

// What merge_traces() made.
struct MergedTrace {
  std::vector<MergedClock> clocks;  // by file, run and offset
  int64_t events = 0;               // without names of ranks and lines
  std::vector<std::string> notes;   // what is to be known of the inputs: "a.json: ends in a part of an event"
};

// Makes one trace of those that TESSERA_TRACE wrote on several hosts: JSON for Perfetto and chrome://tracing, times on
// one clock from 0, a process a rank and run. Within a run clocks are aligned by what init() measured; runs stand to
// each other as the Unix clocks of their reference ranks have it. Reads the inputs twice, a line at a time.
//
// `out` is replaced at once, when all is well, and only if it is a merged trace. Throws std::runtime_error that names
// the file, and the line if it is of one, if an input cannot be read, is no trace, is damaged otherwise than by its end
// missing, or holds a rank that another has; or if out is something else or cannot be written.
MergedTrace merge_traces(const std::filesystem::path& out, const std::vector<std::filesystem::path>& in);

}  // namespace tessera::internal
