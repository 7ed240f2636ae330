// Recorded work of the simulated accelerator, with the rules of CUDA's stream capture:
//
// - Work of a recording stream is kept, and does not run. A stream that waits for it records too.
// - An error, which ends the recording: a wait for work of another stream from before; recording on the default stream;
//   a thread that records and synchronises, or queries an event; any use of a recorded event outside; a stream that the
//   first one does not join.
// - Memory that is allocated meanwhile stays the graph's.
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

// The number of the recording that the stream is part of; 0: none.
int64_t recording_of(int stream);
bool is_recording(int device, int64_t number);
// Whether this thread replays now: its launches are one.
bool is_replaying();

// Each returns whether the stream records, and has recorded the request.
bool record_launch(int stream, const std::string& what, const std::vector<Access>& accesses, const Prepare& prepare);
bool record_point(int stream, Point& point);
bool record_block(int stream, const Point& point);
// Throws, and ends the recording, if this thread records on the device, or `point` was recorded.
void refuse_while_recording(int device, const std::string& what, const Point* point = nullptr);
// Calls `work` at the end of the device's recording. Returns false if there is none.
bool postpone(int device, const std::function<void()>& work);

}  // namespace tessera::accelerator
