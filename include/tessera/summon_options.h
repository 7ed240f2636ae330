#pragma once

#include <string>
#include <vector>

namespace tessera {

// Options of summon_full_params(). The same on all ranks.
struct SummonOptions {
  bool writeback = true;  // keep changes made in the scope; false: they are lost
  // true: only rank 0 gets full parameters; on other ranks the use of a parameter throws std::logic_error. Needs
  // writeback = false, since the shards of other ranks could not follow.
  bool rank0_only = false;
  // true: full parameters are in host memory, and an accelerator holds one flat parameter in full at a time. They may
  // be read and changed, but forward() in the scope throws std::logic_error. No effect on CPUs.
  bool offload_to_cpu = false;
  // The units to summon, by name, as describe() prints them: "blocks.3", "(root)". Empty: all. Other units are gathered
  // for use.
  std::vector<std::string> units;
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

}  // namespace tessera
