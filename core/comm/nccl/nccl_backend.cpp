// Makes NCCL's groups. Built only with TESSERA_CUDA. No other file includes ProcessGroupNCCL.hpp.
#include <c10/util/env.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "core/comm/nccl/nccl_communicator.h"

namespace tessera::internal {
namespace {

// Added to the timeout of c10d's watchdog, which ends the process. Tessera's watchdog must act first, because its error
// names the rank and the operation.
constexpr auto kBehindOurs = std::chrono::minutes(2);

using Monitor = c10d::ProcessGroupNCCL::HeartbeatMonitor;
// Gives access to a private member: C++ does not check access in an explicit instantiation.
int& dump_timeout_of(Monitor& monitor);
template <int Monitor::*kMember>
struct DumpTimeout {
  friend int& dump_timeout_of(Monitor& monitor) { return monitor.*kMember; }
};
template struct DumpTimeout<&Monitor::waitTimeoutDumpInMilSec_>;

// Note [Errors of NCCL]. At an NCCL error, such as the loss of a peer, c10d's threads of a group do the following.
// These actions would prevent Tessera from ending the group with an error that names the rank:
//
// * The watchdog ends the process, unless asyncErrorHandling_ is NoHandling.
// * Before that, the watchdog waits for four dump timeouts, one minute in total. It holds a lock that the group's next
//   collective takes, and the group's destructor waits for this thread.
// * The monitor dumps c10d's records, waits for eight minutes, and ends the process. The destructor waits for this
//   thread, too.
//
// c10d's options are environment variables for all groups, so this class changes the members of one group.
struct ErrorHandling : c10d::ProcessGroupNCCL {
  static void leave_to_tessera(c10d::Backend& group) {
    if (c10::utils::has_env("TORCH_NCCL_ASYNC_ERROR_HANDLING")) return;  // the user has chosen c10d's handling
    auto& of_nccl = static_cast<c10d::ProcessGroupNCCL&>(group);
    of_nccl.*(&ErrorHandling::asyncErrorHandling_) = c10d::NoHandling;
    Monitor& monitor = *(of_nccl.*(&ErrorHandling::heartbeatMonitor_));
    dump_timeout_of(monitor) = 0;
    monitor.stop();
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
    return c10::make_intrusive<NcclWork>(*own);  // this copy constructor omits the results
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
