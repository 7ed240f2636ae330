#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "exported/archive/archive.h"

namespace tessera::internal {

// The mode in which a model was exported, and the modules for which train() and eval() do not have the usual effect.
struct ExportedModes {
  bool training = true;
  std::set<std::string> always;              // modules that apply dropout in both modes
  std::map<std::string, bool> pinned;        // modules that ignore train() and eval() in Python; true: training mode
  std::map<std::string, std::string> fixed;  // modules whose mode cannot be changed, with the reason; "" is the root
};

// Information about a model that tools/export_model.py adds to an archive as extra/tessera.json. Archives of other
// tools lack this information. Older archives contain only a part of it.
struct ExportRecord {
  // Groups of tied tensors: the names in a group belong to one tensor. nullopt if unknown.
  std::optional<std::vector<std::vector<std::string>>> ties;
  // Names of the inputs that callers may pass to Python's forward() by position, in order.
  std::vector<std::string> positional;
  // Whether tools/export_model.py has compared the gradients of the decomposed program with those of the Python model.
  bool has_checked_gradients = false;

  std::optional<ExportedModes> modes;

  // Reads extra/tessera.json. Returns a default record if this file is missing. Throws ExportedError if it is damaged.
  static ExportRecord read(const Archive& archive);
};

}  // namespace tessera::internal
