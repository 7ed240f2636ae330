#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <tessera/communicator.h>
#include "core/gradients/collective_log.h"
#include "core/memory/counted_buffers.h"
#include "fsdp/flat_parameter.h"

namespace tessera::internal {

// The place of the full parameters in summon_full_params(), as seen from this rank.
enum class Summon : uint8_t {
  kNone,
  kOnDevice,
  kOnHost,     // in host memory, though the communicator's device is an accelerator
  kElsewhere,  // on another rank: this rank is not rank 0, and only rank 0 shows them
};

// One unit's full parameters in summon_full_params(), in their own dtype and writable by operators. Meanwhile the
// shards are read-only, unless the shard itself is shown and its changes are kept. Used by one thread at a time.
class SummonedParameters {
 public:
  // Whether changes are kept. Each comment states the memory cost in addition to the shard.
  enum class Changes : uint8_t {
    kWrittenBack,  // the full parameters; 0 if the shard has all of them
    kLost,         // the full parameters; if the shard has them all, a copy that hide() restores
  };

  // `flat_parameters` must outlive this object.
  SummonedParameters(FlatParameters& flat_parameters, Communicator& comm, CountedBuffers& memory, CollectiveLog& log)
      : flat_parameters_(flat_parameters), comm_(comm), memory_(memory), log_(log) {}

  // Makes the module's parameters views of the full parameters. `is_whole`: whether the shard has all parameters. If
  // so, shows the shard itself, unless `where` is kOnHost. Collective. If a gather fails, throws and shows nothing.
  void show(Summon where, Changes changes, bool is_whole);
  // Makes the parameters views of their pages again. If `writeback`, first copies this rank's part into the shards.
  void hide(bool writeback);
  // Copies this rank's part into the shards, like hide(true). If changes are kLost, copies nothing, and throws
  // std::logic_error if a parameter was changed. Not collective.
  void write_back();

  // Returns all elements of a flat parameter in its own dtype, in new memory. Collective; blocks.
  at::Tensor gather(const PagedFlatParameter& paged);

 private:
  void copy_own_part(const PagedFlatParameter& paged, const at::Tensor& shard) const;

  FlatParameters& flat_parameters_;
  Communicator& comm_;
  CountedBuffers& memory_;
  CollectiveLog& log_;
  Changes changes_ = Changes::kWrittenBack;
  std::vector<at::Tensor> saved_;  // for Changes::kLost: copies of the shards that are shown
};

}  // namespace tessera::internal
