#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include <tessera/model/model_shards.h>

namespace tessera {

// Values of a state that are not tensors, by name: {"position", 7}. Numbers must be finite, texts UTF-8.
using StateValue = std::variant<bool, int64_t, double, std::string>;
using StateValues = std::map<std::string, StateValue>;

// An object whose state is saved and loaded with the model and its optimizer: a sampler, a gradient scaler, a schedule,
// averaged weights. Not collective.
class Stateful {
 public:
  virtual ~Stateful() = default;
  // Returns the name for checkpoints: letters, digits and '_', equal on all ranks, and unique in the training state.
  virtual std::string state_name() const = 0;
  // Returns the values to save. Only rank 0's values are saved.
  virtual StateValues state_values() const = 0;
  // Throws std::invalid_argument unless load_state_values() accepts the values.
  virtual void check_state_values(const StateValues& values) const = 0;
  // Restores the state. The values have passed check_state_values(), and are equal on all ranks.
  virtual void load_state_values(const StateValues& values) = 0;
  // Returns this rank's part of each tensor of the state, with the same names on all ranks. Loading writes to these
  // tensors. Each NamedShard states which part and which replica this rank holds.
  virtual std::vector<NamedShard> state_shards() const { return {}; }
};

// For check_state_values(). Throws std::invalid_argument unless `values` has the names and types of `expected`. The
// error contains the name of the wrong value and `whose`, a text that names the owner of the state.
inline void require_same_form(const StateValues& values, const StateValues& expected, const std::string& whose) {
  constexpr const char* kTypes[] = {"true or false", "an integer", "a number", "a text"};
  for (const auto& [name, value] : expected) {
    const auto found = values.find(name);
    if (found == values.end()) throw std::invalid_argument("the state of " + whose + " has no '" + name + "'");
    if (found->second.index() != value.index())
      throw std::invalid_argument("the state of " + whose + " has a '" + name + "' that is not " +
                                  kTypes[value.index()]);
  }
  for (const auto& [name, value] : values)
    if (!expected.contains(name)) throw std::invalid_argument(whose + " knows no '" + name + "'");
}

}  // namespace tessera
