#include "fsdp/checks/plan_checks.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <string>
#include <utility>

#include <tessera/host_results.h>
#include "core/model/module_state.h"
#include "core/runtime/warn.h"

namespace tessera::internal {

void require_same_plan(const std::vector<PlannedUnit>& plan, const FsdpOptions& options,
                       const torch::nn::Module& module, Communicator& world) {
  std::vector<std::string> lines{"options: " + describe(options)};
  for (const PlannedUnit& unit : plan)
    for (const std::string& line : describe_parameters(unit.parameters))
      lines.push_back("unit '" + unit.name + "': " + line);
  for (std::string& line : describe_buffers(module)) lines.push_back(std::move(line));
  for (const PlannedUnit& unit : plan)
    for (std::string& line : describe_earlier_gradients(unit.parameters)) lines.push_back(std::move(line));
  require_agreement(world, "the module to shard", lines);
}

MemoryNeed memory_need(const std::vector<PlannedUnit>& plan, const FsdpOptions& options, const Mesh& mesh) {
  const OffloadOptions& offload = options.offload;
  const at::Device device = mesh.world->device();
  const auto param_dtype = options.mixed_precision.param_dtype;
  const bool is_offload_in_memory = device.is_cpu() && offload.directory.empty();
  const int64_t ranks = mesh.shard->size();
  MemoryNeed need;
  int64_t full_bytes = 0, largest_bytes = 0;
  const std::vector<bool> kept_on_device = first_units(plan, offload.device_fraction);
  for (size_t i = 0; i < plan.size(); ++i) {
    const bool is_counted = is_offload_in_memory || kept_on_device[i];
    int64_t gathered_bytes = 0;
    for (const PlannedParameter& parameter : plan[i].parameters) {
      const at::Tensor& tensor = parameter.tensor;
      const auto own_bytes = static_cast<int64_t>(tensor.nbytes());
      if (is_counted || !offload.params) need.parameter_bytes += own_bytes / ranks;
      if (tensor.requires_grad() && (is_counted || !offload.grads)) need.gradient_bytes += own_bytes / ranks;
      if (tensor.device() == device) need.freed_bytes += own_bytes;
      const bool is_cast = param_dtype && at::isFloatingType(tensor.scalar_type());
      gathered_bytes +=
          tensor.numel() * static_cast<int64_t>(c10::elementSize(is_cast ? *param_dtype : tensor.scalar_type()));
    }
    full_bytes += gathered_bytes;
    largest_bytes = std::max(largest_bytes, gathered_bytes);
  }
  const int64_t most_units = options.keep_recent + options.prefetch;
  if (ranks > 1)
    need.in_use_bytes = options.reshard_after_forward ? std::min(full_bytes, most_units * largest_bytes) : full_bytes;
  return need;
}

void warn_of_idle_policies(const std::vector<PlannedUnit>& plan, const FsdpOptions& options,
                           const torch::nn::Module& module, const Communicator& world) {
  const bool has_parts = !module.children().empty();
  if (world.rank() != 0 || !has_parts) return;
  const auto claims_none = [&](const WrapPolicy& policy) { return policy && modules_below(module, policy).empty(); };
  constexpr char kHint[] =
      "; wrap_modules() takes the class of a module, BlockImpl, wrap_classes() that of an exported one";
  const auto warn_if = [&](bool is_idle, const char* what) {
    if (is_idle) {
      warn(c10::str("FullyShardedDataParallel: ", what, kHint));
    }
  };
  warn_if(options.auto_wrap && !plan.empty() && std::ranges::all_of(plan, &PlannedUnit::is_root),
          "auto_wrap names no module, so the model is one unit, gathered as a whole");
  warn_if(claims_none(options.mixed_precision.full_precision), "mixed_precision.full_precision names no module");
  warn_if(claims_none(options.ignored_modules), "ignored_modules names no module");
}

}  // namespace tessera::internal
