#include "tessera/sdp/copy_watch.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "tessera/comm/agreement.h"
#include "tessera/comm/fingerprint.h"

namespace tessera {
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

uint64_t sample_of(const at::Tensor& tensor) {
  uint64_t sample = 0;
  if (!tensor.is_cpu() || tensor.numel() == 0) return sample;
  const int64_t place = tensor.is_non_overlapping_and_dense() ? tensor.numel() / 2 : 0;
  const auto* values = static_cast<const char*>(tensor.const_data_ptr());
  std::memcpy(&sample, values + place * tensor.element_size(), std::min<size_t>(sizeof(sample), tensor.element_size()));
  return sample;
}

uint64_t fingerprint_of(const at::Tensor& tensor) {
  const at::Tensor bytes = tensor.detach().cpu().contiguous();
  return Fingerprint().add(std::string_view(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes())).value();
}

}  // namespace

CopyWatch::Value CopyWatch::value_of(const at::Tensor& tensor) {
  return tensor.is_cpu() ? sample_of(tensor) : static_cast<Value>(tensor._version());
}

CopyWatch::Seen CopyWatch::look(size_t parameter) const {
  const at::Tensor& tensor = binding_.tensor(parameter);
  Seen seen{tensor._version(), sample_of(tensor), nullptr, 0};
  if (const at::Tensor& gradient = tensor.grad(); gradient.defined()) {
    seen.gradient = gradient.unsafeGetTensorImpl();
    seen.gradient_version = gradient._version();
  }
  return seen;
}

bool CopyWatch::has_changed(size_t parameter) const {
  const Seen now = look(parameter);
  return now.version != seen_[parameter].version || now.sample != seen_[parameter].sample;
}

void CopyWatch::note(Since since) {
  since_ = since;
  seen_.clear();
  for (size_t i = 0; i < binding_.parameters().size(); ++i) seen_.push_back(look(i));
}

void CopyWatch::require_no_gradient_by_hand() const {
  if (since_ != Since::kNoGradient) return;
  for (size_t i = 0; i < seen_.size(); ++i) {
    const Seen now = look(i);
    if (now.gradient == nullptr) continue;
    if (now.gradient == seen_[i].gradient && now.gradient_version == seen_[i].gradient_version) continue;
    if (binding_.tensor(i).grad().count_nonzero().item<int64_t>() == 0) continue;  // cleared
    throw std::logic_error("a step with a gradient of " + binding_.label(i) + " that was put there after " +
                           kGradInstead);
  }
}

void CopyWatch::require_alike(Communicator& comm) {
  size_t first = 0;
  while (first < seen_.size() && !has_changed(first)) ++first;
  if (first == seen_.size() || !copies_are_equal_) return;
  std::string own;
  for (size_t i = 0; i < seen_.size(); ++i) {
    const uint64_t value = fingerprint_of(binding_.tensor(i));
    own.append(reinterpret_cast<const char*>(&value), sizeof(value));
    const Seen now = look(i);
    seen_[i].version = now.version;
    seen_[i].sample = now.sample;
  }
  const auto all = gather_texts(comm, own, "what the values are that have changed past the wrapper");
  for (size_t i = 0; i < seen_.size(); ++i) {
    const auto differs = [&](const std::string& rank) { return rank.compare(i * 8, 8, all[0], i * 8, 8) != 0; };
    const auto found = std::find_if(all.begin(), all.end(), differs);
    if (found != all.end())
      throw std::logic_error(binding_.label(i) + " has other values on rank 0 than on rank " +
                             std::to_string(found - all.begin()) + ": it was changed after " +
                             kAfter[static_cast<size_t>(since_)]);
  }
}

}  // namespace tessera
