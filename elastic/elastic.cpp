#include <tessera/elastic.h>

#include <c10/util/Logging.h>
#include <c10/util/env.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <utility>

#include "core/launch/device_choice.h"
#include "core/launch/launch_environment.h"
#include "core/launch/local_address.h"
#include "core/launch/rendezvous.h"
#include "core/launch/shared_cores.h"
#include "core/launch/spawn_surviving.h"
#include "core/runtime/require.h"
#include "core/runtime/stream_uses.h"
#include "core/trace/trace.h"
#include "elastic/elastic_state.h"
#include "elastic/joining.h"

namespace tessera {
using namespace internal;

namespace {

// Like init(), chooses this rank's GPU, if the group is on GPUs, and makes it the current device.
void choose_device(GroupOptions& options, const LaunchEnvironment& environment) {
  const at::Device wanted = options.device.value_or(options.backend == "nccl" ? at::kCUDA : at::kCPU);
  if (!wanted.is_cuda() || visible_cuda_devices() == 0) return;
  options.device = choose_cuda_device(wanted, environment, visible_cuda_devices());
  make_current(*options.device);
}

}  // namespace

const std::shared_ptr<Communicator>& ElasticRun::comm() const { return state_.comm(); }
int64_t ElasticRun::step() const { return state_.step(); }
int ElasticRun::accumulation() const { return state_.accumulation(); }
int ElasticRun::first_world() const { return state_.first_world(); }
int64_t ElasticRun::generation() const { return state_.generation(); }
const std::optional<ElasticChange>& ElasticRun::change() const { return state_.change(); }
nlohmann::json ElasticRun::restore(const TrainingState& state) { return state_.restore(state); }
void ElasticRun::commit(const nlohmann::json& extra) { state_.commit(extra); }
int64_t ElasticRun::copied_bytes() const { return state_.copied_bytes(); }

Elastic::Elastic(ElasticOptions options) {
  c10::initLogging();  // reads TORCH_CPP_LOG_LEVEL, which spawn_elastic() sets
  const auto environment = read_launch_environment();
  const int rank = environment.rank, size = environment.world_size;
  if (options.process.share_cores) share_cores(environment);
  choose_device(options.group, environment);
  Trace::set_rank_of_process(rank);
  const std::string address = named_address();
  const auto folder = rendezvous_folder(options);
  const bool must_join = c10::utils::check_env(kJoinVariable).value_or(false);
  require(!must_join || !folder.empty(), "tessera::Elastic: ", kJoinVariable,
          " is set, and ElasticOptions::rendezvous is empty; expected the folder of the run to join");
  if (!folder.empty() && (must_join || is_alive(RunFile(folder)))) {
    state_ = std::make_unique<ElasticState>(std::move(options), RunFile(folder), address);
    return;
  }
  Rendezvous found{c10::make_intrusive<c10d::HashStore>(), "127.0.0.1", {}};
  if (size > 1) found = rendezvous(environment, address, options.group.timeout);
  // Passes no loopback address. ElasticState decides whether to use one, because other hosts may join.
  const std::string own = !address.empty() ? address : is_loopback_address(found.address) ? "" : found.address;
  state_ = std::make_unique<ElasticState>(std::move(options), found.store, rank, size, own);
}

Elastic::Elastic(c10::intrusive_ptr<c10d::Store> store, int rank, int size, ElasticOptions options) {
  require(static_cast<bool>(store), "tessera::Elastic: the store is null");
  require(size >= 1 && rank >= 0 && rank < size, "tessera::Elastic: rank ", rank, " of ", size,
          "; expected a size of at least 1 and a rank from 0 to size - 1");
  options.process = {.cache_memory = false,
                     .terminate_handler = false,
                     .permit_tracing = false,
                     .raise_descriptor_limit = false,
                     .open_standard_descriptors = false,
                     .share_cores = false,
                     .stop_signals = false,
                     .print_warnings = false};
  state_ = std::make_unique<ElasticState>(std::move(options), store, rank, size, "");
}

Elastic::~Elastic() = default;

int spawn_elastic(int world, int argc, char** argv, const SpawnElasticOptions& options) {
  require(options.least_ranks >= 1 && options.least_ranks <= std::max(world, 1), "SpawnElasticOptions::least_ranks is ",
          options.least_ranks, "; expected 1 to the number of ranks, ", world);
  require(options.restarts >= 0, "SpawnElasticOptions::restarts is ", options.restarts, "; expected at least 0");
  // Lost connections are expected, and c10d would print a stack trace of each by default.
  constexpr auto kLogLevel = "TORCH_CPP_LOG_LEVEL";
  const std::string log_level = c10::utils::get_env(kLogLevel).value_or("ERROR");
  const RendezvousFolder folder;
  const RunFile run(folder.path());
  return spawn_surviving(world, argc, argv, options.grace,
                         {.least_ranks = options.least_ranks,
                          .restarts = options.restarts,
                          .variables = {{kRendezvousVariable, folder.path().string()}, {kLogLevel, log_level}},
                          .restart_variables = {{kJoinVariable, "1"}},
                          // A rank that restarts after the end of the run would wait for members in vain.
                          .may_restart = [&] { return !has_ended(run); }});
}

void Elastic::run(const std::function<void(ElasticRun& run)>& body) {
  require(body != nullptr, "tessera::Elastic::run: the body is empty, expected a function");
  state_->run(body, [](ElasticRunState& state) { return ElasticRun(state); });
}

}  // namespace tessera
