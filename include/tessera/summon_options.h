#pragma once

#include <string>
#include <vector>

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

}  // namespace tessera
