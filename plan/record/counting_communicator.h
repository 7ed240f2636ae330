#pragma once

#include <memory>
#include <string>
#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// A communicator for one rank of a simulated group of any size, without other ranks. Moves no data between ranks, and
// records operations and waits in the thread's current Recorder. Computes results as if every rank had this rank's
// values, because the wrappers read some results. An all-gather copies this rank's part to each rank's part of the
// result. If a part of the result is longer, the rest of it is unchanged. A sum is size() times the value. If a tensor
// of an operation is void (see Recorder), the results are void. traffic() counts the minimum number of bytes that a
// rank must send. It counts each element once for each rank that needs the element, and twice in an all-reduce.
//
// Throws std::invalid_argument for operations that need the values of other ranks: checkpoints, and split() by color
// (use split_by()). After abort(), every operation throws CommError with the reason of the abort.
class CountingCommunicator : public Communicator {
 public:
  // See DryRunOptions. Throws std::invalid_argument unless 0 <= rank < size and ranks_sharing_memory >= 0.
  static std::shared_ptr<CountingCommunicator> make(int rank, int size, int ranks_sharing_memory = 0);

  bool is_lazy(int64_t full_numel) const override;
  bool takes_pieces() const override { return true; }  // same as the gloo backend
  void require_values(std::string_view what) const override;

 protected:
  Pending start(Collective collective) override;
  void abort_this(const std::string& reason) noexcept override;
  std::shared_ptr<Communicator> make_part(const std::string& name, const std::vector<int>& members,
                                          int position) override;

 private:
  // `members` has the world ranks of the group's members. Null means all ranks of the world.
  CountingCommunicator(int rank, int size, std::shared_ptr<const std::vector<int>> members, int ranks_sharing_memory);

  void fill(const Collective& collective) const;

  const std::shared_ptr<const std::vector<int>> members_;
  const int ranks_sharing_memory_;
  bool shares_memory_ = false;  // whether all members share memory
  std::string aborted_;
};

}  // namespace tessera::internal
