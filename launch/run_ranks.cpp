#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tessera/comm/backends.h"
#include "tessera/launch/launch.h"
#include "tessera/memory/memory_cache.h"
#include "tessera/trace/trace.h"

namespace tessera {
namespace {

std::string reason_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return exception.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace

void run_ranks(int world, std::function<void(std::shared_ptr<Communicator>)> body) {
  run_ranks(world, std::move(body), {});
}

void run_ranks(int world, std::function<void(std::shared_ptr<Communicator>)> body, InitOptions options) {
  if (world < 1) throw std::invalid_argument("run_ranks: world is " + std::to_string(world) + ", expected at least 1");
  if (!options.backend.empty() && options.backend != "gloo")
    throw std::invalid_argument("run_ranks: backend '" + options.backend + "', expected gloo: ranks are threads");
  if (options.device && !options.device->is_cpu())
    throw std::invalid_argument("run_ranks: device " + options.device->str() + ", expected cpu");

  if (options.cache_memory) cache_memory();
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex;
  std::exception_ptr first_error;
  auto rank_main = [&](int rank) {
    std::shared_ptr<Communicator> comm;
    Trace::set_rank_of_thread(rank);
    try {
      comm = make_gloo_communicator(store, rank, world, {"127.0.0.1", options.timeout, options.peer_memory});
      body(comm);
    } catch (...) {
      {
        std::lock_guard lock(mutex);
        if (!first_error) first_error = std::current_exception();
      }
      // The others see this error, at once, in whatever they wait for.
      if (comm) comm->abort(reason_of(std::current_exception()));
    }
  };
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world; ++rank) ranks.emplace_back(rank_main, rank);
  for (std::thread& rank : ranks) rank.join();
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace tessera
