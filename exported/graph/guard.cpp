#include "exported/graph/guard.h"

#include <charconv>
#include <span>
#include <stdexcept>
#include <string_view>
#include <utility>

#include <tessera/errors.h>
#include "exported/graph/steps.h"

namespace tessera::internal {

// ---- reading ------------------------------------------------------------------------------------

// Parses the subset of Python expressions that occurs in guards. Each function parses one level of operator precedence.
class Guard::Parser {
 public:
  Parser(const std::string& text, const FindInput& find_input) : whole_(text), text_(text), find_input_(find_input) {}

  Node parse() {
    Node node = either();
    skip();
    if (!text_.empty()) refuse("");
    return node;
  }

 private:
  struct Operator {
    std::string_view sign, name;
  };
  static constexpr int kMaxDepth = 100, kMaxTerms = 1000;

  [[noreturn]] void refuse(const std::string& why) const {
    throw ExportedError("what it was exported for, '" + whole_.substr(0, 300) + "', cannot be read" + why);
  }
  void skip() {
    while (!text_.empty() && text_.front() == ' ') text_.remove_prefix(1);
  }
  bool take(std::string_view sign) {
    skip();
    if (!text_.starts_with(sign)) return false;
    text_.remove_prefix(sign.size());
    return true;
  }
  // Limits the tree's depth: a chain of terms, such as "a and b and c", becomes a tree as deep as the chain is long.
  void count_term() {
    if (++terms_ > kMaxTerms) refuse("");
  }
  void expect(std::string_view sign) {
    if (!take(sign)) refuse("");
  }
  static bool is_of_word(char c) { return isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }
  std::string_view next_word() {
    skip();
    size_t count = 0;
    while (count < text_.size() && is_of_word(text_[count])) ++count;
    return text_.substr(0, count);
  }
  bool take_word(std::string_view word) { return next_word() == word && take(word); }

  static Node node_of(Kind kind, std::vector<Node> operands) {
    Node node;
    node.kind = kind;
    node.operands = std::move(operands);
    return node;
  }
  static Node call(NumberStep::Function function, std::vector<Node> operands) {
    Node node = node_of(Kind::kCall, std::move(operands));
    node.function = function;
    return node;
  }
  static Node operation(std::string_view name, std::vector<Node> operands) {
    const auto function = NumberStep::find("_operator." + std::string(name), operands.size());
    if (function == nullptr) throw std::logic_error("an operator of guards is not known: " + std::string(name));
    return call(function, std::move(operands));
  }

  Node logical(Kind kind, std::string_view word, Node (Parser::*part)()) {
    Node node = (this->*part)();
    while (take_word(word)) {
      count_term();
      node = node_of(kind, {std::move(node), (this->*part)()});
    }
    return node;
  }
  Node either() {
    if (++depth_ > kMaxDepth) refuse("");
    Node node = logical(Kind::kOr, "or", &Parser::both);
    --depth_;
    return node;
  }
  Node both() { return logical(Kind::kAnd, "and", &Parser::negation); }
  Node negation() {
    if (!take_word("not")) return comparison();
    if (++depth_ > kMaxDepth) refuse("");
    Node node = node_of(Kind::kNot, {negation()});
    --depth_;
    return node;
  }

  // Parses a chain of comparisons. As in Python, a < b < c means a < b and b < c.
  Node comparison() {
    static constexpr Operator kComparisons[] = {{"==", "eq"}, {"!=", "ne"}, {"<=", "le"},
                                                {">=", "ge"}, {"<", "lt"},  {">", "gt"}};
    Node left = binary();
    std::optional<Node> all;
    while (const Operator* sign = next_of(kComparisons)) {
      Node right = binary();
      Node own = operation(sign->name, {left, right});
      all = all ? node_of(Kind::kAnd, {std::move(*all), std::move(own)}) : std::move(own);
      left = std::move(right);
    }
    return all ? std::move(*all) : std::move(left);
  }

  const Operator* next_of(std::span<const Operator> operators) {
    for (const Operator& each : operators) {
      skip();
      // Does not accept "<" as a part of "<<", or "*" as a part of "**".
      const bool is_doubled = each.sign.size() == 1 && text_.size() > 1 && text_[0] == text_[1];
      if (!is_doubled && take(each.sign)) return count_term(), &each;
    }
    return nullptr;
  }
  // Parses an expression whose binary operators have the precedence `level` (an index in `levels`) or a higher one.
  Node binary(size_t level = 0) {
    static const std::vector<std::vector<Operator>> levels = {
        {{"|", "or_"}},
        {{"&", "and_"}},
        {{"<<", "lshift"}, {">>", "rshift"}},
        {{"+", "add"}, {"-", "sub"}},
        {{"//", "floordiv"}, {"*", "mul"}, {"/", "truediv"}, {"%", "mod"}}};
    if (level == levels.size()) return signed_value();
    Node node = binary(level + 1);
    while (const Operator* sign = next_of(levels[level])) {
      Node right = binary(level + 1);
      node = operation(sign->name, {std::move(node), std::move(right)});
    }
    return node;
  }
  Node signed_value() {
    if (++depth_ > kMaxDepth) refuse("");
    Node node = take("-") ? operation("neg", {signed_value()}) : take("+") ? signed_value() : power();
    --depth_;
    return node;
  }
  Node power() {
    Node base = primary();
    return take("**") ? operation("pow", {std::move(base), signed_value()}) : base;
  }

  Node primary() {
    if (take("(")) {
      Node node = either();
      expect(")");
      return node;
    }
    skip();
    if (!text_.empty() && (isdigit(static_cast<unsigned char>(text_.front())) != 0 || text_.front() == '.'))
      return number();
    std::string name(next_word());
    if (name.empty()) refuse("");
    text_.remove_prefix(name.size());
    if (name == "L") return input();
    Node node;
    node.constant = name == "True";
    if (name == "True" || name == "False") return node;
    while (take(".")) {
      const std::string_view more = next_word();
      name += "." + std::string(more);
      text_.remove_prefix(more.size());
    }
    return function(name);
  }

