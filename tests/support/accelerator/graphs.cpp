#include "tests/support/accelerator/graphs.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "core/runtime/graph_recorder.h"
#include "tests/support/accelerator/memory.h"

namespace tessera::accelerator {
using namespace internal;
namespace {

struct Node {
  enum Kind : uint8_t { kLaunch, kRecord, kBlock } kind;
  int stream;
  std::optional<size_t> before;  // index of the previous node of the same stream
  size_t joined = 0;             // for kBlock: index of the kRecord node for which the stream waits
  std::string what = {};
  std::vector<Access> accesses = {};
  Prepare prepare = {};
};

struct Recording {
  int64_t number;
  int origin;
  std::vector<Node> nodes;
  std::map<int, std::optional<size_t>> last;  // last node of each recording stream
  std::set<std::thread::id> threads;
  std::string error;
  std::vector<std::function<void()>> postponed;

  size_t add(Node node) {
    threads.insert(std::this_thread::get_id());
    node.before = last.at(node.stream);
    last[node.stream] = nodes.size();
    nodes.push_back(std::move(node));
    return nodes.size() - 1;
  }
  [[noreturn]] void fail(const std::string& why) {
    if (error.empty()) error = why;
    TORCH_CHECK(false, "simulated accelerator: not recorded: ", why);
  }
  // Names recorded work for which the first stream does not wait; "" if there is none.
  std::string unjoined() const {
    std::set<size_t> joined;
    std::vector<size_t> open;
    if (last.at(origin)) open.push_back(*last.at(origin));
    while (!open.empty()) {
      const size_t at = open.back();
      open.pop_back();
      if (!joined.insert(at).second) continue;
      if (nodes[at].before) open.push_back(*nodes[at].before);
      if (nodes[at].kind == Node::kBlock) open.push_back(nodes[at].joined);
    }
    for (size_t i = 0; i < nodes.size(); ++i)
      if (nodes[i].kind == Node::kLaunch && nodes[i].what != kGivenBack && !joined.contains(i))
        return nodes[i].what + " on stream " + std::to_string(nodes[i].stream % kStreamsPerDevice);
    return "";
  }
};

std::mutex recordings_mutex;  // guards recordings and last_number
std::unique_ptr<Recording> recordings[kDevices];
int64_t last_number = 0;
thread_local bool replays = false;

Recording* of_stream(int stream) {
  Recording* const recording = recordings[device_of(stream)].get();
  return recording != nullptr && recording->last.contains(stream) ? recording : nullptr;
}

class SimulatedRecorder final : public GraphRecorder {
 public:
  ~SimulatedRecorder() override {
    for (const auto& [recorded, own] : streams_) {
      wait_in_secret(own);
      give_stream(own);
    }
  }
  void begin() override {
    const int stream = current_stream(current_device());
    std::lock_guard lock(recordings_mutex);
    TORCH_CHECK(stream % kStreamsPerDevice != 0, "simulated accelerator: the default stream cannot be recorded");
    auto& recording = recordings[device_of(stream)];
    TORCH_CHECK(!recording, "simulated accelerator: a recording in another one");
    recording = std::make_unique<Recording>(Recording{++last_number, stream, {}, {}, {}, {}, {}});
    recording->last[stream];
    recording->threads.insert(std::this_thread::get_id());
  }
  void end() override {
    std::unique_ptr<Recording> recording;
    {
      std::lock_guard lock(recordings_mutex);
      recording = std::move(recordings[current_device()]);
    }
    for (const auto& work : recording->postponed) work();
    TORCH_CHECK(recording->error.empty(), "simulated accelerator: the recording failed: ", recording->error);
    TORCH_CHECK(recording->origin == current_stream(current_device()),
                "simulated accelerator: a recording ends on another stream than its first");
    const std::string unjoined = recording->unjoined();
    TORCH_CHECK(unjoined.empty(), "simulated accelerator: the recorded stream does not wait for ", unjoined);
    for (const auto& [stream, last] : recording->last) streams_[stream] = take_stream(device_of(stream));
    nodes_ = std::move(recording->nodes);
    origin_ = streams_.at(recording->origin);
  }
  void replay() override {
    const int caller = current_stream(current_device());
    launch(caller, "a graph", {}, [] {});
    replays = true;
    block(origin_, record(caller));
    std::vector<Point> points(nodes_.size());
    for (size_t i = 0; i < nodes_.size(); ++i) {
      const Node& node = nodes_[i];
      const int stream = streams_.at(node.stream);
      switch (node.kind) {
        case Node::kLaunch:
          launch_prepared(stream, node.what, node.accesses, node.prepare);
          break;
        case Node::kRecord:
          points[i] = record(stream);
          break;
        case Node::kBlock:
          block(stream, points[node.joined]);
          break;
      }
    }
    replays = false;
    block(caller, record(origin_));
  }

