#include "tessera/checkpoint/outcome.h"

#include <c10/util/Exception.h>

#include <stdexcept>

#include "tessera/checkpoint/errors.h"
#include "tessera/comm/agreement.h"

namespace tessera {

// One letter, then the text: misuse, failure, or well.
std::string Outcome::to_text() const { return error.empty() ? "W" + result : (misuse ? "M" : "F") + error; }

Outcome Outcome::from_text(const std::string& text) {
  const char kind = text.empty() ? 'F' : text[0];
  const std::string rest = text.empty() ? "no answer" : text.substr(1);
  if (kind == 'W') return {.result = rest};
  return {.misuse = kind == 'M', .error = rest};
}

Outcome attempt(const std::function<std::string()>& part) {
  auto named = [](std::string error) { return error.empty() ? std::string("an error without a message") : error; };
  try {
    return {.result = part()};
  } catch (const CommError&) {
    throw;
  } catch (const std::invalid_argument& error) {
    return {.misuse = true, .error = named(error.what())};
  } catch (const c10::Error& error) {
    return {.error = named(error.what_without_backtrace())};
  } catch (const std::exception& error) {
    return {.error = named(error.what())};
  }
}

void throw_failures(const std::vector<Outcome>& outcomes, const std::string& what) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank].error.empty()) continue;
    std::string message = what + ": rank " + std::to_string(rank) + ": " + outcomes[rank].error;
    size_t more = 0;
    for (size_t other = rank + 1; other < outcomes.size(); ++other) more += outcomes[other].error.empty() ? 0 : 1;
    if (more > 0) message += " (and " + std::to_string(more) + (more == 1 ? " more rank" : " more ranks") + ")";
    if (outcomes[rank].misuse) throw std::invalid_argument(message);
    throw CheckpointError(message);
  }
}

std::vector<std::string> settle(Communicator& comm, const Outcome& own, const std::string& what) {
  std::vector<Outcome> outcomes;
  for (const auto& text : gather_texts(comm, own.to_text(), what)) outcomes.push_back(Outcome::from_text(text));
  throw_failures(outcomes, what);
  std::vector<std::string> results;
  for (auto& outcome : outcomes) results.push_back(std::move(outcome.result));
  return results;
}

}  // namespace tessera
