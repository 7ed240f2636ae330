#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace tessera::internal {

// Returns `own` of every rank, in rank order. Collective. If a rank is late, throws; over MPI, blocks instead.
using TextExchange = std::function<std::vector<std::string>(const std::string& own)>;

// Returns a TextExchange through a store, under keys that begin with `prefix`. Rank 0 reads all texts and publishes
// them under one key; each other rank reads only this key. The exchange throws CommError, which names the missing
// ranks, after `timeout`. It throws std::invalid_argument if ranks pass different sizes or the same rank.
TextExchange exchange_through(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix, int rank,
                              int size, std::chrono::milliseconds timeout);

// Runs `own` on each rank and exchanges the results. If `own` throws on a rank, all ranks throw an error that begins
// with `who` and names that rank. It is std::invalid_argument if `own` threw one, otherwise CommError.
std::vector<std::string> exchange_or_fail(const TextExchange& exchange, const std::string& who,
                                          const std::function<std::string()>& own);

}  // namespace tessera::internal
