// Simulates NCCL between threads, with the interface of ProcessGroupNCCL.
//
// A group has its own stream. A collective begins after the work already given to the current stream, and waits for the
// matching collectives of all ranks. wait() blocks the current stream, not the host. Ranks match collectives by their
// order of issue. If the collectives or their numbers of elements differ, reports this, and hangs. abort() ends only
// this rank's kernels. The destructor calls abort(), unless the group has ended. Reductions add in rank order, so
// results are bitwise equal to Tessera's on gloo; with Settings::sums_by_ring, they add in the order of a ring.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/accelerator/streams.h"

namespace tessera::accelerator {

// The state that the ranks of a group share.
class SimulatedGroup;

// Whether the ranks of new groups are processes. Such ranks exchange the tensors of collectives as bytes through their
// store, so vector clocks do not find races between processes.
inline std::atomic<bool> groups_span_processes = false;

class Backend final : public c10d::Backend {
 public:
  // Is collective. The ranks meet through `store`, which no other group may use.
  Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, at::Device device);
  ~Backend() override;
  const std::string getBackendName() const override { return "simulated nccl"; }

  using Work = c10::intrusive_ptr<c10d::Work>;
  Work _allgather_base(at::Tensor& full, at::Tensor& own, const c10d::AllgatherOptions& options) override;
  Work allgather(std::vector<std::vector<at::Tensor>>& parts, std::vector<at::Tensor>& own,
                 const c10d::AllgatherOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& own, at::Tensor& full, const c10d::ReduceScatterOptions& options) override;
  Work reduce_scatter(std::vector<at::Tensor>& own, std::vector<std::vector<at::Tensor>>& parts,
                      const c10d::ReduceScatterOptions& options) override;
  Work allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override;
  Work broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override;
  Work reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_counts,
                     std::vector<int64_t>& input_counts, const c10d::AllToAllOptions& options) override;
  Work alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                const c10d::AllToAllOptions& options) override;
  // Returns a group of `ranks`, or null on other ranks. Is collective over all ranks of this group.
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;
  bool supportsSplitting() const override { return true; }

  // Allocates from a pool that is registered with this group.
  at::Tensor allocateTensor(long numel, at::TensorOptions options) override;  // NOLINT(google-runtime-int): c10d's
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }

  void abort() override;
  void shutdown() override;

 private:
  // The input tensors of each rank, at addresses that kernels may access.
  using Inputs = std::vector<std::vector<at::Tensor>>;
  // Computes the outputs from the inputs of all ranks. all_have_read() blocks until no rank needs others' inputs.
  using Kernel = std::function<void(const Inputs& inputs, const std::function<bool()>& all_have_read)>;
  Work start(const std::string& name, int64_t numel, const std::vector<at::Tensor>& inputs,
             const std::vector<at::Tensor>& outputs, Kernel kernel);

  static int64_t next_registration();
  uint64_t next_sequence();

  const at::Device device_;
  const bool owns_stream_;
  const int stream_;
  const std::shared_ptr<SimulatedGroup> group_;
  const int64_t registration_ = next_registration();
  uint64_t sequence_ = 0;
  std::optional<uint64_t> late_;  // the next collective's number, which the previous one skipped (kCollectiveInTurn)
  bool ended_ = false;
};

// Returns a Work of the same collective that does not own its tensors.
c10::intrusive_ptr<c10d::Work> without_tensors(const c10::intrusive_ptr<c10d::Work>& work);

// Frees the tensors that c10d keeps for completed collectives without a wait().
void release_collectives_tensors();

}  // namespace tessera::accelerator
