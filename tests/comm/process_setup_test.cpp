// What Tessera changes in the process that uses it: nothing, but for the fields of ProcessSetup.
#include "core/launch/process_setup.h"

#include <ATen/Context.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <resolv.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <typeinfo>
#include <utility>
#include <vector>

#include <tessera/ddp.h>
#include <tessera/errors.h>
#include <tessera/fsdp.h>
#include <tessera/launch.h>
#include <tessera/oss.h>
#include <tessera/sdp.h>
#include "core/comm/backends.h"
#include "core/comm/shared_memory/tracer_permission.h"
#include "core/comm/short_name_lookups.h"
#include "core/launch/shared_cores.h"
#include "core/runtime/sigpipe_block.h"
#include "core/runtime/warn.h"
#include "tests/comm/on_processes.h"
#include "tests/support/free_port.h"

extern char** environ;

namespace {

using namespace tessera;
using namespace tessera::internal;
using namespace std::chrono_literals;
using tessera::testing_support::on_processes;

using Names = std::set<std::string>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// The state of the process by name, each as text.
using State = std::map<std::string, std::string>;

template <class Value>
std::string text(const Value& value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

template <class Function>
std::string address(Function* function) {
  return text(reinterpret_cast<const void*>(function));
}

std::string signal_actions() {
  constexpr int kRestorer = 0x04000000;  // glibc sets this flag in every action
  std::string all;
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) == 0)
      all += address(action.sa_handler) + text(action.sa_flags & ~kRestorer) + " ";
  }
  return all;
}

std::string blocked_signals() {
  sigset_t blocked;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  std::string all;
  for (int signal = 1; signal < NSIG; ++signal) all += text(::sigismember(&blocked, signal));
  return all;
}

// Which of stdin, stdout and stderr are /dev/null.
std::string standard_descriptors() {
  std::string all;
  for (const int fd : {0, 1, 2}) {
    std::error_code is_closed;
    all += text(std::filesystem::read_symlink("/proc/self/fd/" + text(fd), is_closed) == "/dev/null");
  }
  return all;
}

std::string environment() {
  std::string all;
  for (char** entry = environ; *entry != nullptr; ++entry) all += text(*entry) + "\n";
  return all;
}

long thread_count() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), std::filesystem::directory_iterator());
}

State state_of_process() {
  State state;
  state["CPU allocator"] = address(c10::GetCPUAllocator());
  state["terminate handler"] = address(std::get_terminate());
  state["signal actions"] = signal_actions();
  state["blocked signals"] = blocked_signals();
  state["standard descriptors"] = standard_descriptors();
  state["environment"] = environment();
  state["tracer"] = text(TracerPermission::told());
  for (int resource = 0; resource < RLIM_NLIMITS; ++resource) {
    rlimit limit{};
    ::getrlimit(static_cast<__rlimit_resource>(resource), &limit);
    state[resource == RLIMIT_NOFILE ? "descriptor limit" : "other limits"] +=
        text(limit.rlim_cur) + "/" + text(limit.rlim_max) + " ";
  }
  state["autograd engine"] = typeid(torch::autograd::Engine::get_default_engine()).name();
  state["default dtype"] = text(torch::get_default_dtype());
  cpu_set_t affinity;
  ::sched_getaffinity(0, sizeof(affinity), &affinity);
  for (int core = 0; core < CPU_SETSIZE; ++core) state["affinity"] += text(CPU_ISSET(core, &affinity) ? 1 : 0);
  state["generator"] = text(torch::globalContext().defaultGenerator(at::kCPU).get_state());
  state["intra-operator threads"] = text(at::get_num_threads());
  state["printed warnings"] = text(prints_warnings());
  state["deterministic"] = text(at::globalContext().deterministicAlgorithms());
  return state;
}

Names changes(const State& before, const State& after) {
  Names names;
  for (const auto& [name, value] : before)
    if (after.at(name) != value) names.insert(name);
  return names;
}

