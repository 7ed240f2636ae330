#include <tessera/options/fsdp_options.h>

#include <c10/util/StringUtil.h>

#include <stdexcept>
#include <string>

#include "core/runtime/dtypes.h"
#include "core/runtime/require.h"

namespace tessera {
using namespace internal;
namespace {

std::string name_of(std::optional<at::ScalarType> dtype) { return dtype ? c10::toString(*dtype) : "own"; }

void check_least(const char* field, int64_t value, int64_t least) {
  require(value >= least, "FsdpOptions::", field, " is ", value, ", expected ", least, " or more");
}

// Whether the module is a batch norm of any class (libtorch's, SyncBatchNorm, or an exported one): it has the buffers
// running_mean and running_var, but no children. A batch norm needs one dtype for its parameters and statistics. In 16
// bits, its running averages would stop changing.
bool keeps_running_statistics(const torch::nn::Module& module) {
  if (!module.children().empty()) return false;
  const auto buffers = module.named_buffers(/*recurse=*/false);
  const auto* mean = buffers.find("running_mean");
  return mean != nullptr && mean->defined() && buffers.contains("running_var");
}

}  // namespace

WrapPolicy exempt_modules(const MixedPrecision& precision) {
  if (precision.buffer_dtype == precision.param_dtype) return precision.full_precision;
  return [chosen = precision.full_precision](const std::string& fqn, const torch::nn::Module& module, int64_t numel) {
    return keeps_running_statistics(module) || (chosen && chosen(fqn, module, numel));
  };
}

const FsdpOptions& checked(const FsdpOptions& options) {
  require_training_dtype("FsdpOptions::mixed_precision.param_dtype", options.mixed_precision.param_dtype);
  require_training_dtype("FsdpOptions::mixed_precision.reduce_dtype", options.mixed_precision.reduce_dtype);
  require_training_dtype("FsdpOptions::mixed_precision.buffer_dtype", options.mixed_precision.buffer_dtype);
  require_training_dtype("FsdpOptions::mixed_precision.output_dtype", options.mixed_precision.output_dtype);
  check_least("offload.host_limit_bytes", options.offload.host_limit_bytes, 0);
  if (const double fraction = options.offload.device_fraction; !(fraction >= 0 && fraction <= 1))
    throw std::invalid_argument(c10::str("FsdpOptions::offload.device_fraction is ", fraction, ", expected 0 to 1"));
  if (options.offload.device_fraction > 0 && !(options.offload.params && options.offload.grads))
    throw std::invalid_argument(c10::str("FsdpOptions::offload.device_fraction is ", options.offload.device_fraction,
                                         ", but params or grads is false, expected both: a unit stays on the device "
                                         "with its parameters and gradients"));
  if (!options.offload.directory.empty())
    check_least("offload.disk_buffer_bytes", options.offload.disk_buffer_bytes, 4096);
  require(!options.offload.directory.empty() || !options.offload.disk_units,
          "FsdpOptions::offload.disk_units is set, but offload.directory is empty: expected a folder for these units");
  if (!options.offload.directory.empty() && !options.offload.params)
    throw std::invalid_argument("FsdpOptions::offload.directory is '" + options.offload.directory +
                                "', but offload.params is false: shards that stay on the device cannot lie on a disk");
  require(options.hybrid.ranks_per_secondary_copy <= 0 || options.reshard_after_forward,
          "FsdpOptions::hybrid.ranks_per_secondary_copy is ", options.hybrid.ranks_per_secondary_copy,
          ", but reshard_after_forward is false: backward gathers nothing, expected 0");
  check_least("prefetch", options.prefetch, 0);
  check_least("keep_recent", options.keep_recent, 1);
  return options;
}

const SummonOptions& checked(const SummonOptions& options) {
  if (options.rank0_only && options.writeback)
    throw std::invalid_argument("SummonOptions::rank0_only and writeback are both true, expected writeback = false");
  return options;
}

std::string describe(const FsdpOptions& options) {
  return c10::str("reshard_after_forward=", options.reshard_after_forward, " prefetch=", options.prefetch,
                  " keep_recent=", options.keep_recent, " sync_module_states=", options.sync_module_states,
                  " param_dtype=", name_of(options.mixed_precision.param_dtype),
                  " reduce_dtype=", name_of(options.mixed_precision.reduce_dtype),
                  " buffer_dtype=", name_of(options.mixed_precision.buffer_dtype),
                  " wire=", static_cast<int>(options.wire.parameters), static_cast<int>(options.wire.gradients),
                  " refuse_uneven_use=", options.refuse_uneven_use, " check_finite=", options.check_finite,
                  " zero_copy_bytes=", options.zero_copy_bytes, " offload.params=", options.offload.params,
                  " offload.grads=", options.offload.grads, " offload.disk=", !options.offload.directory.empty(),
                  " offload.device_fraction=", options.offload.device_fraction);
}

}  // namespace tessera
