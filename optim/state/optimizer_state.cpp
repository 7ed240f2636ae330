#include "optim/state/optimizer_state.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <c10/util/Type.h>

#include <array>
#include <charconv>
#include <concepts>
#include <numeric>
#include <stdexcept>
#include <tuple>
#include <type_traits>

#include <tessera/optim/adafactor.h>
#include <tessera/optim/adamw_8bit.h>
#include <tessera/optim/lbfgs.h>
#include <tessera/optim/lion.h>
#include <tessera/optim/muon.h>
#include <tessera/optim/schedule_free.h>

namespace tessera {
namespace internal {
namespace {

using namespace torch::optim;

template <class Type, class... Types>
concept IsAny = (... || std::same_as<Type, Types>);

// Each function calls visit(name, reference) for each field of a state or of options, to read or to write the fields.
void visit_fields(IsAny<AdamParamState, AdamWParamState> auto& state, auto visit) {
  visit("step", state.step());
  visit("exp_avg", state.exp_avg());
  visit("exp_avg_sq", state.exp_avg_sq());
  visit("max_exp_avg_sq", state.max_exp_avg_sq());
}
void visit_fields(SGDParamState& state, auto visit) { visit("momentum_buffer", state.momentum_buffer()); }
void visit_fields(RMSpropParamState& state, auto visit) {
  visit("step", state.step());
  visit("square_avg", state.square_avg());
  visit("momentum_buffer", state.momentum_buffer());
  visit("grad_avg", state.grad_avg());
}
void visit_fields(AdagradParamState& state, auto visit) {
  visit("step", state.step());
  visit("sum", state.sum());
}
void visit_fields(IsAny<AdamOptions, AdamWOptions> auto& options, auto visit) {
  visit("lr", options.lr());
  visit("beta1", std::get<0>(options.betas()));
  visit("beta2", std::get<1>(options.betas()));
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("amsgrad", options.amsgrad());
}
void visit_fields(SGDOptions& options, auto visit) {
  visit("lr", options.lr());
  visit("momentum", options.momentum());
  visit("dampening", options.dampening());
  visit("weight_decay", options.weight_decay());
  visit("nesterov", options.nesterov());
}
void visit_fields(RMSpropOptions& options, auto visit) {
  visit("lr", options.lr());
  visit("alpha", options.alpha());
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("momentum", options.momentum());
  visit("centered", options.centered());
}
void visit_fields(AdagradOptions& options, auto visit) {
  visit("lr", options.lr());
  visit("lr_decay", options.lr_decay());
  visit("weight_decay", options.weight_decay());
  visit("initial_accumulator_value", options.initial_accumulator_value());
  visit("eps", options.eps());
}

void visit_fields(auto& listed, auto visit)
  requires requires { listed.visit(visit); }
{
  listed.visit(visit);
}

template <class Options, class State>
struct Kind {
  const char* name;
};

// Calls act(kind) for each kind until act returns true. Returns whether act returned true.
template <class Act>
bool any_kind(Act act) {
  return act(Kind<AdamOptions, AdamParamState>{"Adam"}) || act(Kind<AdamWOptions, AdamWParamState>{"AdamW"}) ||
         act(Kind<SGDOptions, SGDParamState>{"SGD"}) || act(Kind<RMSpropOptions, RMSpropParamState>{"RMSprop"}) ||
         act(Kind<AdagradOptions, AdagradParamState>{"Adagrad"}) || act(Kind<MuonOptions, MuonParamState>{"Muon"}) ||
         act(Kind<AdamW8bitOptions, AdamW8bitParamState>{"AdamW8bit"}) ||
         act(Kind<LionOptions, LionParamState>{"Lion"}) ||
         act(Kind<AdafactorOptions, AdafactorParamState>{"Adafactor"}) ||
         act(Kind<ScheduleFreeOptions, ScheduleFreeParamState>{"ScheduleFreeAdamW"}) ||
         act(Kind<LbfgsOptions, LbfgsParamState>{"Lbfgs"});
}

std::string kind_names() {
  std::string names;
  any_kind([&](const auto& kind) {
    if (!names.empty()) names += ", ";
    names += kind.name;
    return false;
  });
  return names;
}

// Calls act(object, name of the kind) with `object` cast to its class. Throws if the class is unknown.
template <class Object, class Act>
void with_class_of(const Object& object, Act act) {
  constexpr bool kIsOptions = std::is_same_v<Object, OptimizerOptions>;
  const bool is_known = any_kind([&]<class Options, class State>(Kind<Options, State> kind) {
    using Class = std::conditional_t<kIsOptions, Options, State>;
    const auto* typed = dynamic_cast<const Class*>(&object);
    if (typed != nullptr) act(const_cast<Class&>(*typed), kind.name);
    return typed != nullptr;
  });
  if (!is_known)
    throw std::invalid_argument(std::string("the optimizer's ") + (kIsOptions ? "options" : "states") +
                                " are of a class that Tessera cannot name: expected those of one of " + kind_names());
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
  std::string names, missing;
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

void fill(at::Tensor& field, const at::Tensor& like, bool is_needed) {
  if (is_needed && like.defined() && !field.defined()) field = at::zeros_like(like, at::MemoryFormat::Preserve);
}

}  // namespace

StateForm form_of_state(const std::string& name) {
  return name.ends_with("_scale") ? StateForm::kBlocks
         : name.ends_with("_row") ? StateForm::kRows
         : name.ends_with("_col") ? StateForm::kColumns
                                  : StateForm::kElements;
}

at::ScalarType dtype_of_averages(const std::string& kind, at::ScalarType dtype) {
  return kind == AdamW8bitOptions::kName   ? at::kFloat
         : kind == AdafactorOptions::kName ? at::toOpMathType(dtype)
                                           : dtype;
}

std::vector<int64_t> state_sizes(const std::string& name, const std::vector<int64_t>& sizes) {
  const int64_t numel = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  const StateForm form = form_of_state(name);
  if (form == StateForm::kBlocks) return {(numel + kStateBlockNumel - 1) / kStateBlockNumel};
  if (form == StateForm::kElements) return sizes;
  if (sizes.size() < 2) throw std::invalid_argument("a state '" + name + "' of a parameter of fewer than 2 dimensions");
  const int64_t dropped = sizes[sizes.size() - (form == StateForm::kRows ? 1 : 2)];
  return {dropped == 0 ? 0 : numel / dropped};
}

NamedShard state_shard(const std::string& name, const NamedShard& parameter, const Communicator& comm) {
  const StateForm form = form_of_state(name);
  if (form == StateForm::kElements) return parameter;
  NamedShard shard = parameter;
  shard.sizes = state_sizes(name, parameter.sizes);
  shard.strides = {1};
  shard.tensor = at::empty({0}, at::TensorOptions(at::kCPU).dtype(at::kFloat));
  const Range held = parameter.held;
  if (form == StateForm::kBlocks) {
    shard.held = held.numel() == 0
                     ? Range{}
                     : Range{held.begin / kStateBlockNumel, (held.end + kStateBlockNumel - 1) / kStateBlockNumel};
  } else {
    shard.held = {0, shard.sizes[0]};
    shard.replica = comm.rank();
    shard.replica_count = comm.size();
  }
  return shard;
}

Range saved_part(const std::string& name, const NamedShard& parameter) {
  const Range held = parameter.held;
  const StateForm form = form_of_state(name);
  if (form == StateForm::kElements) return held;
  if (form != StateForm::kBlocks) return {0, state_sizes(name, parameter.sizes)[0]};
  if (held.numel() == 0) return {};
  return {(held.begin + kStateBlockNumel - 1) / kStateBlockNumel, (held.end + kStateBlockNumel - 1) / kStateBlockNumel};
}

std::string optimizer_kind(const Optimizer& optimizer) {
  std::string kind;
  with_class_of(optimizer.defaults(), [&](auto&, const char* name) { kind = name; });
  return kind;
}

ParameterState read_ordered_state(const OptimizerParamState& state, const at::Tensor& parameter) {
  const auto* in_blocks = dynamic_cast<const AdamW8bitParamState*>(&state);
  if (in_blocks == nullptr) return read_state(state);
  AdamW8bitParamState own = *in_blocks;
  own.lay_out_as(parameter);
  return read_state(own);
}

std::unique_ptr<OptimizerParamState> make_state(const std::string& kind, const ParameterState& values) {
  std::unique_ptr<OptimizerParamState> state;
  any_kind([&]<class Options, class State>(Kind<Options, State> known) {
    if (known.name == kind) state = filled<State>(kind, values);
    return state != nullptr;
  });
  if (!state)
    throw std::invalid_argument("a state for an optimizer of kind '" + kind + "', expected one of " + kind_names());
  return state;
}

void complete_state(OptimizerParamState& state, const OptimizerOptions& options) {
  const auto complete_adam = [&]<class Options, class State>(Kind<Options, State>) {
    const auto* typed = dynamic_cast<const Options*>(&options);
    auto* own = dynamic_cast<State*>(&state);
    if (typed != nullptr && own != nullptr) fill(own->max_exp_avg_sq(), own->exp_avg_sq(), typed->amsgrad());
  };
  complete_adam(Kind<AdamOptions, AdamParamState>());
  complete_adam(Kind<AdamWOptions, AdamWParamState>());
  const auto* typed = dynamic_cast<const RMSpropOptions*>(&options);
  auto* own = dynamic_cast<RMSpropParamState*>(&state);
  if (typed == nullptr || own == nullptr) return;
  fill(own->momentum_buffer(), own->square_avg(), typed->momentum() > 0);
  fill(own->grad_avg(), own->square_avg(), typed->centered());
}

std::string text_of(const OptimizerOption& option) {
  if (const bool* flag = std::get_if<bool>(&option)) return *flag ? "true" : "false";
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.begin(), digits.end(), std::get<double>(option)).ptr;
  return {digits.begin(), end};
}

std::string text_of(const OptimizerOptions& options) {
  std::string text = c10::demangle(typeid(options).name());  // for user-defined classes, whose fields are unknown
  any_kind([&]<class Options, class State>(Kind<Options, State> kind) {
    if (dynamic_cast<const Options*>(&options) == nullptr) return false;
    text = kind.name + std::string(":");
    for (const auto& [name, value] : read_options(options)) text += " " + name + "=" + text_of(value);
    return true;
  });
  return text;
}

}  // namespace internal

OptionList read_options(const torch::optim::OptimizerOptions& options) {
  OptionList values;
  internal::with_class_of(options, [&](auto& typed, const char*) {
    internal::visit_fields(typed, [&](const char* name, auto& field) { values.emplace_back(name, field); });
  });
  return values;
}

void write_options(torch::optim::OptimizerOptions& options, const OptionList& values) {
  const OptionList current = read_options(options);
  for (const auto& [name, value] : values) {
    const OptimizerOption* field = internal::find(current, name);
    if (field == nullptr || field->index() != value.index()) {
      std::string names;
      for (const auto& entry : current) names += " " + entry.first;
      throw std::invalid_argument("option '" + name + "' " +
                                  (field == nullptr ? "is not one of" : "has another type in") +
                                  " this optimizer's:" + names);
    }
  }
  internal::with_class_of(options, [&](auto& typed, const char*) {
    internal::visit_fields(typed, [&](const char* name, auto& field) {
      if (const OptimizerOption* value = internal::find(values, name))
        field = std::get<std::decay_t<decltype(field)>>(*value);
    });
  });
}

OptimizerStateDict::ParameterState read_state(const torch::optim::OptimizerParamState& state) {
  OptimizerStateDict::ParameterState values;
  internal::with_class_of(state, [&](auto& typed, const char*) {
    internal::visit_fields(typed, [&](const char* name, auto& field) {
      if constexpr (std::is_same_v<std::decay_t<decltype(field)>, at::Tensor>) {
        if (field.defined()) values.tensors.emplace_back(name, field);
      } else {
        values.numbers.emplace_back(name, field);
      }
    });
  });
  return values;
}

}  // namespace tessera
