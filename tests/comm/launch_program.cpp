// The program that launch_test.cpp launches: joins its group, adds up the ranks, and then ends as its arguments say.
//
//   launch_program [--spawn N] [--grace-ms N] [--timeout-ms N] [MODE [RANK]]
//
// MODE applies to rank RANK (0 by default), or to all ("ok"):
//   ok       ends without error      exit      ends with code 3
//   throw    an uncaught exception   kill      kills itself with SIGKILL
//   throw-twice    as throw, in two threads at once
//   hang     never ends              stubborn  never ends, and ignores SIGTERM and SIGINT
//   reaped   as exit; in the starting process a thread reaps every child, or, if RANK is 1, the system does
//   stop     stops (SIGSTOP) while large messages are in flight; cut: kills itself then
//   save     stops 5 ms after an asynchronous save has begun ("saves"): in the folder TESSERA_TEST_FOLDER
//   saving   all ranks save repeatedly, and none ends
//   pause    all run ("runs") until each has seen that it was stopped and continued; rank RANK is slow
//   split    stops while groups are made one after the other
//   connect  kills itself while the others connect for their first all-reduce by gloo's algorithm
//   fork     has a child (fork) that uses its group, aborts it and destroys it; then all continue
//   beats    kills itself while the others are in a wait that no transport ends: the heartbeats of a Watchdog end it
//   late     as throw, while the last rank is busy for two seconds
//   linger   all end without error, the others three seconds later
//   static   all end without error after stop_requested(); a static object destroys the group
//   leave    ends without error while the others continue, the last rank after two seconds
//   absent   ends without error before it joins the others
//   torn     ends during a large message, which it cannot read to the end
//   one-line throws in run_main(), while the others are in collectives
//   one-line-all   all throw in run_main(); one-line-exit: all return 3; one-line-empty: all throw without a message
//   until-stopped  all loop until stop_requested(), save for a second, and return 128 + signal
//   beside   as until-stopped; each process has another thread, started before spawn_local()
// The other ranks continue with collectives until these fail ("hang": they hang as well).

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <tessera/checkpoint.h>
#include <tessera/errors.h>
#include <tessera/fsdp.h>
#include <tessera/launch.h>
#include "core/comm/collective.h"
#include "core/comm/gloo/reduction_pipeline.h"
#include "core/comm/store_mailbox.h"
#include "core/comm/watchdog/watchdog.h"

namespace {

std::shared_ptr<tessera::Communicator> group_of_process;

struct Arguments {
  int spawn = 0;
  int timeout_ms = 60'000;
  int grace_ms = 30'000;
  std::string mode = "ok";
  int rank = 0;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  int positional = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    if (text == "--spawn") {
      arguments.spawn = std::stoi(argv[++i]);
    } else if (text == "--timeout-ms") {
      arguments.timeout_ms = std::stoi(argv[++i]);
    } else if (text == "--grace-ms") {
      arguments.grace_ms = std::stoi(argv[++i]);
    } else if (positional++ == 0) {
      arguments.mode = text;
    } else {
      arguments.rank = std::stoi(text);
    }
  }
  return arguments;
}

void say(const std::string& line) {
  // One write, so that lines of several ranks do not interleave.
  const auto text = line + "\n";
  if (::write(STDOUT_FILENO, text.data(), text.size()) < 0) std::abort();
}

int64_t sum_of_ranks(tessera::Communicator& comm) {
  auto tensor = torch::full({1}, comm.rank(), torch::kInt64);
  comm.all_reduce(tensor, tessera::ReduceOp::kSum, "sum of ranks").wait();
  return tensor.item<int64_t>();
}

void end_badly(const std::string& mode) {
  if (mode == "exit" || mode == "reaped") std::_Exit(3);
  const auto fail = [] { throw std::runtime_error("rank has thrown this"); };
  if (mode == "throw-twice") std::thread(fail).detach();
  if (mode.starts_with("throw") || mode == "late") fail();
  if (mode == "kill") ::raise(SIGKILL);
  if (mode == "stop" || mode == "split" || mode == "cut" || mode == "connect") {
    std::thread([signal = mode == "stop" || mode == "split" ? SIGSTOP : SIGKILL] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      say("stops");
      ::kill(::getpid(), signal);
    }).detach();
  }
}

constexpr int64_t kLargeNumel = int64_t{4} << 20;

