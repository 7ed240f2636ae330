// Implements NumberStep: Python's arithmetic on integers, floats and bools.

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "exported/graph/expression.h"
#include "exported/graph/steps.h"

namespace tessera::internal {
namespace {

using Numbers = std::vector<c10::IValue>;

bool both_integers(const Numbers& n) { return !n[0].isDouble() && !n[1].isDouble(); }
int64_t integer(const c10::IValue& value) { return value.isBool() ? int64_t{value.toBool()} : value.toInt(); }
double real(const c10::IValue& value) { return value.toScalar().toDouble(); }
bool truth(const c10::IValue& value) { return value.isDouble() ? value.toDouble() != 0 : integer(value) != 0; }

c10::IValue checked(const std::optional<int64_t>& value) {
  TORCH_CHECK(value, "a number that comes from shapes does not fit into 64 bit, or is divided by zero");
  return *value;
}

// Returns the second number. Throws if it is zero, as Python does.
double divisor(const Numbers& n) {
  TORCH_CHECK(real(n[1]) != 0, "division by zero");
  return real(n[1]);
}

c10::IValue add(const Numbers& n) {
  if (!both_integers(n)) return real(n[0]) + real(n[1]);
  int64_t sum = 0;
  return checked(__builtin_add_overflow(integer(n[0]), integer(n[1]), &sum) ? std::nullopt : std::optional(sum));
}
c10::IValue subtract(const Numbers& n) {
  if (!both_integers(n)) return real(n[0]) - real(n[1]);
  int64_t sum = 0;
  return checked(__builtin_sub_overflow(integer(n[0]), integer(n[1]), &sum) ? std::nullopt : std::optional(sum));
}
c10::IValue multiply(const Numbers& n) {
  if (!both_integers(n)) return real(n[0]) * real(n[1]);
  int64_t product = 0;
  return checked(__builtin_mul_overflow(integer(n[0]), integer(n[1]), &product) ? std::nullopt
                                                                                : std::optional(product));
}
c10::IValue modulo(const Numbers& n) {
  if (both_integers(n)) return checked(floor_modulo(integer(n[0]), integer(n[1])));
  const double b = divisor(n), rest = std::fmod(real(n[0]), b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
c10::IValue floor_divide(const Numbers& n) {
  if (both_integers(n)) return checked(floor_division(integer(n[0]), integer(n[1])));
  return std::round((real(n[0]) - real(modulo(n))) / divisor(n));  // floor() of the quotient may be 1 too large
}
c10::IValue power(const Numbers& n) {
  if (both_integers(n) && integer(n[1]) >= 0) return checked(integer_power(integer(n[0]), integer(n[1])));
  return std::pow(real(n[0]), real(n[1]));
}
c10::IValue divide(const Numbers& n) { return real(n[0]) / divisor(n); }
c10::IValue negative(const Numbers& n) { return n[0].isDouble() ? c10::IValue(-n[0].toDouble()) : subtract({0, n[0]}); }
c10::IValue positive(const Numbers& n) { return n[0].isBool() ? c10::IValue(integer(n[0])) : n[0]; }

template <class Compare>
bool compare(const Numbers& n) {
  const Compare is;
  return both_integers(n) ? is(integer(n[0]), integer(n[1])) : is(real(n[0]), real(n[1]));
}
template <class Compare>
c10::IValue comparison(const Numbers& n) {
  return compare<Compare>(n);
}

c10::IValue both(const Numbers& n) {
  if (n[0].isBool() && n[1].isBool()) return n[0].toBool() && n[1].toBool();
  return integer(n[0]) & integer(n[1]);
}
c10::IValue either(const Numbers& n) {
  if (n[0].isBool() && n[1].isBool()) return n[0].toBool() || n[1].toBool();
  return integer(n[0]) | integer(n[1]);
}
c10::IValue shift_left(const Numbers& n) {
  const int64_t by = integer(n[1]);
  TORCH_CHECK(by >= 0 && by < 63, "a shift by ", by);
  return multiply({n[0], int64_t{1} << by});
}
c10::IValue shift_right(const Numbers& n) {
  const int64_t by = integer(n[1]);
  TORCH_CHECK(by >= 0, "a shift by ", by);
  return integer(n[0]) >> std::min<int64_t>(by, 63);
}

c10::IValue invert(const Numbers& n) { return !truth(n[0]); }
c10::IValue choose(const Numbers& n) { return truth(n[0]) ? n[1] : n[2]; }
c10::IValue largest(const Numbers& n) { return compare<std::less<>>(n) ? n[1] : n[0]; }
c10::IValue smallest(const Numbers& n) { return compare<std::greater<>>(n) ? n[1] : n[0]; }
c10::IValue to_real(const Numbers& n) { return real(n[0]); }
c10::IValue rounded(double value) {
  TORCH_CHECK(value >= -0x1p63 && value < 0x1p63, value, " does not fit into 64 bit");
  return static_cast<int64_t>(value);
}
c10::IValue truncate(const Numbers& n) { return n[0].isDouble() ? rounded(std::trunc(real(n[0]))) : positive(n); }
c10::IValue floor_of(const Numbers& n) { return n[0].isDouble() ? rounded(std::floor(real(n[0]))) : positive(n); }
c10::IValue ceiling_of(const Numbers& n) { return n[0].isDouble() ? rounded(std::ceil(real(n[0]))) : positive(n); }
c10::IValue round_of(const Numbers& n) { return n[0].isDouble() ? rounded(std::nearbyint(real(n[0]))) : positive(n); }
c10::IValue square_root(const Numbers& n) { return std::sqrt(real(n[0])); }

struct Named {
  std::string_view name;
  size_t arguments;
  NumberStep::Function function;
};
constexpr Named kFunctions[] = {
    {"add", 2, &add},
    {"sub", 2, &subtract},
    {"mul", 2, &multiply},
    {"floordiv", 2, &floor_divide},
    {"mod", 2, &modulo},
    {"pow", 2, &power},
    {"truediv", 2, &divide},
    {"neg", 1, &negative},
    {"pos", 1, &positive},
    {"eq", 2, &comparison<std::equal_to<>>},
    {"ne", 2, &comparison<std::not_equal_to<>>},
    {"le", 2, &comparison<std::less_equal<>>},
    {"ge", 2, &comparison<std::greater_equal<>>},
    {"lt", 2, &comparison<std::less<>>},
    {"gt", 2, &comparison<std::greater<>>},
    {"and_", 2, &both},
    {"or_", 2, &either},
    {"lshift", 2, &shift_left},
    {"rshift", 2, &shift_right},
    {"sym_not", 1, &invert},
    {"sym_ite", 3, &choose},
    {"sym_max", 2, &largest},
    {"sym_min", 2, &smallest},
    {"sym_int", 1, &truncate},
    {"sym_float", 1, &to_real},
    {"_sym_sqrt", 1, &square_root},
    {"sym_sqrt", 1, &square_root},
    {"sqrt", 1, &square_root},
    {"trunc", 1, &truncate},
    {"floor", 1, &floor_of},
    {"ceil", 1, &ceiling_of},
    {"round", 1, &round_of},
};

}  // namespace

NumberStep::Function NumberStep::find(const std::string& target, size_t arguments) {
  for (const std::string_view module : {"_operator.", "operator.", "torch.", "math.", "builtins."}) {
    if (!target.starts_with(module)) continue;
    for (const Named& named : kFunctions)
      if (std::string_view(target).substr(module.size()) == named.name && arguments == named.arguments)
        return named.function;
  }
  return nullptr;
}

void NumberStep::run(Frame& frame) const {
  Numbers numbers;
  for (const Operand& operand : operands()) numbers.push_back(operand.get(frame));
  set_result(frame, 0, function_(numbers));
}

}  // namespace tessera::internal
