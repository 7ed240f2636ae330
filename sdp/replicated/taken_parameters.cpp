#include "sdp/replicated/taken_parameters.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

namespace tessera::internal {
namespace {

struct Taker {
  const TakenParameters* wrapper;
  bool has_owners;
};

// Never destroyed: a wrapper may be static.
struct Takers {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, std::vector<Taker>> of;
  std::atomic<uint64_t> changes = 1;
};
Takers& takers() {
  static auto* const all = new Takers;
  return *all;
}

}  // namespace

TakenParameters::TakenParameters(const Binding& binding, bool has_owners) : binding_(binding), has_owners_(has_owners) {
  Takers& all = takers();
  std::lock_guard lock(all.mutex);
  for (const PlannedParameter& parameter : binding_.parameters())
    all.of[parameter.tensor.unsafeGetTensorImpl()].push_back({this, has_owners});
  ++all.changes;
}

TakenParameters::~TakenParameters() {
  Takers& all = takers();
  std::lock_guard lock(all.mutex);
  for (const PlannedParameter& parameter : binding_.parameters()) {
    const auto found = all.of.find(parameter.tensor.unsafeGetTensorImpl());
    std::erase_if(found->second, [this](const Taker& taker) { return taker.wrapper == this; });
    if (found->second.empty()) all.of.erase(found);
  }
  ++all.changes;
}

void TakenParameters::require_alone() {
  if (takers().changes.load(std::memory_order_acquire) != seen_changes_) look_for_others();
  for (size_t parameter : shared_)
    if (binding_.tensor(parameter).requires_grad())
      throw std::logic_error(binding_.label(parameter) +
                             " is a parameter of another wrapper, too, and its gradient would come to one of them, at "
                             "one owner: wrap one module that has all parameters, with one optimizer");
}

void TakenParameters::look_for_others() {
  Takers& all = takers();
  std::lock_guard lock(all.mutex);
  seen_changes_ = all.changes;
  shared_.clear();
  for (size_t i = 0; i < binding_.parameters().size(); ++i) {
    const std::vector<Taker>& of_parameter = all.of.at(binding_.tensor(i).unsafeGetTensorImpl());
    const bool is_lost = std::ranges::any_of(of_parameter, [this](const Taker& taker) {
      return taker.wrapper != this && (has_owners_ || taker.has_owners);
    });
    if (is_lost) shared_.push_back(i);
  }
}

}  // namespace tessera::internal
