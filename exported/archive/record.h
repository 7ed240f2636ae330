#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "exported/archive/archive.h"

namespace tessera::internal {

// The mode in which a model was exported, and its differences from the other mode, found by tools/export_model.py.
struct ExportedModes {
  bool training = true;
  std::set<std::string> always;              // modules whose dropout is equal in both modes
  std::map<std::string, bool> pinned;        // modules that the model's train() keeps in one mode; true: training
  std::map<std::string, std::string> fixed;  // modules ("": the root) that cannot be switched, with the reason
};

// Facts about a model that tools/export_model.py stores (extra/tessera.json) and torch.export does not. Other tools'
// archives have none, older ones have some.
struct ExportRecord {
  // Groups of names of one tensor; nullopt if unknown.
  std::optional<std::vector<std::vector<std::string>>> ties;
  // Inputs that Python's forward() takes by position, in order.
  std::vector<std::string> positional;
  // The gradients of the decomposed program were compared with the model's.
  bool has_checked_gradients = false;

  std::optional<ExportedModes> modes;

  // Throws ExportedError.
  static ExportRecord read(const Archive& archive);
};

}  // namespace tessera::internal