// False, and tells on stderr, if the names differ.
bool is_equal(const char* what, const Names& actual, const Names& expected) {
  if (actual == expected) return true;
  std::cerr << what << ": changed are";
  for (const auto& name : actual) std::cerr << " '" << name << "'";
  std::cerr << ", expected";
  for (const auto& name : expected) std::cerr << " '" << name << "'";
  std::cerr << std::endl;
  return false;
}

// Some threads end a moment after their object.
bool has_threads(long expected) {
  for (const auto until = std::chrono::steady_clock::now() + 10s; std::chrono::steady_clock::now() < until;) {
    if (thread_count() == expected) return true;
    std::this_thread::sleep_for(10ms);
  }
  std::cerr << thread_count() << " threads, expected " << expected << std::endl;
  return false;
}

torch::nn::Sequential make_model() {
  return torch::nn::Sequential(torch::nn::Linear(16, 32), torch::nn::Tanh(), torch::nn::Linear(32, 16));
}

template <class Model>
void train(Model&& model, torch::optim::Optimizer& optimizer, const at::Tensor& input) {
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    at::Tensor output = model(input);
    output.square().mean().backward();
    optimizer.step();
  }
}

void train_with_every_wrapper(const std::shared_ptr<Communicator>& comm, std::vector<torch::nn::Sequential> models,
                              const at::Tensor& input) {
  {
    FullyShardedDataParallel fsdp(models[0], comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
    torch::optim::AdamW optimizer(fsdp.parameters(), 1e-2);
    train(fsdp, optimizer, input);
    fsdp.clip_grad_norm_(1.0);
  }
  {
    DistributedDataParallel ddp(models[1], comm);
    torch::optim::AdamW optimizer(ddp.parameters(), 1e-2);
    train(ddp, optimizer, input);
  }
  OSS<torch::optim::AdamW> optimizer(models[2]->parameters(), torch::optim::AdamWOptions(1e-2), comm);
  ShardedDataParallel sdp(models[2], optimizer, comm);
  train(sdp, optimizer, input);
}

constexpr rlim_t kFewDescriptors = 36;  // below what init() of two ranks checks for

// A process as ProcessSetup finds it most in need: stdin is closed, and few descriptors may be opened.
void lower_limits(int rank) {
  ::close(STDIN_FILENO);
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = kFewDescriptors;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  ::unsetenv("OMP_NUM_THREADS");
  ::unsetenv("MKL_NUM_THREADS");
  at::set_num_threads(at::intraop_default_num_threads());  // which counts as not chosen
  ::setenv("RANK", std::to_string(rank).c_str(), 1);
  ::setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
}

// Two processes that call init(); each returns what `body` does.
std::vector<int> on_launched_processes(const std::function<int(int rank)>& body) {
  const std::string port = std::to_string(testing_support::free_port());
  return on_processes(2, [&](const StorePtr&, int rank) {
    lower_limits(rank);
    ::setenv("WORLD_SIZE", "2", 1);
    ::setenv("LOCAL_WORLD_SIZE", "2", 1);
    ::setenv("MASTER_ADDR", "127.0.0.1", 1);
    ::setenv("MASTER_PORT", port.c_str(), 1);
    return body(rank);
  });
}

struct Field {
  const char* name;
  bool ProcessSetup::*field;
  const char* changes;
};

const Field kFields[] = {
    {"cache_memory", &ProcessSetup::cache_memory, "CPU allocator"},
    {"terminate_handler", &ProcessSetup::terminate_handler, "terminate handler"},
    {"permit_tracing", &ProcessSetup::permit_tracing, "tracer"},
    {"raise_descriptor_limit", &ProcessSetup::raise_descriptor_limit, "descriptor limit"},
    {"open_standard_descriptors", &ProcessSetup::open_standard_descriptors, "standard descriptors"},
    {"share_cores", &ProcessSetup::share_cores, "intra-operator threads"},
    {"stop_signals", &ProcessSetup::stop_signals, "signal actions"},
    {"print_warnings", &ProcessSetup::print_warnings, "printed warnings"},
};

Names expected_changes(const ProcessSetup& setup) {
  Names names;
  for (const auto& [name, field, change] : kFields)
    if (setup.*field) names.insert(change);
  if (at::intraop_default_num_threads() == 1) names.erase("intra-operator threads");
#ifdef __SANITIZE_ADDRESS__
  names.erase("CPU allocator");
#endif
  return names;
}

constexpr int kSkipped = 77;

// Compares the process of a launched rank before, during and after the life of its group.
int check_init(const ProcessSetup& setup) {
  const State before = state_of_process();
  const long threads = thread_count();
  auto comm = init({.timeout = 60s, .process = setup});
  const State during = state_of_process();
  Names changed = changes(before, during);
  if (setup.permit_tracing && !changed.contains("tracer")) return kSkipped;
  if (!is_equal("with a group", changed, expected_changes(setup))) return 1;
  auto part = comm->split(0);
  comm->barrier();
  comm.reset();
  if (!is_equal("with a part of it", changes(during, state_of_process()), {})) return 2;
  part.reset();
  if (!is_equal("after it", changes(before, state_of_process()), {})) return 3;
  return has_threads(threads) ? 0 : 4;
}

TEST(ProcessSetup, IsDescribedByTheNamesOfItsFields) {
  EXPECT_EQ(ProcessSetup{}.describe(),
            "cache_memory, terminate_handler, permit_tracing, raise_descriptor_limit, open_standard_descriptors, "
            "share_cores, print_warnings");
  ProcessSetup one{};
  for (const auto& [name, field, change] : kFields) one.*field = false;
  EXPECT_EQ(one.describe(), "nothing");
  one.permit_tracing = true;
  EXPECT_EQ(one.describe(), "permit_tracing");
}

TEST(ProcessSetup, AGroupOfTheProgramsOwnStoreChangesNothing) {
  for (const bool peer_memory : {true, false}) {
    const auto codes = on_processes(2, [&](StorePtr store, int rank) {
      at::set_num_threads(1);
      ::fflush(nullptr);
      const testing_support::TemporaryFolder folder;  // of the output
      const std::string printed = (folder / "printed").string();
      if (::freopen(printed.c_str(), "w", stdout) == nullptr || ::dup2(::fileno(stdout), STDERR_FILENO) < 0) return 5;
      std::vector<torch::nn::Sequential> models;
      for (int i = 0; i < 3; ++i) models.push_back(make_model());
      const at::Tensor input = torch::randn({8, 16});
      {  // libtorch prepares itself when it is first used
        auto unwrapped = make_model();
        torch::optim::AdamW optimizer(unwrapped->parameters(), 1e-2);
        train([&](const at::Tensor& x) { return unwrapped->forward(x); }, optimizer, input);
      }
      const State before = state_of_process();
      const long threads = thread_count();
      auto comm = communicator_from(std::move(store), rank, 2, {.timeout = 60s, .peer_memory = peer_memory});
      warn("nothing is printed");
      if (!is_equal("with a group", changes(before, state_of_process()), {})) return 1;
      train_with_every_wrapper(comm, models, input);
      if (!is_equal("after training", changes(before, state_of_process()), {})) return 2;
      comm->barrier();
      models.clear();
      comm.reset();
      if (!is_equal("after the group", changes(before, state_of_process()), {})) return 3;
      ::fflush(nullptr);
      if (std::filesystem::file_size(printed) > 0) return 6;
      return has_threads(threads) ? 0 : 4;
    });
    EXPECT_EQ(codes, std::vector<int>(2, 0)) << "peer memory " << peer_memory;
  }
}

TEST(ProcessSetup, InitMakesItsChangesUntilTheLastGroupEnds) {
  for (const bool stop_signals : {false, true}) {
    const auto codes = on_launched_processes([&](int) { return check_init({.stop_signals = stop_signals}); });
    if (codes == std::vector<int>(2, kSkipped)) GTEST_SKIP() << "the kernel has no peer memory for processes";
    EXPECT_EQ(codes, std::vector<int>(2, 0)) << stop_signals;
  }
}

TEST(ProcessSetup, StopRequestedCatchesSignalsUntilTheLastGroupEnds) {
  const auto codes = on_launched_processes([](int rank) {
    ::signal(SIGUSR1, [](int) {});  // the program's own
    const State before = state_of_process();
    auto comm = init({.timeout = 60s});
    const State with_group = state_of_process();
    for (int step = 0; step < 3; ++step)
      if (stop_requested(comm) != 0) return 1;
    if (!is_equal("after the first call", changes(with_group, state_of_process()), {"signal actions"})) return 2;
    if (rank == 1) ::raise(SIGTERM);
    ::raise(SIGUSR1);
    if (stop_requested(*comm) != SIGTERM || stop_requested(*comm) != SIGTERM) return 3;
    auto part = comm->split(0);
    comm.reset();
    if (stop_requested(part) != SIGTERM) return 4;
    part.reset();
    return is_equal("after it", changes(before, state_of_process()), {}) ? 0 : 5;
  });
  EXPECT_EQ(codes, std::vector<int>(2, 0));
}

TEST(ProcessSetup, ThreadsThatTheProgramHasChosenStay) {
  const auto codes = on_launched_processes([](int rank) {
    const int chosen = at::intraop_default_num_threads() + 1;
    if (rank == 0) ::setenv("OMP_NUM_THREADS", "2", 1);
    if (rank == 1) at::set_num_threads(chosen);
    const int before = at::get_num_threads();
    const auto comm = init({.timeout = 60s});
    return at::get_num_threads() == before ? 0 : 1;
  });
  EXPECT_EQ(codes, std::vector<int>(2, 0));
}

// PMIx gives no number of ranks on this host. The rendezvous finds that all are on one.
TEST(ProcessSetup, RanksOfOneHostShareItsCoresIfTheLauncherGivesNoLocalSize) {
  const auto codes = on_launched_processes([](int rank) {
    for (const char* name : {"RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}) ::unsetenv(name);
    ::setenv("PMIX_RANK", std::to_string(rank).c_str(), 1);
    const int before = at::get_num_threads();
    const auto comm = init({.timeout = 60s});
    return at::get_num_threads() == std::min(before, std::max(1, available_cores() / 2)) ? 0 : 1;
  });
  EXPECT_EQ(codes, std::vector<int>(2, 0));
}

TEST(ProcessSetup, ARankAloneOnItsHostKeepsToTheContainersQuota) {
  const auto codes = on_launched_processes([](int) {
    const int before = at::get_num_threads();
    share_cores({.launcher = kByHand}, 1);
    if (at::get_num_threads() != 1) return 1;
    stop_sharing_cores();
    return at::get_num_threads() == before ? 0 : 2;
  });
  EXPECT_EQ(codes, std::vector<int>(2, 0));
}

TEST(ProcessSetup, AFieldThatIsOffLeavesItsPartAlone) {
  for (const auto& [name, field, change] : kFields) {
    ProcessSetup setup;
    setup.*field = false;
    const auto codes = on_launched_processes([&](int) {
      if (setup.raise_descriptor_limit) return check_init(setup);
      const State before = state_of_process();
      try {
        init({.timeout = 60s, .process = setup});
        return 5;
      } catch (const CommError& error) {
        if (text(error.what()).find("(soft limit RLIMIT_NOFILE 36): raise it (ulimit -Sn)") == std::string::npos) throw;
      }
      return is_equal("after it has failed", changes(before, state_of_process()), {}) ? 0 : 6;
    });
    if (codes == std::vector<int>(2, kSkipped)) GTEST_SKIP() << "the kernel has no peer memory for processes";
    EXPECT_EQ(codes, std::vector<int>(2, 0)) << name;
  }
}

TEST(ProcessSetup, RunRanksMakesItsChangesUntilItReturns) {
  const auto codes = on_processes(1, [](const StorePtr&, int) {
    lower_limits(0);
    const State before = state_of_process();
    const long threads = thread_count();
    Names changed;
    const auto body = [&](const std::shared_ptr<Communicator>& comm) {
      comm->barrier();
      if (comm->rank() == 0) changed = changes(before, state_of_process());
      comm->barrier();
    };
    ProcessSetup setup;
    setup.terminate_handler = setup.permit_tracing = setup.share_cores = false;  // for ranks that are processes
    run_ranks(3, body, {.peer_memory = false});
    if (!is_equal("within run_ranks()", changed, expected_changes(setup))) return 1;
    if (!is_equal("after it", changes(before, state_of_process()), {})) return 2;
    run_ranks(2, body,
              {.process = {.cache_memory = false, .open_standard_descriptors = false, .print_warnings = false}});
    if (!is_equal("with fields off", changed, {})) return 3;
    return has_threads(threads) ? 0 : 4;
  });
  EXPECT_EQ(codes, std::vector<int>{0});
}

TEST(ProcessSetup, LeavesAloneWhatTheProgramChangesMeanwhile) {
  const auto codes = on_processes(1, [](const StorePtr&, int) {
    const std::terminate_handler own = [] { ::_exit(1); };
    {
      const ProcessEffects effects{ProcessSetup{}};
      std::set_terminate(own);
    }
    return std::get_terminate() == own ? 0 : 1;
  });
  EXPECT_EQ(codes, std::vector<int>{0});
}

// The default action of SIGPIPE ends the process.
TEST(SigpipeBlock, MakesAWriteToAClosedPipeAnError) {
  const auto codes = on_processes(1, [](const StorePtr&, int) {
    ::signal(SIGPIPE, SIG_DFL);
    int ends[2];
    if (::pipe(ends) != 0) return 1;
    ::close(ends[0]);
    const auto fails = [&] { return ::write(ends[1], "x", 1) < 0 && errno == EPIPE; };
    const std::string blocked = blocked_signals();
    for (int i = 0; i < 2; ++i) {
      const SigpipeBlock no_sigpipe;
      bool fails_in_thread = false;
      std::thread([&] { fails_in_thread = fails(); }).join();
      if (!fails() || !fails_in_thread) return 2;
    }
    if (blocked_signals() != blocked) return 3;
    return fails() ? 4 : 5;
  });
  EXPECT_EQ(codes, std::vector<int>{128 + SIGPIPE});
}

#ifdef __GLIBC__
TEST(ShortNameLookups, ConcernOneThreadAndEnd) {
  const auto resolver = [] {
    ::res_init();
    return std::pair(_res.retrans, _res.retry);
  };
  const auto before = resolver();
  {
    const internal::ShortNameLookups short_lookups;
    EXPECT_EQ(_res.retrans, 1);
    EXPECT_GE(_res.retry, 4);
    auto of_thread = before;
    std::thread([&] { of_thread = resolver(); }).join();
    EXPECT_EQ(of_thread, before);
  }
  EXPECT_EQ(std::pair(_res.retrans, _res.retry), before);
}
#endif

TEST(SigpipeBlock, ARankThatDiesWhileItIsWrittenToIsAnError) {
  const auto codes = on_processes(2, [](StorePtr store, int rank) {
    ::signal(SIGPIPE, SIG_DFL);
    auto comm = make_gloo_communicator(std::move(store), rank, 2,
                                       {.address = "127.0.0.1", .timeout = 60s, .peer_memory = false});
    at::Tensor tensor = torch::ones({1 << 21});
    for (int step = 0; step < 100; ++step) {
      if (rank == 1 && step == 3) ::_exit(0);
      try {
        comm->all_reduce(tensor).wait();
      } catch (const CommError&) {
        return 0;
      }
    }
    return 1;
  });
  EXPECT_EQ(codes, std::vector<int>(2, 0));
}

}  // namespace