// Only the first half of the first chunk is readable: gloo's thread throws there.
at::Tensor torn() {
  void* memory =
      ::mmap(nullptr, kLargeNumel * sizeof(float), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("mmap");
  ::mprotect(static_cast<char*>(memory) + tessera::internal::kChunkBytes / 2, ::sysconf(_SC_PAGESIZE), PROT_NONE);
  return torch::from_blob(memory, {kLargeNumel}, torch::kFloat);
}

void use_in_a_child(std::shared_ptr<tessera::Communicator>& comm) {
  const pid_t child = ::fork();
  if (child != 0) {
    int status = 0;
    ::waitpid(child, &status, 0);
    return say("the child's status is " + std::to_string(status));
  }
  ::alarm(10);
  try {
    sum_of_ranks(*comm);
  } catch (const tessera::CommError& error) {
    say(std::string("child: ") + error.what());
  }
  comm->abort("the child's business");
  comm.reset();
  std::_Exit(0);
}

// Saves until an operation fails. The exception ends the last save.
int save_for_ever(const std::shared_ptr<tessera::Communicator>& comm, bool stops) try {
  tessera::FullyShardedDataParallel fsdp(torch::nn::Linear(256, 256), comm);
  for (int i = 0;; ++i) {
    const auto folder = std::filesystem::path(std::getenv("TESSERA_TEST_FOLDER")) / std::to_string(i % 2);
    const tessera::PendingSave pending = tessera::save_checkpoint_async(folder, fsdp);
    if (stops) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      say("stops");
      ::raise(SIGSTOP);
    }
    for (int step = 0; step < 20; ++step) sum_of_ranks(*comm);
    if (i == 1) say("saves");
  }
} catch (const std::exception& error) {  // a CommError, or the save's CheckpointError
  say(std::string("save ended: ") + error.what());
  return 22;
}

// The other ranks wait for the slow rank most of the time, so they usually stop inside a wait.
int run_until_continued(tessera::Communicator& comm, bool is_slow) {
  say("runs");
  auto before = std::chrono::steady_clock::now();
  for (int after = 0; after < 20;) {
    if (is_slow) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const auto now = std::chrono::steady_clock::now();
    auto was_stopped = torch::full({1}, now - before > std::chrono::seconds(3) ? 1 : 0, torch::kInt64);
    before = now;
    comm.all_reduce(was_stopped, tessera::ReduceOp::kMax, "who was stopped").wait();
    if (after > 0 || was_stopped.item<int64_t>() != 0) ++after;
  }
  return 0;
}

// Waits as for a kernel of NCCL.
[[noreturn]] void wait_by_beats(tessera::Communicator& comm, bool dies) {
  std::promise<void> cut;
  std::once_flag once;
  const auto store = dynamic_cast<tessera::internal::HasStore&>(comm).store();
  tessera::internal::Watchdog watch(c10::make_intrusive<c10d::PrefixStore>("beats", store), comm.rank(), comm.size(),
                                    {.interrupt = [&] { std::call_once(once, [&] { cut.set_value(); }); }},
                                    {.beat_every = tessera::internal::Watchdog::kLookEvery});
  watch.started(0, "a kernel");
  watch.begin_wait();
  if (dies) std::this_thread::sleep_for(std::chrono::seconds(2));
  if (dies) ::raise(SIGKILL);
  cut.get_future().wait();
  const std::string reason = watch.explanation();
  say("cut: " + reason);
  watch.publish_failure(reason);
  std::this_thread::sleep_for(std::chrono::seconds(2));  // the store may be in this process
  std::_Exit(4);
}

int run_to_a_failure(const std::string& mode, int rank) {
  return tessera::run_main([&] {
    const auto comm = tessera::init();
    sum_of_ranks(*comm);
    const bool chosen = comm->rank() == rank;
    if (mode == "one-line-exit") return 3;
    if (mode == "one-line-empty") throw std::runtime_error("");
    if (mode == "one-line-all" || chosen) throw std::runtime_error("rank has thrown this");
    for (;;) sum_of_ranks(*comm);
  });
}

