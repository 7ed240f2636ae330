#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace tessera::internal {

// A function that returns the texts of all ranks, in rank order. Collective. Throws a std::exception if a rank is late.
using TextExchange = std::function<std::vector<std::string>(const std::string& own)>;

// Exchanges texts through a store, under keys that begin with `prefix`. Rank 0 reads all texts and publishes them under
// one key, so a rank's cost does not grow with the number of ranks. Throws CommError, which names the missing ranks,
// after `timeout`. Throws std::invalid_argument if ranks pass different sizes, or if two callers pass the same rank.
TextExchange exchange_through(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix, int rank,
                              int size, std::chrono::milliseconds timeout);

// Runs `own` on each rank and exchanges the results. If `own` throws on a rank, all ranks throw, with that rank and its
// error: std::invalid_argument if `own` threw one, otherwise CommError. So no rank waits for a failed rank.
std::vector<std::string> exchange_or_fail(const TextExchange& exchange, const std::string& who,
                                          const std::function<std::string()>& own);

}  // namespace tessera::internal
