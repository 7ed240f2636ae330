#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// A communicator for one rank of a simulated group of any size. There are no other ranks: it moves no data, and records
// operations and waits in the thread's current Recorder. Agreements and counts need results, so results are as if every
// rank had this rank's values. A gathered tensor repeats this rank's part in the place of each rank, with zeros at the
// end of longer places. A sum is size() times the value. If a tensor of an operation is void, its results are void.
// traffic() counts the least bytes that a rank can send: each element once to each rank that needs it, and twice in an
// all-reduce.
//
// Throws std::invalid_argument for operations that need the values of other ranks: checkpoints, and split() by color
// (use split_by()). After abort(), every operation throws CommError with the reason of the abort.
class CountingCommunicator : public Communicator {
 public:
  // `ranks_sharing_memory`: see DryRunOptions. Throws std::invalid_argument unless 0 <= rank < size.
  static std::shared_ptr<CountingCommunicator> make(int rank, int size, int ranks_sharing_memory = 0);

  bool is_lazy(int64_t full_numel) const override;
  bool takes_pieces() const override { return true; }  // as the gloo backend does
  void require_values(std::string_view what) const override;

 protected:
  Pending start(Collective collective) override;
  void abort_this(const std::string& reason) noexcept override;
  std::shared_ptr<Communicator> make_part(const std::string& name, const std::vector<int>& members,
                                          int position) override;

 private:
  // `members`: the group's ranks in the world; null: all ranks of the world.
  CountingCommunicator(int rank, int size, std::shared_ptr<const std::vector<int>> members, int ranks_sharing_memory);

  void count_as_sent(const Collective& collective, int64_t bytes);
  void fill(const Collective& collective) const;

  const std::shared_ptr<const std::vector<int>> members_;
  const int ranks_sharing_memory_;
  bool shares_memory_ = false;  // whether all members share memory
  std::string aborted_;
};

}  // namespace tessera::internal
