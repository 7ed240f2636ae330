#pragma once

#include <memory>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/flat/unit_plan.h"
#include "tessera/sdp/distributed_data_parallel.h"

namespace c10d {
class Reducer;
}

namespace tessera {

// c10d's Reducer, with buckets that travel by our communicator.
//
// The Reducer hands each full bucket to a communication hook and waits for the hook's futures at the
// end of backward. Ours starts the all-reduce at once and completes the future in a callback of
// its own at the end of backward, which the engine calls before the Reducer's (callbacks run in the
// order in which they were queued), or earlier when several are in flight. So no thread waits for
// another, and errors are thrown where backward() was called.
class DdpReducer {
 public:
  DdpReducer(std::vector<PlannedParameter> parameters, std::shared_ptr<Communicator> comm, const DdpOptions& options);
  ~DdpReducer();

  void begin_forward();  // collective when the buckets are made anew, after the first iteration
  // The next backward reduces. `outputs`: the tensors that forward returned.
  void expect_backward(const std::vector<at::Tensor>& outputs);

  struct Transport;  // of buckets

 private:
  void watch_first_backward(const std::vector<at::Tensor>& outputs);

  const DdpOptions options_;
  const std::shared_ptr<Transport> transport_;
  std::shared_ptr<c10d::Reducer> reducer_;
  bool is_first_ = true;
};

}  // namespace tessera
