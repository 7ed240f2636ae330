#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::internal {

// An integer expression over symbolic sizes of inputs, in the notation of torch.export (sympy's srepr):
//
//   Add(Mul(Integer(2), Symbol('s0', positive=True, integer=True)), Integer(1))
class Expression {
 public:
  using Symbols = std::map<std::string, int64_t>;

  // Parses an expression of Integer, Symbol, Add, Mul, Pow, FloorDiv, CleanDiv, Mod, PythonMod, Max and Min. Throws
  // ExportedError for a syntax error or any other function.
  static Expression parse(std::string_view text);
  static Expression constant(int64_t value);

  // Returns the value. Returns nullopt for a symbol without a value, division by zero, a negative exponent or overflow.
  std::optional<int64_t> evaluate(const Symbols& symbols) const;

  // If the expression is a single symbol, returns the symbol. Otherwise returns nullopt.
  std::optional<std::string> symbol() const;
  std::vector<std::string> symbols() const;
  // Returns a text such as "((2*s0) + 1)", for messages.
  std::string to_string() const;

 private:
  enum class Kind : uint8_t { kInteger, kSymbol, kAdd, kMul, kPow, kFloorDiv, kMod, kMax, kMin };
  struct Node {
    Kind kind = Kind::kInteger;
    int64_t integer = 0;
    std::string symbol;
    std::vector<Node> operands;
  };
  class Parser;
  static std::optional<int64_t> evaluate(const Node& node, const Symbols& symbols);
  static void collect_symbols(const Node& node, std::vector<std::string>& symbols);
  static std::string to_string(const Node& node);

  explicit Expression(Node node) : node_(std::move(node)) {}
  Node node_;
};

// Compute Python's //, % and **. Return nullopt for division by zero, overflow or a negative exponent.
std::optional<int64_t> floor_division(int64_t a, int64_t b);
std::optional<int64_t> floor_modulo(int64_t a, int64_t b);
std::optional<int64_t> integer_power(int64_t base, int64_t exponent);

}  // namespace tessera::internal
