#pragma once

#include <memory>
#include <utility>
#include <variant>

#include "fsdp/fully_sharded_data_parallel.h"
#include "sdp/replicated/distributed_data_parallel.h"
#include "sdp/sharded_data_parallel.h"

namespace tessera {

// The wrapper of one of the stages, which is known when the program runs. Empty until it is made.
template <class Holder>
class StageWrapper {
 public:
  // The one that these options are of.
  void make(const Holder& module, std::shared_ptr<Communicator> comm, const DdpOptions& options) {
    wrapper_.template emplace<Ddp>(module, std::move(comm), options);
  }
  void make(const Holder& module, ShardedOptimizer& optimizer, std::shared_ptr<Communicator> comm,
            const SdpOptions& options) {
    wrapper_.template emplace<Sdp>(module, optimizer, std::move(comm), options);
  }
  void make(const Holder& module, std::shared_ptr<Communicator> comm, const FsdpOptions& options) {
    wrapper_.template emplace<Fsdp>(module, std::move(comm), options);
  }

  // What act(wrapper) returns, the same type for each.
  template <class Act>
  auto with(Act act) {
    if (auto* ddp = std::get_if<Ddp>(&wrapper_)) return act(*ddp);
    if (auto* sdp = std::get_if<Sdp>(&wrapper_)) return act(*sdp);
    return act(std::get<Fsdp>(wrapper_));
  }
  // What all of them have.
  DataParallel& any() {
    return *with([](auto& wrapper) -> DataParallel* { return &wrapper; });
  }
  const DataParallel& any() const { return const_cast<StageWrapper*>(this)->any(); }

 private:
  using Ddp = DistributedDataParallel<Holder>;
  using Sdp = ShardedDataParallel<Holder>;
  using Fsdp = FullyShardedDataParallel<Holder>;
  std::variant<std::monostate, Ddp, Sdp, Fsdp> wrapper_;
};

}  // namespace tessera
