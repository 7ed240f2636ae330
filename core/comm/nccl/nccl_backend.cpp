// Makes NCCL's groups. Built only with TESSERA_CUDA. No other file includes ProcessGroupNCCL.hpp.
#include <c10/util/env.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "core/comm/nccl/nccl_communicator.h"

namespace tessera::internal {
namespace {

// Added to the timeout of c10d's watchdog, which ends the process. Tessera's watchdog must act first, because its error
// names the rank and the operation.
constexpr auto kBehindOurs = std::chrono::minutes(2);

// Lets Tessera, not c10d, handle errors of a group. At an NCCL error, such as the loss of a peer, c10d's watchdog ends
// the process, unless asyncErrorHandling_ is NoHandling. With NoHandling, Tessera ends the group, with an error that
// names the rank. c10d's option is an environment variable for all groups, so this class accesses the protected member.
struct ErrorHandling : c10d::ProcessGroupNCCL {
  static void leave_to_tessera(c10d::Backend& group) {
    if (c10::utils::has_env("TORCH_NCCL_ASYNC_ERROR_HANDLING")) return;  // the user's choice
    static_cast<c10d::ProcessGroupNCCL&>(group).*(&ErrorHandling::asyncErrorHandling_) = c10d::NoHandling;
  }
};

class NcclGroups : public NcclBackends {
 public:
  c10::intrusive_ptr<c10d::Backend> make(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                         at::Device device, std::chrono::milliseconds timeout) override {
    auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options(timeout));
    group->setBoundDeviceId(device);
    ErrorHandling::leave_to_tessera(*group);
    group->eagerConnectSingleDevice(device);
    return group;
  }
  // Uses ncclCommSplit, which needs no exchange of addresses.
  c10::intrusive_ptr<c10d::Backend> split(c10d::Backend& parent, const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks, std::chrono::milliseconds timeout) override {
    auto group = parent.split(store, ranks, options(timeout));
    if (!group) return group;
    group->setBoundDeviceId(parent.getBoundDeviceId());
    ErrorHandling::leave_to_tessera(*group);
    return group;
  }
  c10::intrusive_ptr<c10d::Work> without_tensors(const c10::intrusive_ptr<c10d::Work>& work) override {
    using NcclWork = c10d::ProcessGroupNCCL::WorkNCCL;
    const auto* const own = dynamic_cast<const NcclWork*>(work.get());
    if (own == nullptr) return work;
    return c10::make_intrusive<NcclWork>(*own);  // this constructor leaves the results out
  }

 private:
  static c10::intrusive_ptr<c10d::ProcessGroupNCCL::Options> options(std::chrono::milliseconds timeout) {
    // c10d then runs this group's collectives on a stream of high priority.
    auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
    options->timeout = timeout + kBehindOurs;
    return options;
  }
};

}  // namespace

std::shared_ptr<NcclBackends> nccl_backends() { return std::make_shared<NcclGroups>(); }

}  // namespace tessera::internal
