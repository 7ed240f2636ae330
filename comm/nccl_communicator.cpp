// The NCCL backend: the only file that includes ProcessGroupNCCL.hpp, built with TESSERA_CUDA.
//
// NCCL runs operations in the order in which they were started on a communicator, and all ranks
// must agree on it. Gathers and reductions need not keep step with each other (a rank may reduce a
// unit late that it did not use), so each kind has a communicator and a stream of its own.
// Waiting orders the current stream after the operation; it does not block the host. A peer that
// does not come is found by ProcessGroupNCCL's watchdog after the group's timeout, which ends the
// process, as torch does by default (TORCH_NCCL_ASYNC_ERROR_HANDLING).
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "tessera/comm/backend_all_reduce.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/communicator.h"

namespace tessera {
namespace {

c10d::ReduceOp nccl_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kAverage:
      return c10d::ReduceOp::AVG;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
  }
  throw std::invalid_argument("unknown ReduceOp");
}

class NcclOperation : public Pending::Operation {
 public:
  NcclOperation(c10::intrusive_ptr<c10d::Work> work, std::string description, std::vector<at::Tensor> tensors)
      : work_(std::move(work)), description_(std::move(description)), tensors_(std::move(tensors)) {}

  void finish() override {
    try {
      work_->wait();
    } catch (const std::exception& error) {
      throw CommError(description_ + " failed: " + error.what());
    }
    tensors_.clear();  // the current stream is ordered after their last use
  }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
  const std::string description_;
  std::vector<at::Tensor> tensors_;
};

class NcclCommunicator : public Communicator, public BackendCollectives {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroupNCCL>;

  NcclCommunicator(c10::intrusive_ptr<c10d::Store> store, Group gathers, Group reductions, int rank, int size,
                   at::Device device, std::chrono::milliseconds timeout)
      : Communicator(rank, size, device, timeout),
        store_(std::move(store)),
        gathers_(std::move(gathers)),
        reductions_(std::move(reductions)) {}

  void abort_this(const std::string&) noexcept override {
    try {
      gathers_->abort();
      reductions_->abort();
    } catch (const std::exception&) {
      // It is broken already, which is what was asked for.
    }
  }

  Pending start_backend_all_reduce(at::Tensor tensor, std::string what) override {
    return start_all_reduce(std::move(tensor), ReduceOp::kSum, std::move(what));
  }

 protected:
  // Tessera starts operations of the group and of its parts in one order on all ranks, which NCCL
  // needs of communicators that are used at the same time.
  std::shared_ptr<Communicator> make_part(const std::string& name, int rank, int size) override {
    return make_nccl_communicator(c10::make_intrusive<c10d::PrefixStore>(name, store_), rank, size, device(),
                                  timeout());
  }

  Pending start_all_gather(at::Tensor full, at::Tensor shard, Counts counts, std::string what) override {
    count_sent(static_cast<int64_t>(shard.nbytes()) * (size() - 1));
    return start("all-gather", what, {full, shard}, [&] {
      if (is_even(counts)) return gathers_->_allgather_base(full, shard);
      std::vector<std::vector<at::Tensor>> parts{full.split_with_sizes(counts)};
      std::vector<at::Tensor> own{shard};
      return gathers_->allgather(parts, own);
    });
  }

  Pending start_reduce_scatter(at::Tensor shard, at::Tensor full, ReduceOp op, Counts counts,
                               std::string what) override {
    count_sent(static_cast<int64_t>(full.nbytes() - shard.nbytes()));
    return start("reduce-scatter", what, {full, shard}, [&] {
      c10d::ReduceScatterOptions options;
      options.reduceOp = nccl_op(op);
      if (is_even(counts)) return reductions_->_reduce_scatter_base(shard, full, options);
      std::vector<std::vector<at::Tensor>> parts{full.split_with_sizes(counts)};
      std::vector<at::Tensor> own{shard};
      return reductions_->reduce_scatter(own, parts, options);
    });
  }

