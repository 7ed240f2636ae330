#include "tessera/optim/host_adam.h"

#include <ATen/Parallel.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tessera/flat/shard_mark.h"
#include "tessera/memory/without_data.h"
#include "tessera/optim/adam_kernel.h"
#include "tessera/optim/adam_update.h"
#include "tessera/paging/disk_pager.h"

namespace tessera {
namespace {

// What one thread takes at a time: enough to be worth a call, little enough to share evenly.
constexpr int64_t kPartNumel = 1 << 16;

std::string problem_of(const at::Tensor& parameter) {
  if (has_lost_its_pager(parameter)) return "lay on a disk with a wrapper that no longer exists";
  if (!parameter.device().is_cpu()) return "is on " + parameter.device().str() + ", expected host memory";
  return "";
}

// The state of a parameter on a disk lies there, too.
at::Tensor zeros_beside(const at::Tensor& parameter) {
  DiskPager* disk = DiskPager::of(parameter);
  if (disk == nullptr || parameter.numel() == 0) return at::zeros_like(parameter);
  return disk->make(parameter.sizes(), parameter.strides(), parameter.scalar_type(),
                    "the state of " + page_of(parameter)->name());
}

at::Tensor placed_as(const at::Tensor& state, const at::Tensor& parameter) {
  if (parameter.numel() == 0 || DiskPager::of(parameter) == nullptr) return laid_out_as(state, parameter);
  if (DiskPager::of(state) == DiskPager::of(parameter)) return state;
  return zeros_beside(parameter).copy_(state);  // from a checkpoint, say
}

constexpr AdamPlacement kInHostMemory{"a host optimizer", &problem_of, &zeros_beside, &placed_as};

// One call's work: what must stay alive for it, and the parts that threads share.
struct Pass {
  std::vector<at::Tensor> kept;
  std::vector<std::pair<AdamSpan, AdamFactors>> parts;
  std::vector<at::Tensor> written;
  std::vector<DiskPager::Hold> held;

  void add(const AdamUpdate& update) {
    const at::Tensor& parameter = update.parameter;
    if (parameter.numel() == 0) return;  // nothing of it is on this rank
    if (parameter.scalar_type() != at::kFloat) return fused_adam_update({update});
    before_write(parameter);
    kept.push_back(update.gradient);
    written.push_back(parameter);
    AdamSpan span{data_of(parameter), update.gradient.const_data_ptr<float>(), data_of(update.average),
                  data_of(update.square)};
    if (update.maximum.defined()) span.maximum = data_of(update.maximum);
    if (const LowPrecisionPart* copy = low_precision_copy_of(parameter)) {
      span.low_precision = static_cast<uint16_t*>(copy->values.mutable_data_ptr());
      span.low_precision_dtype =
          copy->values.scalar_type() == at::kBFloat16 ? LowPrecision::kBFloat16 : LowPrecision::kHalf;
    }
    span.numel = parameter.numel();
    const AdamFactors factors = adam_factors(update.rule, update.step);
    for (int64_t begin = 0; begin < span.numel; begin += kPartNumel)
      parts.emplace_back(span.part(begin, std::min(begin + kPartNumel, span.numel)), factors);
  }

  float* data_of(const at::Tensor& tensor) {
    DiskPager* disk = DiskPager::of(tensor);
    if (disk == nullptr) return tensor.mutable_data_ptr<float>();
    held.push_back(disk->hold(tensor, /*writes=*/true));
    return held.back().values().mutable_data_ptr<float>();
  }

  void run() const {
    const auto count = is_without_data() ? 0 : static_cast<int64_t>(parts.size());
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) adam_step(parts[i].first, parts[i].second);
    });
    // The pass writes memory without an operator, so the version is raised here, by which others know of writes.
    for (const at::Tensor& parameter : written) {
      parameter.unsafeGetTensorImpl()->bump_version();
      note_write(parameter);
      if (const LowPrecisionPart* copy = low_precision_copy_of(parameter)) copy->note_write(parameter);
    }
  }
};

void step_on_host(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>* chosen) {
  at::NoGradGuard no_grad;
  Pass pass;
  for_each_adam_update(optimizer, chosen, kInHostMemory, [&](const AdamUpdate& update) {
    if (DiskPager::of(update.parameter) == nullptr) return pass.add(update);
    Pass alone;  // so that memory holds one such parameter and its state, and what is read ahead
    alone.add(update);
    alone.run();
  });
  pass.run();
}

at::Tensor step_all_on_host(torch::optim::Optimizer& optimizer, const torch::optim::Optimizer::LossClosure& closure) {
  at::Tensor loss = loss_of(closure);
  step_on_host(optimizer, nullptr);
  return loss;
}

}  // namespace

at::Tensor HostAdam::step(LossClosure closure) { return step_all_on_host(*this, closure); }
at::Tensor HostAdamW::step(LossClosure closure) { return step_all_on_host(*this, closure); }
void HostAdam::step_parameters(const std::vector<at::Tensor>& parameters) { step_on_host(*this, &parameters); }
void HostAdamW::step_parameters(const std::vector<at::Tensor>& parameters) { step_on_host(*this, &parameters); }

}  // namespace tessera