 private:
  std::vector<Node> nodes_;
  std::map<int, int> streams_;  // the replaying stream of each recorded one; exclusive, so no other work orders it
  int origin_ = 0;
};

}  // namespace

std::unique_ptr<GraphRecorder> make_simulated_recorder() { return std::make_unique<SimulatedRecorder>(); }

int64_t recording_of(int stream) {
  std::lock_guard lock(recordings_mutex);
  const Recording* const recording = of_stream(stream);
  return recording == nullptr ? 0 : recording->number;
}

bool is_recording(int device, int64_t number) {
  std::lock_guard lock(recordings_mutex);
  return recordings[device] && recordings[device]->number == number;
}

bool is_replaying() { return replays; }

bool record_launch(int stream, const std::string& what, const std::vector<Access>& accesses, const Prepare& prepare) {
  std::lock_guard lock(recordings_mutex);
  Recording* const recording = of_stream(stream);
  if (recording == nullptr) return false;
  recording->add({.kind = Node::kLaunch, .stream = stream, .what = what, .accesses = accesses, .prepare = prepare});
  return true;
}

bool record_point(int stream, Point& point) {
  std::lock_guard lock(recordings_mutex);
  Recording* const recording = of_stream(stream);
  if (recording == nullptr) return false;
  point.recording = recording->number;
  point.node = recording->add({.kind = Node::kRecord, .stream = stream});
  return true;
}

bool record_block(int stream, const Point& point) {
  std::lock_guard lock(recordings_mutex);
  Recording* const recording = recordings[device_of(stream)].get();
  const bool is_part = recording != nullptr && recording->last.contains(stream);
  if (point.recording == 0) {
    if (is_part) recording->fail("a wait for work from before the recording");
    return false;
  }
  TORCH_CHECK(recording != nullptr && point.recording == recording->number,
              "simulated accelerator: a wait for an event of a recording that is over");
  if (!is_part && stream % kStreamsPerDevice == 0) recording->fail("a wait of the default stream for recorded work");
  recording->last[stream];
  recording->add({.kind = Node::kBlock, .stream = stream, .joined = point.node});
  return true;
}

void refuse_while_recording(int device, const std::string& what, const Point* point) {
  std::lock_guard lock(recordings_mutex);
  Recording* const recording = recordings[device].get();
  const bool is_recorded = point != nullptr && point->recording != 0;
  if (recording != nullptr && (is_recorded || recording->threads.contains(std::this_thread::get_id()) ||
                               recording->last.contains(current_stream(device))))
    recording->fail(what);
  TORCH_CHECK(!is_recorded, "simulated accelerator: ", what, ", of a recording that is over");
}

bool postpone(int device, const std::function<void()>& work) {
  std::lock_guard lock(recordings_mutex);
  if (!recordings[device]) return false;
  recordings[device]->postponed.push_back(work);
  return true;
}

}  // namespace tessera::accelerator