  Pending start_all_reduce(at::Tensor tensor, ReduceOp op, std::string what) override {
    count_sent(2 * static_cast<int64_t>(tensor.nbytes()) * (size() - 1) / size());
    return start("all-reduce", what, {tensor}, [&] {
      c10d::AllreduceOptions options;
      options.reduceOp = nccl_op(op);
      std::vector<at::Tensor> tensors{tensor};
      return reductions_->allreduce(tensors, options);
    });
  }

  Pending start_broadcast(at::Tensor tensor, int root, std::string what) override {
    if (rank() == root) count_sent(static_cast<int64_t>(tensor.nbytes()));
    return start("broadcast", what, {tensor}, [&] {
      c10d::BroadcastOptions options;
      options.rootRank = root;
      std::vector<at::Tensor> tensors{tensor};
      return reductions_->broadcast(tensors, options);
    });
  }

  // NCCL writes to the root's tensor alone; the others' are inputs.
  Pending start_reduce(at::Tensor tensor, int root, ReduceOp op, std::string what) override {
    if (rank() != root) count_sent(static_cast<int64_t>(tensor.nbytes()));
    return start("reduce", what, {tensor}, [&] {
      c10d::ReduceOptions options;
      options.rootRank = root;
      options.reduceOp = nccl_op(op);
      std::vector<at::Tensor> tensors{tensor};
      return reductions_->reduce(tensors, options);
    });
  }

  Pending start_scatter(at::Tensor shard, at::Tensor full, int root, Counts counts, std::string what) override {
    if (rank() == root) count_sent(static_cast<int64_t>(full.nbytes() - shard.nbytes()));
    return start("scatter", what, {shard, full}, [&] {
      c10d::ScatterOptions options;
      options.rootRank = root;
      std::vector<at::Tensor> own{shard};
      std::vector<std::vector<at::Tensor>> parts;
      if (rank() == root) parts.push_back(full.split_with_sizes(counts));
      return reductions_->scatter(own, parts, options);
    });
  }

 private:
  static bool is_even(const Counts& counts) {
    return std::all_of(counts.begin(), counts.end(), [&](int64_t count) { return count == counts[0]; });
  }

  template <class Launch>
  Pending start(const char* name, const std::string& what, std::vector<at::Tensor> tensors, Launch launch) {
    std::ostringstream description;
    description << name << (what.empty() ? "" : " of ") << what << " on rank " << rank() << " of " << size()
                << (label().empty() ? "" : " in the group of ") << label();
    c10::DeviceGuard guard(device());
    try {
      return Pending(std::make_unique<NcclOperation>(launch(), description.str(), std::move(tensors)));
    } catch (const std::exception& error) {
      throw CommError(description.str() + " could not be started: " + error.what());
    }
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const Group gathers_;
  const Group reductions_;
};

}  // namespace

std::shared_ptr<Communicator> make_nccl_communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                     at::Device device, std::chrono::milliseconds timeout) {
  if (!device.is_cuda() || !device.has_index())
    throw std::invalid_argument("rank " + std::to_string(rank) + ": the NCCL backend was given device " + device.str() +
                                ", expected a CUDA device with an index");
  c10::DeviceGuard guard(device);
  auto make = [&](const char* name) {
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = timeout;
    return c10::make_intrusive<c10d::ProcessGroupNCCL>(c10::make_intrusive<c10d::PrefixStore>(name, store), rank, size,
                                                       options);
  };
  try {
    return std::make_shared<NcclCommunicator>(store, make("gathers"), make("reductions"), rank, size, device, timeout);
  } catch (const std::exception& error) {
    std::ostringstream text;
    text << "rank " << rank << " of " << size << " on " << device << " could not join the NCCL group: " << error.what();
    throw CommError(text.str());
  }
}

}  // namespace tessera
