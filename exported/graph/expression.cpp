#include "exported/graph/expression.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include <tessera/errors.h>

namespace tessera::internal {

std::optional<int64_t> floor_division(int64_t a, int64_t b) {
  if (b == 0 || (a == INT64_MIN && b == -1)) return std::nullopt;
  const int64_t quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

std::optional<int64_t> floor_modulo(int64_t a, int64_t b) {
  if (b == 0) return std::nullopt;
  if (b == -1) return 0;
  const int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

std::optional<int64_t> integer_power(int64_t base, int64_t exponent) {
  if (exponent < 0) return std::nullopt;
  int64_t result = 1;
  if (base == 0 || base == 1) return exponent == 0 ? 1 : base;
  if (base == -1) return exponent % 2 == 0 ? 1 : -1;
  for (; exponent > 0; --exponent)
    if (__builtin_mul_overflow(result, base, &result)) return std::nullopt;
  return result;
}

// ---- reading ------------------------------------------------------------------------------------

class Expression::Parser {
 public:
  explicit Parser(std::string_view text) : whole_(text), text_(text) {}

  Node parse() {
    Node node = expression(0);
    skip();
    if (!text_.empty()) refuse();
    return node;
  }

 private:
  static constexpr int kMaxDepth = 100;

  [[noreturn]] void refuse() const {
    throw ExportedError("the expression '" + std::string(whole_.substr(0, 200)) + "' cannot be read");
  }
  void skip() {
    while (!text_.empty() && text_.front() == ' ') text_.remove_prefix(1);
  }
  bool take(char expected) {
    skip();
    if (text_.empty() || text_.front() != expected) return false;
    text_.remove_prefix(1);
    return true;
  }
  std::string_view word() {
    skip();
    size_t count = 0;
    while (count < text_.size() &&
           (isalnum(static_cast<unsigned char>(text_[count])) != 0 || text_[count] == '_' || text_[count] == '-'))
      ++count;
    const std::string_view word = text_.substr(0, count);
    text_.remove_prefix(count);
    return word;
  }
  int64_t integer() {
    const std::string_view digits = word();
    int64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size() || digits.empty()) refuse();
    return value;
  }
  std::string quoted() {
    if (!take('\'')) refuse();
    const size_t count = text_.find('\'');
    if (count == std::string_view::npos || count == 0) refuse();
    std::string name(text_.substr(0, count));
    text_.remove_prefix(count + 1);
    return name;
  }

  Node expression(int depth) {
    if (depth > kMaxDepth) refuse();
    const std::string_view name = word();
    if (!take('(')) refuse();
    Node node;
    if (name == "Integer") {
      node.integer = integer();
    } else if (name == "Symbol") {
      node.kind = Kind::kSymbol;
      node.symbol = quoted();
      while (take(',')) {  // skips sympy's assumptions: positive=True, integer=True
        word();
        if (!take('=')) refuse();
        word();
      }
    } else {
      node.kind = kind_of(name);
      do node.operands.push_back(expression(depth + 1));
      while (take(','));
      const bool is_binary = node.kind == Kind::kPow || node.kind == Kind::kFloorDiv || node.kind == Kind::kMod;
      if (is_binary && node.operands.size() != 2) refuse();
    }
    if (!take(')')) refuse();
    return node;
  }

  Kind kind_of(std::string_view name) const {
    static constexpr std::pair<std::string_view, Kind> kKinds[] = {
        {"Add", Kind::kAdd},           {"Mul", Kind::kMul},           {"Pow", Kind::kPow},
        {"FloorDiv", Kind::kFloorDiv}, {"CleanDiv", Kind::kFloorDiv}, {"Mod", Kind::kMod},
        {"Max", Kind::kMax},           {"PythonMod", Kind::kMod},     {"Min", Kind::kMin}};
    for (const auto& [own, kind] : kKinds)
      if (own == name) return kind;
    refuse();
  }

  const std::string_view whole_;
  std::string_view text_;
};

Expression Expression::parse(std::string_view text) { return Expression(Parser(text).parse()); }

Expression Expression::constant(int64_t value) {
  Node node;
  node.integer = value;
  return Expression(std::move(node));
}

// ---- values -------------------------------------------------------------------------------------

std::optional<int64_t> Expression::evaluate(const Symbols& symbols) const { return evaluate(node_, symbols); }

std::optional<int64_t> Expression::evaluate(const Node& node, const Symbols& symbols) {
  if (node.kind == Kind::kInteger) return node.integer;
  if (node.kind == Kind::kSymbol) {
    const auto found = symbols.find(node.symbol);
    return found == symbols.end() ? std::nullopt : std::optional(found->second);
  }
  std::optional<int64_t> result;
  for (const Node& operand : node.operands) {
    const auto value = evaluate(operand, symbols);
    if (!value) return std::nullopt;
    if (!result) {
      result = value;
      continue;
    }
    int64_t sum = 0;
    switch (node.kind) {
      case Kind::kAdd:
        result = __builtin_add_overflow(*result, *value, &sum) ? std::nullopt : std::optional(sum);
        break;
      case Kind::kMul:
        result = __builtin_mul_overflow(*result, *value, &sum) ? std::nullopt : std::optional(sum);
        break;
      case Kind::kPow:
        result = integer_power(*result, *value);
        break;
      case Kind::kFloorDiv:
        result = floor_division(*result, *value);
        break;
      case Kind::kMod:
        result = floor_modulo(*result, *value);
        break;
      case Kind::kMax:
        result = std::max(*result, *value);
        break;
      default:
        result = std::min(*result, *value);
    }
    if (!result) return std::nullopt;
  }
  return result;
}

std::optional<std::string> Expression::symbol() const {
  return node_.kind == Kind::kSymbol ? std::optional(node_.symbol) : std::nullopt;
}

std::vector<std::string> Expression::symbols() const {
  std::vector<std::string> symbols;
  collect_symbols(node_, symbols);
  return symbols;
}

void Expression::collect_symbols(const Node& node, std::vector<std::string>& symbols) {
  if (node.kind == Kind::kSymbol && std::ranges::find(symbols, node.symbol) == symbols.end())
    symbols.push_back(node.symbol);
  for (const Node& operand : node.operands) collect_symbols(operand, symbols);
}

std::string Expression::to_string() const { return to_string(node_); }

std::string Expression::to_string(const Node& node) {
  if (node.kind == Kind::kInteger) return std::to_string(node.integer);
  if (node.kind == Kind::kSymbol) return node.symbol;
  static constexpr const char* kSigns[] = {"", "", " + ", "*", "**", "//", " % ", ", ", ", "};
  std::string text = node.kind == Kind::kMax ? "max(" : node.kind == Kind::kMin ? "min(" : "(";
  for (size_t i = 0; i < node.operands.size(); ++i)
    text += (i > 0 ? kSigns[static_cast<size_t>(node.kind)] : "") + to_string(node.operands[i]);
  return text + ")";
}

}  // namespace tessera::internal