int run_until_stopped() {
  return tessera::run_main([] {
    const auto comm = tessera::init();
    for (int step = 0;; ++step) {
      if (const int signal = tessera::stop_requested(comm)) {
        std::this_thread::sleep_for(std::chrono::seconds(1));
        say("saved at step " + std::to_string(step));
        return 128 + signal;
      }
      if (step == 0) say("loops");
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  const auto arguments = parse(argc, argv);
  if (arguments.mode == "reaped") {  // by another thread or the system
    if (arguments.rank == 1) ::signal(SIGCHLD, SIG_IGN);
    std::thread([] {
      for (;;)
        if (::waitpid(-1, nullptr, 0) <= 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }).detach();
  }
  if (arguments.mode == "beside")
    std::thread([] {
      for (;;) ::pause();
    }).detach();
  if (arguments.spawn != 0 && !tessera::launched())
    return tessera::spawn_local(arguments.spawn, argc, argv, std::chrono::milliseconds(arguments.grace_ms));
  if (arguments.mode == "spawn-again") return tessera::spawn_local(2, argc, argv);

  if (arguments.mode.starts_with("one-line")) return run_to_a_failure(arguments.mode, arguments.rank);
  if (arguments.mode == "until-stopped" || arguments.mode == "beside") return run_until_stopped();
  if (arguments.mode == "absent") {
    say("begins");
    const char* rank = std::getenv("RANK");
    if (rank != nullptr && std::stoi(rank) == arguments.rank) return 0;
  }
  std::shared_ptr<tessera::Communicator> comm;
  try {
    comm = tessera::init({.timeout = std::chrono::milliseconds(arguments.timeout_ms)});
  } catch (const std::exception& error) {
    say(std::string("error: ") + error.what());
    return dynamic_cast<const tessera::CommError*>(&error) != nullptr ? 20 : 21;
  }
  const char* threads = std::getenv("OMP_NUM_THREADS");
  say("rank " + std::to_string(comm->rank()) + " of " + std::to_string(comm->size()) + " pid " +
      std::to_string(::getpid()) + " sum " + std::to_string(sum_of_ranks(*comm)) + " threads " +
      (threads == nullptr ? "default" : threads) + " intra-op " + std::to_string(at::get_num_threads()));

  const bool chosen = comm->rank() == arguments.rank;
  if (arguments.mode == "stubborn") {
    ::signal(SIGTERM, SIG_IGN);
    ::signal(SIGINT, SIG_IGN);
    ::signal(SIGUSR1, SIG_IGN);
  }
  if (arguments.mode == "ok") return 0;
  if (arguments.mode == "static") {
    group_of_process = comm;
    return tessera::stop_requested(comm);
  }
  if (arguments.mode == "linger") {
    if (!chosen) std::this_thread::sleep_for(std::chrono::seconds(3));
    return 0;
  }
  if (arguments.mode == "save" || arguments.mode == "saving")
    return save_for_ever(comm, arguments.mode == "save" && chosen);
  if (arguments.mode == "pause") return run_until_continued(*comm, chosen);
  if (arguments.mode == "beats") wait_by_beats(*comm, chosen);
  if (arguments.mode == "fork") {
    if (chosen) use_in_a_child(comm);
    for (int i = 0; i < 20; ++i) sum_of_ranks(*comm);
    return 0;
  }
  if (arguments.mode == "leave" && chosen) return 0;
  if (chosen) end_badly(arguments.mode);
  const bool is_late = arguments.mode == "late" || arguments.mode == "leave";
  if (is_late && comm->rank() == comm->size() - 1) std::this_thread::sleep_for(std::chrono::seconds(2));
  if (arguments.mode == "hang" || arguments.mode == "stubborn") say("hangs");
  for (;;) {
    if (arguments.mode == "hang" || arguments.mode == "stubborn") {
      ::pause();
    } else if (arguments.mode == "connect") {
      if (chosen) ::pause();
      using tessera::internal::Collective;  // without the barrier of backend_all_reduce(), which needs no connection
      comm->begin(Collective{Collective::kBackendAllReduce, torch::ones({5}), {}, "a tensor"}).wait();
    } else if (arguments.mode == "split") {
      sum_of_ranks(*comm->split(0));
    } else if (arguments.mode == "stop" || arguments.mode == "cut" || arguments.mode == "torn") {
      auto tensor = torch::ones({kLargeNumel});
      if (arguments.mode == "torn" && comm->rank() == arguments.rank) tensor = torn();
      comm->all_reduce(tensor, tessera::ReduceOp::kSum, "a large tensor").wait();
    } else {
      sum_of_ranks(*comm);
    }
  }
}
