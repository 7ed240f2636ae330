#include "sdp/replicated/copy_watch.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/comm/agreement.h"
#include "core/comm/fingerprint.h"

namespace tessera::internal {
namespace {

constexpr char kGradInstead[] =
    "a backward pass which gave no rank a gradient: torch::autograd::grad() gives each rank the gradients of its own "
    "rows, which the wrapper never sees; call backward(), after which .grad is the average over the ranks";

// What came before, and what to do instead; in the order of Since.
constexpr const char* kAfter[] = {
    kGradInstead,
    "a backward under no_sync(): gradients there are this rank's own sums, so run the last backward before a step "
    "outside it",
    "a backward, by something else than the optimizer's step(): an average is at its owner alone, and only the "
    "optimizer that the wrapper was given tells the others"};

constexpr char kChangedValues[] = "what the values are that have changed past the wrapper";

uint64_t fingerprint_of(const at::Tensor& tensor) {
  const at::Tensor bytes = tensor.detach().cpu().contiguous();
  return Fingerprint().add(std::string_view(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes())).value();
}

}  // namespace

CopyWatch::Seen CopyWatch::look(size_t parameter) const {
  const at::Tensor& tensor = binding_.tensor(parameter);
  Seen seen{tensor._version(), nullptr, 0};
  if (const at::Tensor& gradient = tensor.grad(); gradient.defined()) {
    seen.gradient = gradient.unsafeGetTensorImpl();
    seen.gradient_version = gradient._version();
  }
  return seen;
}

void CopyWatch::note(Since since) {
  since_ = since;
  are_scaled_ = false;
  seen_.clear();
  for (size_t i = 0; i < binding_.parameters().size(); ++i) seen_.push_back(look(i));
  samples_ = copies_are_equal_ ? ValueSamples::of(binding_.parameters()) : ValueSamples();
}

void CopyWatch::require_no_gradient_by_hand() const {
  if (since_ != Since::kNoGradient) return;
  for (size_t i = 0; i < seen_.size(); ++i) {
    const Seen now = look(i);
    if (now.gradient == nullptr) continue;
    if (now.gradient == seen_[i].gradient && (are_scaled_ || now.gradient_version == seen_[i].gradient_version))
      continue;
    if (binding_.tensor(i).grad().count_nonzero().item<int64_t>() == 0) continue;  // cleared
    throw std::logic_error("a step with a gradient of " + binding_.label(i) + " that was put there after " +
                           kGradInstead);
  }
}

void CopyWatch::require_alike(Communicator& comm) {
  late_reports_.look();
  if (seen_.empty() || !copies_are_equal_) return;
  bool has_changed = false;
  // Of a frozen one values count alone: another model's optimizer, which has it too, writes the same to some ranks'.
  for (size_t i = 0; i < seen_.size(); ++i)
    has_changed = has_changed || (binding_.tensor(i).requires_grad() && look(i).version != seen_[i].version);
  if (!samples_.is_on_device()) has_changed = has_changed || ValueSamples::of(binding_.parameters()) != samples_;
  if (has_changed)
    compare_now(comm);
  else if (samples_.is_on_device())
    compare_later(comm);
}

// Gradients stay as they were noted.
void CopyWatch::look_again() {
  for (size_t i = 0; i < seen_.size(); ++i) seen_[i].version = look(i).version;
  samples_ = ValueSamples::of(binding_.parameters());
}

void CopyWatch::compare_now(Communicator& comm) {
  std::string own;
  for (size_t i = 0; i < seen_.size(); ++i) {
    const uint64_t value = fingerprint_of(binding_.tensor(i));
    own.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  look_again();
  const auto all = gather_texts(comm, own, kChangedValues);
  for (size_t i = 0; i < seen_.size(); ++i) {
    const auto differs = [&](const std::string& rank) { return rank.compare(i * 8, 8, all[0], i * 8, 8) != 0; };
    const auto found = std::find_if(all.begin(), all.end(), differs);
    if (found != all.end()) refuse(i, {0, static_cast<int>(found - all.begin())}, since_);
  }
}

// A step of SGD on a device raises no version, and the host is not to wait for values. So the device compares them, and
// the host looks at what came of it in one of the next forwards.
void CopyWatch::compare_later(Communicator& comm) {
  const at::Tensor changed = ValueSamples::of(binding_.parameters()).where_other_than(samples_);
  late_reports_.add(ReducedReport(comm, 0, {}, kChangedValues, changed), [this, since = since_](ReducedReport& report) {
    if (const auto unlike = report.first_unlike()) refuse(unlike->number, unlike->ranks, since);
  });
}

void CopyWatch::refuse(size_t parameter, std::pair<int, int> ranks, Since since) const {
  throw std::logic_error(binding_.label(parameter) + " has other values on rank " + std::to_string(ranks.first) +
                         " than on rank " + std::to_string(ranks.second) + ": it was changed after " +
                         kAfter[static_cast<size_t>(since)]);
}

}  // namespace tessera::internal
