#pragma once

#include <cstdint>
#include <vector>

#include "core/gradients/binding.h"

namespace tessera::internal {

// What a wrapper takes the gradients of, among all such wrappers of the process. Of two that have a parameter in common
// one gets the gradient: right where every rank has the average, lost where it is at an owner whom the other's
// optimizer does not ask.
class TakenParameters {
 public:
  // `binding` outlives it. `has_owners`: a gradient comes to one rank alone.
  TakenParameters(const Binding& binding, bool has_owners);
  ~TakenParameters();
  TakenParameters(const TakenParameters&) = delete;
  TakenParameters& operator=(const TakenParameters&) = delete;

  // Throws std::logic_error, naming it, for a trained parameter that another living wrapper takes, too, if either has
  // owners. Of the thread that trains.
  void require_alone();

 private:
  void look_for_others();

  const Binding& binding_;
  const bool has_owners_;
  uint64_t seen_changes_ = 0;   // of all wrappers, when this one looked last
  std::vector<size_t> shared_;  // parameters, as of then
};

}  // namespace tessera::internal
