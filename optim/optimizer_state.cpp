#include "tessera/optim/optimizer_state.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <stdexcept>

namespace tessera {
namespace {

using namespace torch::optim;

// visit(name, reference) for each field, of states and of options alike. One list serves reading
// and writing.
template <class State, class Visit>
void visit_adam_state(State& state, Visit visit) {
  visit("step", state.step());
  visit("exp_avg", state.exp_avg());
  visit("exp_avg_sq", state.exp_avg_sq());
  visit("max_exp_avg_sq", state.max_exp_avg_sq());
}
template <class Visit>
void visit_fields(AdamParamState& state, Visit visit) {
  visit_adam_state(state, visit);
}
template <class Visit>
void visit_fields(AdamWParamState& state, Visit visit) {
  visit_adam_state(state, visit);
}
template <class Visit>
void visit_fields(SGDParamState& state, Visit visit) {
  visit("momentum_buffer", state.momentum_buffer());
}
template <class Visit>
void visit_fields(RMSpropParamState& state, Visit visit) {
  visit("step", state.step());
  visit("square_avg", state.square_avg());
  visit("momentum_buffer", state.momentum_buffer());
  visit("grad_avg", state.grad_avg());
}
template <class Visit>
void visit_fields(AdagradParamState& state, Visit visit) {
  visit("step", state.step());
  visit("sum", state.sum());
}

template <class Options, class Visit>
void visit_adam_options(Options& options, Visit visit) {
  visit("lr", options.lr());
  visit("beta1", std::get<0>(options.betas()));
  visit("beta2", std::get<1>(options.betas()));
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("amsgrad", options.amsgrad());
}
template <class Visit>
void visit_fields(AdamOptions& options, Visit visit) {
  visit_adam_options(options, visit);
}
template <class Visit>
void visit_fields(AdamWOptions& options, Visit visit) {
  visit_adam_options(options, visit);
}
template <class Visit>
void visit_fields(SGDOptions& options, Visit visit) {
  visit("lr", options.lr());
  visit("momentum", options.momentum());
  visit("dampening", options.dampening());
  visit("weight_decay", options.weight_decay());
  visit("nesterov", options.nesterov());
}
template <class Visit>
void visit_fields(RMSpropOptions& options, Visit visit) {
  visit("lr", options.lr());
  visit("alpha", options.alpha());
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("momentum", options.momentum());
  visit("centered", options.centered());
}
template <class Visit>
void visit_fields(AdagradOptions& options, Visit visit) {
  visit("lr", options.lr());
  visit("lr_decay", options.lr_decay());
  visit("weight_decay", options.weight_decay());
  visit("initial_accumulator_value", options.initial_accumulator_value());
  visit("eps", options.eps());
}

template <class... Types>
struct Known {
  // Calls act with `object` as the one of Types that it is; false if it is none of them.
  template <class Object, class Act>
  static bool with(const Object& object, Act act) {
    return (... || [&] {
      const auto* typed = dynamic_cast<const Types*>(&object);
      if (typed != nullptr) act(const_cast<Types&>(*typed));
      return typed != nullptr;
    }());
  }
};
using KnownStates = Known<AdamParamState, AdamWParamState, SGDParamState, RMSpropParamState, AdagradParamState>;
using KnownOptions = Known<AdamOptions, AdamWOptions, SGDOptions, RMSpropOptions, AdagradOptions>;

const char* kind_of(const AdamOptions&) { return "Adam"; }
const char* kind_of(const AdamWOptions&) { return "AdamW"; }
const char* kind_of(const SGDOptions&) { return "SGD"; }
const char* kind_of(const RMSpropOptions&) { return "RMSprop"; }
const char* kind_of(const AdagradOptions&) { return "Adagrad"; }

[[noreturn]] void refuse_unknown(const char* what) {
  throw std::invalid_argument(std::string("the optimizer's ") + what +
                              " are of a class that Tessera cannot name: expected those of torch's Adam, AdamW, SGD, "
                              "RMSprop or Adagrad");
}

template <class Value>
const Value* find(const std::vector<std::pair<std::string, Value>>& values, const std::string& name) {
  for (const auto& [key, value] : values)
    if (key == name) return &value;
  return nullptr;
}

template <class State>
std::unique_ptr<OptimizerParamState> filled(const std::string& kind, const ParameterState& values) {
  auto state = std::make_unique<State>();
  size_t tensors = 0, numbers = 0;
  std::string names;
  std::string missing;
  visit_fields(*state, [&](const char* name, auto& field) {
    names += std::string(names.empty() ? "" : ", ") + name;
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, at::Tensor>) {
      if (const at::Tensor* value = find(values.tensors, name)) field = *value, ++tensors;
    } else if (const int64_t* value = find(values.numbers, name)) {
      field = *value, ++numbers;
    } else {
      missing = name;
    }
  });
  if (!missing.empty())
    throw std::invalid_argument("a state for " + kind + " without '" + missing + "': it has " + names);
  if (tensors != values.tensors.size() || numbers != values.numbers.size()) {
    std::string got;
    for (const auto& entry : values.tensors) got += " " + entry.first;
    for (const auto& entry : values.numbers) got += " " + entry.first;
    throw std::invalid_argument("a state for " + kind + " has " + names + "; got" + got);
  }
  return state;
}

}  // namespace

