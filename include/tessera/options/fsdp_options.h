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

// Options of summon_full_params(). Must be equal on all ranks.
struct SummonOptions {
  bool writeback = true;  // true: keeps changes made in the scope; false: drops them
  // true: only rank 0 unshards parameters; on other ranks, an operator that uses a parameter throws std::logic_error.
  // Requires writeback = false, because other ranks could not update their shards.
  bool rank0_only = false;
  // true: full parameters are in host memory, and an accelerator holds only one full flat parameter (all or part of a
  // unit) at a time. Parameters may be read and changed, but forward() in the scope throws std::logic_error. No effect
  // on CPUs.
  bool offload_to_cpu = false;
  // Names of the units to unshard, as describe() prints them: "blocks.3", "(root)". Empty: all units. If not named, a
  // unit is unsharded when an operator uses it.
  std::vector<std::string> units{};
};

// Returns the options. Throws std::invalid_argument if they contradict each other.
const SummonOptions& checked(const SummonOptions& options);

// Options of full_state_dict() and visit_full_state(). Must be equal on all ranks.
struct StateDictOptions {
  // true: only rank 0 receives tensors; other ranks receive an empty dictionary.
  bool rank0_only = false;
  // true: copies are in host memory, and an accelerator holds one unit at a time.
  bool offload_to_cpu = false;
};

// The dtypes of the phases of a step (FSDP2's MixedPrecisionPolicy, with FSDP1's buffers): kHalf, kBFloat16, kFloat or
// kDouble. Empty: the parameters' own dtype. State in optimizers, checkpoints and state dictionaries always has the
// parameters' own dtype. Complex and integer tensors always keep their dtype.
struct MixedPrecision {
  // The dtype in which floating-point parameters are gathered and used. Shards are cast before they are sent. So if
  // parameters are fp32, kBFloat16 and kHalf halve the bytes sent and the memory of unsharded parameters.
  std::optional<at::ScalarType> param_dtype{};
  // The dtype in which gradients are added and reduced; empty: param_dtype. kFloat sends twice the bytes of a 16-bit
  // dtype, but rounds only once. A 16-bit dtype rounds on every rank and in every accumulation under no_sync().
  std::optional<at::ScalarType> reduce_dtype{};
  // The dtype to which floating-point buffers are converted once, at construction. Empty: no conversion.
  std::optional<at::ScalarType> buffer_dtype{};
  // true: the wrapper's forward() converts floating-point tensors among its arguments (also in vectors, tuples and
  // optionals) to param_dtype.
  bool cast_forward_inputs = true;
  // The dtype to which the wrapper's forward() converts floating-point tensors in its result. Empty: no conversion.
  std::optional<at::ScalarType> output_dtype{};
  // Selects modules that compute in the parameters' own dtype, usually norms. Their parameters and buffers are never
  // cast. If an operator uses such a parameter, the operator's arguments of param_dtype are converted to the
  // parameter's dtype. Its results are converted back, in forward and in backward. Also selects batch norms (FSDP1's
  // default) unless buffer_dtype is param_dtype, because their parameters and running statistics need one dtype.
  WrapPolicy full_precision{};
};

// Shards parameters within groups of ranks, and replicates them across groups (FSDP1's HYBRID_SHARD, FSDP2's 2-D mesh).
struct HybridSharding {
  // The number of consecutive ranks that share one copy of the model. Must divide the world size. All-gathers and
  // reduce-scatters stay within a copy. Each rank's part of the gradients is then averaged over the ranks of other
  // copies that hold the same part. 0: all ranks share one copy.
  int ranks_per_copy = 0;
  // The number n of consecutive ranks, usually those of a host, that together keep a secondary copy of the parameters:
  // 1/n on each rank, from forward to the end of backward (ZeRO++'s hpZ; FSDP2's reshard_after_forward = n). Backward,
  // and further forwards under no_sync(), gather among these ranks only. n must divide the number of ranks of a copy.
  // Each rank needs memory for 1/n of the model in param_dtype. Requires reshard_after_forward. 0: no secondary copy.
  int ranks_per_secondary_copy = 0;
};

