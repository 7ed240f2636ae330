#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// One rank of a group of any size of which no other rank exists: operations are written down by the thread's current
// Recorder, as is when they are waited for, and move nothing. They answer as if every other rank had the same values as
// this one, which is what agreements, reports and counts of ranks need: a gathered tensor has this rank's part in every
// place of its length (zeros elsewhere), a sum is `size()` times the value. Floating-point results whose values mean
// nothing on this rank mean nothing afterwards either. traffic() counts what a rank has to send at least: each element
// once to each rank that needs it, or, reduced, once up and once down.
//
// What needs other ranks' true values throws std::invalid_argument by name: split() by a color, since only split_by()
// knows everybody's. abort() is noted, and every later operation throws CommError with its reason.
class CountingCommunicator : public Communicator {
 public:
  // `ranks_sharing_memory`: as DryRunOptions has it. Throws std::invalid_argument unless 0 <= rank < size.
  static std::shared_ptr<CountingCommunicator> make(int rank, int size, int ranks_sharing_memory = 0);

  bool moves_only_when_awaited(int64_t full_numel) const override;

 protected:
  Pending start(Collective collective) override;
  bool takes_pieces() const override { return true; }  // as gloo does
  void abort_this(const std::string& reason) noexcept override;
  std::shared_ptr<Communicator> make_part(const std::string& name, const std::vector<int>& members,
                                          int position) override;
  void require_other_ranks(std::string_view what) const override;

 private:
  // `members` are numbers of ranks in the world; null: all of them.
  CountingCommunicator(int rank, int size, std::shared_ptr<const std::vector<int>> members, int ranks_sharing_memory);

  void count_as_sent(const Collective& collective, int64_t bytes);
  void fill(const Collective& collective) const;

  const std::shared_ptr<const std::vector<int>> members_;
  const int ranks_sharing_memory_;
  bool shares_memory_ = false;  // all members do
  std::string aborted_;
};

}  // namespace tessera::internal
