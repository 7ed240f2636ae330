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

// What summon_full_params() brings, and to whom. The same on all ranks.
struct SummonOptions {
  bool writeback = true;  // keep what the scope changes; false: changes are lost
  // true: only rank 0 gets them; on the others using a parameter throws std::logic_error. Needs
  // writeback = false, since the others' shards could not follow.
  bool rank0_only = false;
  // true: full parameters lie in host memory, so that an accelerator holds one of a unit's flat parameters whole at a
  // time. To read and change them: forward() in such a scope throws std::logic_error. On CPUs they always lie there.
  bool offload_to_cpu = false;
  // The units to summon, by name, as describe() prints them: "blocks.3", "(root)". Empty: all. The
  // others are gathered when used, as ever.
  std::vector<std::string> units;
};

// The options. Throws std::invalid_argument for ones that do not go together.
const SummonOptions& checked(const SummonOptions& options);

// Who gets what full_state_dict() and visit_full_state() bring, and where. The same on all ranks.
struct StateDictOptions {
  // true: only rank 0 gets the tensors, the others an empty dictionary.
  bool rank0_only = false;
  // true: the copies lie in host memory, so that an accelerator holds one unit at a time.
  bool offload_to_cpu = false;
};

// Which dtype each part of a step is in; what is empty stays in the parameters' own. Optimizers,
// checkpoints and state dictionaries see the parameters' own dtype always (FSDP2's
// MixedPrecisionPolicy, with FSDP1's buffers).
struct MixedPrecision {
  // All-gathers and computation of floating-point parameters: kBFloat16 or kHalf halve both the
  // bytes sent and the gathered memory of fp32 parameters, whose shards are cast before they travel.
  std::optional<at::ScalarType> param_dtype;
  // Reduction of their gradients; param_dtype if empty. kFloat costs twice the bytes of 16 bit and
  // rounds once instead of at every rank and every accumulation under no_sync.
  std::optional<at::ScalarType> reduce_dtype;
  // Floating-point buffers are converted to it, once, at construction.
  std::optional<at::ScalarType> buffer_dtype;
  // The wrapper's forward() converts floating-point tensors among its arguments (in vectors, tuples
  // and optionals too) to param_dtype.
  bool cast_forward_inputs = true;
  // The wrapper's forward() converts floating-point tensors in what it returns to it.
  std::optional<at::ScalarType> output_dtype;
  // Modules that compute in the parameters' own dtype, norms usually: their parameters and buffers
  // are never cast. An operator on such a parameter gets arguments of param_dtype converted up
  // and its results converted back, in forward and in backward. Batch norms are such modules (FSDP1's default), unless
  // buffer_dtype is param_dtype: their parameters go with their running statistics.
  WrapPolicy full_precision;
};

// Shard within groups of ranks, replicate across them (FSDP1's HYBRID_SHARD, a 2-D mesh in FSDP2).
struct HybridSharding {
  // How many ranks, consecutive ones, share one copy of the model; divides the world's size. Gathers
  // and reduce-scatters stay within them; each rank's part of the gradients is then averaged
  // with its counterparts in the other copies. 0: all ranks share one copy.
  int ranks_per_copy = 0;
  // How many ranks, consecutive ones, those of a host usually, keep what a forward that records for autograd has
  // gathered, each a part of it, until backward is through with it (ZeRO++'s hpZ; FSDP2's reshard_after_forward = n).
  // Backward, and further forwards under no_sync(), gather from these parts: among ranks that are near. Divides
  // the ranks of a copy. Costs 1 / n of the model in the dtype that is gathered. 0: no such parts.
  int ranks_per_secondary_copy = 0;
};

// In what form bytes travel between the ranks that share a copy of the model, for links that are slow: a quarter of
// fp32's bytes, half of bf16's, for an error (see Int8Blocks). Shards, the optimizer, checkpoints and what
// summon_full_params() shows stay exact. Parameters of modules of full_precision, integers and a single rank's are
// never rounded.
struct WireFormats {
  // All-gathers (ZeRO++'s qwZ): forward and backward compute with parameters rounded to blocks, the same on all ranks.
  WireFormat parameters = WireFormat::kDtype;
  // Reduce-scatters (one hop of its qgZ): each rank's gradients are rounded once, exchanged, and added in fp32, in rank
  // order.
  WireFormat gradients = WireFormat::kDtype;
};

// What FullyShardedDataParallel does, and what it costs. The same on all ranks.
struct FsdpOptions {
  // Which modules become units (see WrapPolicy). Empty: the whole model is one unit.
  WrapPolicy auto_wrap{};

  // true: a unit's parameters are released after its forward and gathered again in backward
  // (ZeRO-3: 1.5 times DDP's traffic, least memory). false: they stay from forward until backward
  // has all of the unit's gradients (ZeRO-2's traffic; memory of the whole model), and after an
  // evaluation until the next backward ends.
  bool reshard_after_forward = true;

  // Which dtypes parameters, gradients and buffers travel and compute in.
  MixedPrecision mixed_precision{};

  // Whether they travel in 8 bit.
  WireFormats wire{};

  // Whether shards and gradients lie in host memory, or on a disk.
  CpuOffload offload{};

  // How many units ahead of the one in use are gathered, in forward and in backward, in the order
  // seen in the iteration before. 0: none. Costs one gathered unit of memory each. Not a unit of more than 65,536
  // elements among ranks that read each other's memory (gloo, on one host), where nothing travels before it is needed.
  int prefetch = 1;

  // How many units, the most recently used ones, stay gathered while the next is in use. 2 keeps
  // two units that are used in turn from evicting each other. Units that are not gathered ahead (above), if there are
  // eight or more, go as backward begins, but for the one that it begins with.
  int keep_recent = 2;

  // Take parameters and buffers from rank 0 at construction. false: the caller promises that
  // they are the same on all ranks already.
  bool sync_module_states = true;

  // Whether several copies of the model are sharded, each over some of the ranks.
  HybridSharding hybrid{};

  // Modules whose parameters stay as they are: whole on every rank, not in parameters(), their
  // gradients not reduced. For frozen parts that are used everywhere, or trained in another way.
  WrapPolicy ignored_modules{};

  // true: backward throws std::invalid_argument, on all ranks, if a parameter had a gradient on
  // some ranks only, which otherwise counts as 0 on the others.
  bool refuse_uneven_use = false;

  // true: backward throws std::runtime_error, on all ranks, if a reduced gradient is infinite or
  // NaN, and names units and ranks. Costs one pass over the gradient shards, and a flag that ranks gather and wait for.
  bool check_finite = false;

  // Gradients of at least this many bytes are reduced from autograd's memory, without a copy into their bucket, where
  // the group can (gloo).
  int64_t zero_copy_bytes = int64_t{256} << 10;
};

// The options. Throws std::invalid_argument, naming the field, for values that cannot be meant.
const FsdpOptions& checked(const FsdpOptions& options);
// The modules whose parameters and buffers are not cast: full_precision, and batch norms where they have to be.
WrapPolicy exempt_modules(const MixedPrecision& precision);
// What must be the same on all ranks, as text.
std::string describe(const FsdpOptions& options);

}  // namespace tessera
