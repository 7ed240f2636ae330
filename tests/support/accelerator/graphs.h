// Recorded work of the simulated accelerator, with the rules of CUDA's stream capture:
//
// - Work of a recording stream is kept, and does not run. A stream that waits for recorded work also records.
// - Errors, which end the recording: a wait for another stream's work from before the recording; recording on the
//   default stream; a synchronisation or event query by a recording thread; a use of a recorded event outside of the
//   recording; a recording stream for which the first stream does not wait.
// - Memory that is allocated during the recording belongs to the graph.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/accelerator/streams.h"

namespace tessera::internal {
class GraphRecorder;
}

namespace tessera::accelerator {
using namespace internal;

std::unique_ptr<GraphRecorder> make_simulated_recorder();

// Returns the number of the recording that the stream is part of, or 0.
int64_t recording_of(int stream);
bool is_recording(int device, int64_t number);
// Returns whether this thread replays a graph, whose launches count as one launch.
bool is_replaying();

// If the stream records, record the request and return true. Otherwise, return false.
bool record_launch(int stream, const std::string& what, const std::vector<Access>& accesses, const Prepare& prepare);
bool record_point(int stream, Point& point);
bool record_block(int stream, const Point& point);
// Throws, and ends the recording, if this thread records on the device, or `point` was recorded.
void refuse_while_recording(int device, const std::string& what, const Point* point = nullptr);
// Calls `work` at the end of the device's recording. Returns false if there is none.
bool postpone(int device, const std::function<void()>& work);

}  // namespace tessera::accelerator
