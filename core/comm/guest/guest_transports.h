#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <memory>

#include <tessera/launch.h>
#include "core/comm/gloo/transport.h"
#include "core/comm/guest/text_exchange.h"

namespace tessera::internal {

class TransportSource;

// Returns transports that carry a group's messages through the program's message library, such as MPI. Only the thread
// that starts and awaits operations calls the library. Messages progress only while that thread waits.
std::shared_ptr<TransportSource> message_transports(std::shared_ptr<MessageLibrary> library);

// Returns transports that carry all traffic of a group over the program's c10d process group, with these operations:
//
// | collective | operation | if the process group's class lacks that operation, or if counts are uneven |
// | --- | --- | --- |
// | all-reduce | allreduce | |
// | all-gather | _allgather_base | broadcast from each rank |
// | reduce-scatter | _reduce_scatter_base | allreduce |
// | broadcast, scatter | broadcast | |
// | reduce | allreduce of a copy | |
// | all-to-all, and all collectives of a part that split() made | send and recv | |
//
// The process group computes the sums. The order of additions, and so the rounding, may differ between operations.
std::shared_ptr<TransportSource> process_group_transports(c10::intrusive_ptr<c10d::ProcessGroup> group);

// Returns a TextExchange that uses two all-reduces of `group` to gather the texts, as bytes in tensors on `device`. If
// ranks are late, an all-reduce throws CommError after `timeout`, or the process group's own error before that.
TextExchange exchange_over(const c10::intrusive_ptr<c10d::ProcessGroup>& group, at::Device device,
                           std::chrono::milliseconds timeout);

}  // namespace tessera::internal