// The format of data that ranks of a copy of the model exchange. For slow links, kInt8Blocks sends a quarter of fp32's
// bytes, or half of bf16's, but rounds (see WireFormat). Shards, optimizers, checkpoints and summon_full_params() stay
// exact. Parameters of full_precision modules, integers, and parameters that only one rank holds are never rounded.
struct WireFormats {
  // The format of all-gathers (ZeRO++'s qwZ). Forward and backward use rounded parameters, equal on all ranks.
  WireFormat parameters = WireFormat::kDtype;
  // The format of reduce-scatters (one hop of ZeRO++'s qgZ). Each rank rounds its gradients once, and sends each part
  // to its owner. The owner adds the parts of all ranks in fp32, in rank order.
  WireFormat gradients = WireFormat::kDtype;
};

// Options of FullyShardedDataParallel. Must be equal on all ranks, except for limits of memory.
struct FsdpOptions {
  // Selects the modules that become units (see WrapPolicy). Empty: the whole model is one unit.
  WrapPolicy auto_wrap{};

  // true: a unit is resharded after its forward and unsharded again in backward (ZeRO-3: 1.5 times DDP's traffic, least
  // memory). false: a unit stays unsharded until backward has computed all of its gradients (ZeRO-2's traffic; memory
  // of the whole model). If no backward follows a forward, the unit stays unsharded until the next backward ends.
  bool reshard_after_forward = true;

  MixedPrecision mixed_precision{};  // dtypes of parameters, gradients and buffers on the wire and in computation

  WireFormats wire{};  // formats of the data that ranks send, for example 8-bit blocks

  CpuOffload offload{};  // host or disk memory for shards and gradients

  // The number of units that are unsharded ahead of the unit in use, in forward and in backward, in the order of the
  // last iteration. 0: none. Each needs memory for an unsharded unit. Ranks that read each other's memory (gloo, one
  // host) do not unshard units of more than 65,536 elements ahead, because their data would move only at the use.
  int prefetch = 1;

  // The number of most recently used units that stay unsharded; 1 or more. With 2, two units used in turn stay
  // unsharded. If there are eight or more units, fewer stay unsharded for backward: on a device, the wrapper's
  // forward() reshards all units except the last used one; on CPUs, the start of backward reshards units that are never
  // unsharded ahead (`prefetch`).
  int keep_recent = 2;

  // true: rank 0 sends its parameters and buffers. false: all ranks must already have equal parameters and buffers.
  bool sync_module_states = true;

  HybridSharding hybrid{};  // shards the model within groups of ranks, with one copy in each group

  // Selects modules whose parameters are not sharded and not in parameters(), and whose gradients are not reduced.
  // Intended for frozen parts that every rank uses, or parts that the program itself trains.
  WrapPolicy ignored_modules{};

  // true: backward throws std::invalid_argument, on all ranks, if a parameter has a gradient on some ranks only. false:
  // a missing gradient counts as 0.
  bool refuse_uneven_use = false;

  // true: backward throws std::runtime_error on all ranks if a reduced gradient is infinite or NaN. The error names
  // units and ranks. Costs one pass over the gradient shards, and an all-gather of one flag per rank.
  bool check_finite = false;

  // Gradients of at least this many bytes are reduced from autograd's memory, without a copy into their bucket, if the
  // group supports this (gloo).
  int64_t zero_copy_bytes = int64_t{256} << 10;
};

// Returns the options. Throws std::invalid_argument, naming the field, for values out of range.
const FsdpOptions& checked(const FsdpOptions& options);
// Returns the policy for modules that are not cast: full_precision, and batch norms unless buffer_dtype is param_dtype.
WrapPolicy exempt_modules(const MixedPrecision& precision);
// Returns the options that ranks compare at construction, as text. Ranks compare `hybrid` separately.
std::string describe(const FsdpOptions& options);

}  // namespace tessera