  Node number() {
    Node node;
    int64_t integer = 0;
    double real = 0;
    const char *begin = text_.data(), *end = begin + text_.size();
    const auto as_integer = std::from_chars(begin, end, integer);
    const auto as_real = std::from_chars(begin, end, real);
    const bool is_integer = as_integer.ec == std::errc() && as_integer.ptr == as_real.ptr;
    if (!is_integer && as_real.ec != std::errc()) refuse("");
    node.constant = is_integer ? c10::IValue(integer) : c10::IValue(real);
    text_.remove_prefix(static_cast<size_t>(as_real.ptr - begin));
    return node;
  }

  // Parses the call of a function: math.floor(a), max(a, b, c).
  Node function(const std::string& name) {
    expect("(");
    std::vector<Node> operands;
    do operands.push_back(either());
    while (take(","));
    expect(")");
    const bool is_of_two = name == "max" || name == "min";
    const bool is_symbolic = is_of_two || name == "int" || name == "float";
    const bool is_qualified = name.find('.') != std::string::npos;
    const std::string target = (is_symbolic ? "torch.sym_" : is_qualified ? "" : "builtins.") + name;
    const auto found = NumberStep::find(target, is_of_two ? 2 : operands.size());
    if (found == nullptr) refuse(": nothing is known of the function '" + name + "'");
    if (!is_of_two) return call(found, std::move(operands));
    Node node = std::move(operands[0]);
    for (size_t i = 1; i < operands.size(); ++i) node = call(found, {std::move(node), std::move(operands[i])});
    return node;
  }

  // Parses the rest of an input reference, after its L: ['d']['ids'].size()[0], ['data'].ids.stride()[1], ['n'].
  Node input() {
    expect("['");
    std::string label = until("'");
    expect("]");
    std::string method;
    while (method.empty()) {
      if (take("['")) {
        label += "['" + until("'") + "']";
        expect("]");
      } else if (take("[")) {
        const std::string index = until("]");
        label += "[" + index + "]";
      } else if (take(".")) {
        const std::string word(next_word());
        text_.remove_prefix(word.size());
        word == "size" || word == "stride" || word == "storage_offset" ? void(method = word)
                                                                       : void(label += "['" + word + "']");
      } else {
        break;
      }
    }
    return value_of(label, method);
  }
  std::string until(std::string_view sign) {
    const size_t count = text_.find(sign);
    if (count == std::string_view::npos) refuse("");
    std::string part(text_.substr(0, count));
    text_.remove_prefix(count + sign.size());
    return part;
  }

  Node value_of(const std::string& label, const std::string& method) {
    const auto found = find_input_(label);
    if (!found) refuse(": there is no input '" + label + "'");
    Node node;
    node.input = found->index;
    if (method.empty()) {
      if (found->dimensions) refuse(": the input '" + label + "' is a tensor");
      if (found->constant) node.constant = *found->constant;
      if (!found->constant) node.kind = Kind::kNumber;
      return node;
    }
    expect("()");
    if (!found->dimensions) refuse(": the input '" + label + "' is no tensor");
    node.kind = method == "size" ? Kind::kSize : method == "stride" ? Kind::kStride : Kind::kOffset;
    if (node.kind == Kind::kOffset) return node;
    expect("[");
    const Node index = number();
    expect("]");
    if (!index.constant.isInt() || index.constant.toInt() < 0 || index.constant.toInt() >= *found->dimensions)
      refuse(": the input '" + label + "' has " + std::to_string(*found->dimensions) + " dimensions");
    node.dimension = index.constant.toInt();
    return node;
  }

  const std::string whole_;
  std::string_view text_;
  const FindInput& find_input_;
  int depth_ = 0, terms_ = 0;
};

Guard Guard::parse(const std::string& text, const FindInput& find_input) {
  return {text, Parser(text, find_input).parse()};
}

// ---- values -------------------------------------------------------------------------------------

namespace {

bool is_true(const c10::IValue& value) { return value.isBool() ? value.toBool() : value.toScalar().toDouble() != 0; }

}  // namespace

c10::IValue Guard::evaluate(const Node& node, const std::vector<c10::IValue>& inputs) {
  switch (node.kind) {
    case Kind::kConstant:
      return node.constant;
    case Kind::kNumber:
      return inputs[node.input];
    case Kind::kSize:
      return inputs[node.input].toTensor().size(node.dimension);
    case Kind::kStride:
      return inputs[node.input].toTensor().stride(node.dimension);
    case Kind::kOffset:
      return inputs[node.input].toTensor().storage_offset();
    case Kind::kAnd:
      return is_true(evaluate(node.operands[0], inputs)) && is_true(evaluate(node.operands[1], inputs));
    case Kind::kOr:
      return is_true(evaluate(node.operands[0], inputs)) || is_true(evaluate(node.operands[1], inputs));
    case Kind::kNot:
      return !is_true(evaluate(node.operands[0], inputs));
    case Kind::kCall:
      break;
  }
  std::vector<c10::IValue> operands;
  for (const Node& operand : node.operands) operands.push_back(evaluate(operand, inputs));
  return node.function(operands);
}

bool Guard::holds(const std::vector<c10::IValue>& inputs) const try {
  return is_true(evaluate(node_, inputs));
} catch (const c10::Error& error) {
  throw std::invalid_argument("the guard " + text_ + " cannot be evaluated: " + error.what_without_backtrace());
}

}  // namespace tessera::internal