std::string optimizer_kind(const Optimizer& optimizer) {
  std::string kind;
  if (!KnownOptions::with(optimizer.defaults(), [&](auto& options) { kind = kind_of(options); }))
    refuse_unknown("options");
  return kind;
}

ParameterState read_state(const OptimizerParamState& state) {
  ParameterState values;
  const bool known = KnownStates::with(state, [&](auto& typed) {
    visit_fields(typed, [&](const char* name, auto& field) {
      if constexpr (std::is_same_v<std::decay_t<decltype(field)>, at::Tensor>) {
        if (field.defined()) values.tensors.emplace_back(name, field);
      } else {
        values.numbers.emplace_back(name, field);
      }
    });
  });
  if (!known) refuse_unknown("states");
  return values;
}

std::unique_ptr<OptimizerParamState> make_state(const std::string& kind, const ParameterState& values) {
  if (kind == "Adam") return filled<AdamParamState>(kind, values);
  if (kind == "AdamW") return filled<AdamWParamState>(kind, values);
  if (kind == "SGD") return filled<SGDParamState>(kind, values);
  if (kind == "RMSprop") return filled<RMSpropParamState>(kind, values);
  if (kind == "Adagrad") return filled<AdagradParamState>(kind, values);
  throw std::invalid_argument("a state for an optimizer of kind '" + kind +
                              "', expected Adam, AdamW, SGD, RMSprop or Adagrad");
}

OptionList read_options(const OptimizerOptions& options) {
  OptionList values;
  const bool known = KnownOptions::with(options, [&](auto& typed) {
    visit_fields(typed, [&](const char* name, auto& field) { values.emplace_back(name, field); });
  });
  if (!known) refuse_unknown("options");
  return values;
}

void write_options(OptimizerOptions& options, const OptionList& values) {
  const OptionList current = read_options(options);
  for (const auto& [name, value] : values) {
    const OptimizerOption* field = find(current, name);
    if (field == nullptr || field->index() != value.index()) {
      std::string names;
      for (const auto& entry : current) names += " " + entry.first;
      throw std::invalid_argument("option '" + name + "' " +
                                  (field == nullptr ? "is not one of" : "has another type in") +
                                  " this optimizer's:" + names);
    }
  }
  KnownOptions::with(options, [&](auto& typed) {
    visit_fields(typed, [&](const char* name, auto& field) {
      if (const OptimizerOption* value = find(values, name)) field = std::get<std::decay_t<decltype(field)>>(*value);
    });
  });
}

}  // namespace tessera
