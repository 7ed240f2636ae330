#include "tessera/comm/process_group.h"

#include <stdexcept>
#include <utility>

namespace tessera {
namespace {

class PendingWork : public c10d::Work {
 public:
  PendingWork(int rank, c10d::OpType type, Pending pending) : c10d::Work(rank, type), pending_(std::move(pending)) {}
  bool isCompleted() override { return pending_.done(); }
  bool wait(std::chrono::milliseconds) override {  // the communicator's timeout holds
    pending_.wait();
    return true;
  }

 private:
  Pending pending_;
};

ReduceOp our_op(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAverage;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    default:
      throw std::invalid_argument("an all-reduce with an operation other than sum, average, min or max");
  }
}

class CommunicatorBackend : public c10d::Backend {
 public:
  explicit CommunicatorBackend(std::shared_ptr<Communicator> comm)
      : c10d::Backend(comm->rank(), comm->size()), comm_(std::move(comm)) {}

  const std::string getBackendName() const override { return "tessera"; }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return work(c10d::OpType::BROADCAST,
                comm_->broadcast(only(tensors, "broadcast"), static_cast<int>(options.rootRank), "a process group"));
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return work(c10d::OpType::ALLREDUCE,
                comm_->all_reduce(only(tensors, "all-reduce"), our_op(options.reduceOp), "a process group"));
  }

 private:
  static at::Tensor only(const std::vector<at::Tensor>& tensors, const char* operation) {
    if (tensors.size() != 1)
      throw std::invalid_argument(std::string("a process group's ") + operation + " of " +
                                  std::to_string(tensors.size()) + " tensors, expected 1");
    return tensors[0];
  }
  c10::intrusive_ptr<c10d::Work> work(c10d::OpType type, Pending pending) {
    return c10::make_intrusive<PendingWork>(getRank(), type, std::move(pending));
  }

  const std::shared_ptr<Communicator> comm_;
};

}  // namespace

c10::intrusive_ptr<c10d::ProcessGroup> process_group_over(std::shared_ptr<Communicator> comm) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(comm->rank(), comm->size());
  const auto device = comm->device().type();
  group->setBackend(device, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::make_intrusive<CommunicatorBackend>(std::move(comm)));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

Pending backend_all_reduce(Communicator& comm, at::Tensor tensor, std::string_view what) {
  if (!tensor.defined() || tensor.device() != comm.device() || !tensor.is_contiguous())
    throw std::invalid_argument("backend all-reduce on rank " + std::to_string(comm.rank()) +
                                ": expected a contiguous tensor on " + comm.device().str());
  if (comm.size() == 1) return {};
  auto* backend = dynamic_cast<BackendCollectives*>(&comm);
  if (backend == nullptr) throw std::invalid_argument("this communicator's backend has no all-reduce of its own");
  return backend->start_backend_all_reduce(tensor.detach().view({-1}), std::string(what));
}

}  // namespace tessera
