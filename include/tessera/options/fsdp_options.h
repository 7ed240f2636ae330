#pragma once

#include <c10/core/ScalarType.h>
#include <vector>

#include <cstdint>
#include <optional>
#include <string>

#include <tessera/options/offload_options.h>
#include <tessera/options/wire_format.h>
#include <tessera/wrap.h>

namespace tessera {

// Options of summon_full_params(). The same on all ranks.
struct SummonOptions {
  bool writeback = true;  // keep changes made in the scope; false: they are lost
  // true: only rank 0 gets full parameters; on other ranks the use of a parameter throws std::logic_error. Needs
  // writeback = false, because other ranks could not update their shards.
  bool rank0_only = false;
  // true: full parameters are in host memory, and an accelerator holds one flat parameter in full at a time. They may
  // be read and changed, but forward() in the scope throws std::logic_error. No effect on CPUs.
  bool offload_to_cpu = false;
  // The units to summon, by name, as describe() prints them: "blocks.3", "(root)". Empty: all. Other units are gathered
  // when used.
  std::vector<std::string> units{};
};

// Returns the options. Throws std::invalid_argument if they contradict each other.
const SummonOptions& checked(const SummonOptions& options);

// Options of full_state_dict() and visit_full_state(). The same on all ranks.
struct StateDictOptions {
  // true: only rank 0 gets tensors, other ranks get an empty dictionary.
  bool rank0_only = false;
  // true: copies are in host memory, and an accelerator holds one unit at a time.
  bool offload_to_cpu = false;
};

// The dtype of each phase of a step; empty: the parameters' own. Optimizers, checkpoints and state dictionaries always
// have the parameters' own dtype (FSDP2's MixedPrecisionPolicy, with FSDP1's buffers). Complex and integer tensors
// always keep their dtype.
struct MixedPrecision {
  // All-gathers and computation of floating-point parameters. kBFloat16 and kHalf halve the bytes sent and the memory
  // of unsharded fp32 parameters: shards are cast before they are sent.
  std::optional<at::ScalarType> param_dtype{};
  // Reduction of gradients; empty: param_dtype. kFloat costs twice the bytes of 16 bit, and rounds once instead of on
  // every rank and in every accumulation under no_sync.
  std::optional<at::ScalarType> reduce_dtype{};
  // Floating-point buffers are converted once, at construction.
  std::optional<at::ScalarType> buffer_dtype{};
  // The wrapper's forward() converts floating-point tensors among its arguments (in vectors, tuples
  // and optionals too) to param_dtype.
  bool cast_forward_inputs = true;
  // The wrapper's forward() converts floating-point tensors in its result.
  std::optional<at::ScalarType> output_dtype{};
  // Modules that compute in the parameters' own dtype, usually norms. Their parameters and buffers are never cast. If
  // an operator uses such a parameter, its arguments of param_dtype are converted up, and its results back, in forward
  // and in backward. Batch norms are included (FSDP1's default) unless buffer_dtype is param_dtype, since parameters
  // and running statistics need one dtype.
  WrapPolicy full_precision{};
};

// Shard within groups of ranks, replicate across them (FSDP1's HYBRID_SHARD, a 2-D mesh in FSDP2).
struct HybridSharding {
  // The number of consecutive ranks that share one copy of the model. Must divide the world size. All-gathers and
  // reduce-scatters stay within a copy; each rank's part of the gradients is then averaged over the copies. 0: all
  // ranks share one copy.
  int ranks_per_copy = 0;
  // The number n of consecutive ranks, usually those of a host, that keep secondary shards: 1/n of the unsharded
  // parameters on each rank, from forward to the end of backward (ZeRO++'s hpZ; FSDP2's reshard_after_forward = n).
  // Backward, and further forwards under no_sync(), gather among these ranks only. Must divide the ranks of a copy.
  // Costs 1/n of the model in param_dtype. 0: no secondary shards.
  int ranks_per_secondary_copy = 0;
};

// The format of data between the ranks of a copy of the model. For slow links: kInt8Blocks sends a quarter of fp32's
// bytes, half of bf16's, with an error (see Int8Blocks). Shards, optimizers, checkpoints and summon_full_params() stay
// exact. Parameters of full_precision modules, integers, and parameters of a single rank are never rounded.
struct WireFormats {
  // All-gathers (ZeRO++'s qwZ): forward and backward compute with rounded parameters, the same on all ranks.
  WireFormat parameters = WireFormat::kDtype;
  // Reduce-scatters (one hop of ZeRO++'s qgZ): each rank's gradients are rounded once, exchanged, and added in fp32, in
  // rank order.
  WireFormat gradients = WireFormat::kDtype;
};

// Options of FullyShardedDataParallel, with their costs. The same on all ranks.
struct FsdpOptions {
  // Selects the modules that become units (see WrapPolicy). Empty: the whole model is one unit.
  WrapPolicy auto_wrap{};

  // true: a unit is resharded after its forward and unsharded again in backward (ZeRO-3: 1.5 times DDP's traffic, least
  // memory). false: it stays unsharded from forward until backward has all gradients of the unit (ZeRO-2's traffic;
  // memory of the whole model), and after an evaluation until the next backward ends.
  bool reshard_after_forward = true;

  // The dtypes of parameters, gradients and buffers on the wire and in computation.
  MixedPrecision mixed_precision{};

  // Formats of the data that ranks send, for example 8-bit blocks.
  WireFormats wire{};

  // Host or disk memory for shards and gradients.
  CpuOffload offload{};

  // The number of units that are gathered ahead of the one in use, in forward and in backward, in the order of the last
  // iteration. 0: none. Each costs the memory of an unsharded unit. A unit of more than 65,536 elements is not gathered
  // ahead by ranks that read each other's memory (gloo, on one host): no data would move before its use.
  int prefetch = 1;

  // The number of most recently used units that stay unsharded. With 2, two units that are used in turn do not evict
  // each other. If there are eight or more units, those that are not gathered ahead (above) are evicted when backward
  // begins, except for backward's first unit.
  int keep_recent = 2;

  // true: parameters and buffers are rank 0's. false: they must be the same on all ranks already.
  bool sync_module_states = true;

  // Several copies of the model, each sharded over some of the ranks.
  HybridSharding hybrid{};

  // Modules whose parameters are not sharded, not in parameters(), and whose gradients are not reduced. For frozen
  // parts that are used everywhere, or trained in another way.
  WrapPolicy ignored_modules{};

  // true: backward throws std::invalid_argument, on all ranks, if a parameter has a gradient on some ranks only. false:
  // a missing gradient counts as 0.
  bool refuse_uneven_use = false;

  // true: backward throws std::runtime_error, on all ranks, if a reduced gradient is infinite or NaN, and names units
  // and ranks. Costs one pass over the gradient shards, and an exchange of flags.
  bool check_finite = false;

  // Gradients of at least this many bytes are reduced from autograd's memory, without a copy into their bucket, if the
  // group supports this (gloo).
  int64_t zero_copy_bytes = int64_t{256} << 10;
};

// Returns the options. Throws std::invalid_argument, naming the field, for values out of range.
const FsdpOptions& checked(const FsdpOptions& options);
// Selects the modules that are not cast: full_precision, and batch norms unless buffer_dtype is param_dtype.
WrapPolicy exempt_modules(const MixedPrecision& precision);
// The options that must be the same on all ranks, as text.
std::string describe(const FsdpOptions& options);

}  // namespace tessera
