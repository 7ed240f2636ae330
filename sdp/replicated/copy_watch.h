#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <tessera/communicator.h>
#include "core/comm/reduced_report.h"
#include "core/gradients/binding.h"
#include "sdp/replicated/value_samples.h"

namespace tessera::internal {

// Ranks that hold whole parameters hold the same ones, as long as steps take averages. Some do not, past the wrapper:
// after torch::autograd::grad(), or a backward under no_sync(), each rank has the gradients of its own rows, and under
// ShardedDataParallel an average is at its owner alone. (PyTorch's DistributedDataParallel says that it does not work
// with autograd.grad.) All of that may be right, for gradients of inputs, say; so it is noted, and where parameters
// change before the next average the ranks compare them.
class CopyWatch {
 public:
  enum class Since {
    // A backward pass from the wrapper's outputs gave no parameter of any rank a gradient, but maybe its caller one, of
    // this rank's rows.
    kNoGradient,
    kOwnSums,       // gradients were made under no_sync()
    kOwnersAverage  // averages came to their owners
  };

  // `copies_are_equal`: all ranks have the same bits, as long as nobody does this; else nothing is compared.
  CopyWatch(const Binding& binding, bool copies_are_equal) : binding_(binding), copies_are_equal_(copies_are_equal) {}

  // The same on all ranks. Parameters and gradients are remembered as they are.
  void note(Since since);
  // The same, unless that is what was noted last.
  void note_once(Since since) {
    if (seen_.empty() || since_ != since) note(since);
  }
  // Every rank has the average.
  void forget() {
    seen_.clear();
    samples_ = {};
  }
  // Gradients that are there are clipped: another version of one is not put there by hand.
  void gradients_are_scaled() { are_scaled_ = true; }
  // Of an optimizer that knows who owns a parameter: its owner's values will be everybody's, and averages stay where
  // they are.
  void step_begins() {
    if (seen_.empty() || since_ != Since::kOwnersAverage) return;
    forget();
    is_in_step_ = true;
  }
  void step_ends() {
    if (std::exchange(is_in_step_, false)) note(Since::kOwnersAverage);
  }

  // For a step of an optimizer that knows the wrapper. Throws std::logic_error, naming the parameter, for a gradient
  // that was put there after a pass that gave none.
  void require_no_gradient_by_hand() const;

  // For a forward that is trained with. Where parameters have changed since, it is collective: throws std::logic_error
  // on all ranks, naming the first that differs. On a device, of a change that raised no version, only a later call
  // does, once the ranks' numbers have come without the host's waiting.
  void require_alike(Communicator& comm);

 private:
  struct Seen {
    int64_t version;                  // of the parameter
    const c10::TensorImpl* gradient;  // null: none
    int64_t gradient_version;
  };
  Seen look(size_t parameter) const;
  void look_again();
  void compare_now(Communicator& comm);
  void compare_later(Communicator& comm);
  [[noreturn]] void refuse(size_t parameter, std::pair<int, int> ranks, Since since) const;

  const Binding& binding_;
  const bool copies_are_equal_;
  Since since_ = Since::kNoGradient;
  std::vector<Seen> seen_;    // empty: nothing is noted
  bool are_scaled_ = false;   // since then
  bool is_in_step_ = false;   // of an optimizer whose owners have averages
  ValueSamples samples_;      // the same, of values
  LateReports late_reports_;  // of forwards before, on a device
};

}  // namespace tessera::internal
