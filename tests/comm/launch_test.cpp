// Runs real launchers: processes that meet, and processes that die.

#include <arpa/inet.h>
#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <pty.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <tessera/launch.h>
#include "core/trace/trace.h"
#include "core/trace/trace_file.h"
#include "tests/support/built.h"
#include "tests/support/child_process.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/trace_events.h"

namespace tessera::launch_test {
using namespace internal;
namespace {

using std::chrono::seconds;
using testing_support::ChildProcess;

const std::string kProgram = testing_support::built(LAUNCH_PROGRAM);
constexpr int kCommError = 20;  // launch_program's exit codes for an error of init()
constexpr int kInvalidArgument = 21;
constexpr int kSaveEnded = 22;  // of its mode "saving", with an error of the group or of the save

// Ports below those that the kernel assigns, which another test may get before this one listens.
std::string free_port() {
  static std::mt19937 random{static_cast<uint32_t>(::getpid())};
  std::uniform_int_distribution<int> ports(10000, 32767);
  for (;;) {
    const int port = ports(random);
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    const bool is_free = ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    ::close(fd);
    if (is_free) return std::to_string(port);
  }
}

ChildProcess::Environment torchrun(int rank, int world, const std::string& port,
                                   const std::string& host = "127.0.0.1") {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(world)},
          {"MASTER_ADDR", host},
          {"MASTER_PORT", port}};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::vector<pid_t> rank_pids(const std::string& output) {
  std::vector<pid_t> pids;
  const std::string label = " pid ";
  for (auto at = output.find(label); at != std::string::npos; at = output.find(label, at + 1)) {
    pids.push_back(std::stoi(output.substr(at + label.size())));
  }
  return pids;
}

// Whether all ranks that have printed their pid end soon. A zombie has ended.
::testing::AssertionResult all_gone(const std::string& output, size_t ranks) {
  const auto pids = rank_pids(output);
  if (pids.size() != ranks)
    return ::testing::AssertionFailure() << "expected pids of " << ranks << " ranks:\n" << output;
  for (const pid_t pid : pids) {
    for (int tries = 0;; ++tries) {
      std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
      std::string text;
      std::getline(stat, text);
      if (text.empty() || contains(text, ") Z ")) break;
      if (tries == 100) return ::testing::AssertionFailure() << "still there: " << text;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  return ::testing::AssertionSuccess();
}

using Processes = std::vector<std::unique_ptr<ChildProcess>>;

std::string outputs(const Processes& processes) {
  std::string all;
  for (const auto& process : processes) all += process->output();
  return all;
}

TEST(SpawnLocal, RunsAllRanks) {
  for (const int world : {1, 2, 5}) {
    ChildProcess program({kProgram, "--spawn", std::to_string(world)});
    EXPECT_EQ(program.wait(), 0) << program.output();
    EXPECT_EQ(program.printed("sum " + std::to_string(world * (world - 1) / 2) + " "), world) << program.output();
    EXPECT_TRUE(all_gone(program.output(), static_cast<size_t>(world)));
  }
}

// A program's static objects are initialized before the library's, so they are destroyed after those.
TEST(SpawnLocal, AStaticObjectMayDestroyTheGroup) {
  ChildProcess program({kProgram, "--spawn", "2", "static"});
  EXPECT_EQ(program.wait(), 0) << program.output();
}

TEST(SpawnLocal, DividesTheCoresUnlessTold) {
  ChildProcess program({kProgram, "--spawn", "2"}, {{"OMP_NUM_THREADS", "7"}});
  EXPECT_EQ(program.wait(), 0);
  EXPECT_EQ(program.printed("threads 7"), 2) << program.output();
  ChildProcess crowded({"env", "-u", "OMP_NUM_THREADS", "taskset", "-c", "0", kProgram, "--spawn", "2"});
  EXPECT_EQ(crowded.wait(), 0);
  EXPECT_EQ(crowded.printed("threads 1"), 2) << crowded.output();
}

// A quota of half of the machine's CPU time, as containers have it.
TEST(SpawnLocal, DividesTheCoresThatAContainerMayUse) {
  if (std::thread::hardware_concurrency() < 2) GTEST_SKIP() << "one core";
  const std::string folder = "/sys/fs/cgroup/cpu/tessera-test-" + std::to_string(::getpid());
  std::error_code error;
  if (!std::filesystem::is_directory("/sys/fs/cgroup/cpu") || !std::filesystem::create_directory(folder, error))
    GTEST_SKIP() << "no control group of version 1 can be made here (needs root)";
  std::ofstream(folder + "/cpu.cfs_quota_us") << 100000 * (std::thread::hardware_concurrency() - 1);
  const std::string all = std::to_string(std::thread::hardware_concurrency() - 1);
  ChildProcess program(
      {"sh", "-c", "echo $$ > " + folder + "/cgroup.procs; exec env -u OMP_NUM_THREADS " + kProgram + " --spawn 1"});
  EXPECT_EQ(program.wait(), 0);
  EXPECT_TRUE(contains(program.output(), "threads " + all)) << program.output();
  ::rmdir(folder.c_str());
}

TEST(SpawnLocal, ARankThatFailsEndsTheOthers) {
  struct Case {
    std::string mode;
    int rank, code;
    std::string line;
  };
  for (const auto& c : {Case{"exit", 2, 3, "exited with code 3; ending the others"},
                        Case{"throw", 1, 134, "was ended by signal 6 (Aborted); ending the others"},
                        Case{"throw", 0, 134, "was ended by signal 6 (Aborted); ending the others"},
                        Case{"throw-twice", 1, 134, "was ended by signal 6 (Aborted); ending the others"},
                        Case{"kill", 0, 137, "was ended by signal 9 (Killed); ending the others"}}) {
    ChildProcess program({kProgram, "--spawn", "3", c.mode, std::to_string(c.rank)});
    EXPECT_EQ(program.wait(), c.code) << program.output();
    const auto output = program.output();
    EXPECT_TRUE(contains(output, "tessera: rank " + std::to_string(c.rank) + " (pid ")) << output;
    EXPECT_TRUE(contains(output, c.line)) << output;
    EXPECT_EQ(program.printed("tessera: rank "), 1) << "the others are consequences\n" << output;
    const auto error = c10::str("launch_program: rank ", c.rank, " of 3: uncaught exception: rank has thrown this\n");
    EXPECT_EQ(contains(output, error), c.mode.starts_with("throw")) << output;
    EXPECT_FALSE(contains(output, "terminate called")) << output;
    EXPECT_TRUE(all_gone(output, 3));
  }
}

// Rank 0, which admits the others, or another rank is missing. With a timeout of an hour, no other event ends the
// program.
TEST(SpawnLocal, ARankThatEndsBeforeItJoinsIsNamedAtOnce) {
  for (const char* rank : {"0", "2"}) {
    ChildProcess program({kProgram, "--spawn", "3", "--timeout-ms", "3600000", "absent", rank});
    EXPECT_EQ(program.wait(), kCommError) << program.output();
    const std::string reason = c10::str("rank ", rank, " has ended before all had come");
    EXPECT_TRUE(contains(program.output(), reason)) << program.output();
  }
}

TEST(SpawnLocal, KnowsHowRanksEndWhereOthersReap) {
  for (const char* rank : {"0", "1"}) {
    ChildProcess program({kProgram, "--spawn", "2", "reaped", rank});
    EXPECT_EQ(program.wait(), 3) << program.output();
    EXPECT_TRUE(contains(program.output(), "exited with code 3; ending the other")) << program.output();
    EXPECT_TRUE(all_gone(program.output(), 2));
  }
}

TEST(SpawnLocal, NoRankOutlivesTheKeeper) {
  ChildProcess program({kProgram, "--spawn", "2", "stubborn"});
  ASSERT_TRUE(program.await("hangs", 2)) << program.output();
  std::ifstream children(c10::str("/proc/", program.pid(), "/task/", program.pid(), "/children"));
  pid_t keeper = 0;
  if (!(children >> keeper)) GTEST_SKIP() << "this kernel does not list children";
  ::kill(keeper, SIGKILL);
  EXPECT_EQ(program.wait(), 128 + SIGKILL) << program.output();
  EXPECT_TRUE(contains(program.output(), "the process that watches over the ranks was ended by signal 9"));
  EXPECT_TRUE(all_gone(program.output(), 2));
}

TEST(SpawnLocal, SignalsEndAllRanks) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    ChildProcess program({kProgram, "--spawn", "3", "hang"});
    ASSERT_TRUE(program.await("hangs", 3)) << program.output();
    ::kill(program.pid(), signal);
    EXPECT_EQ(program.wait(), 128 + signal) << program.output();
    EXPECT_EQ(program.printed("did not end; killing it"), 0) << program.output();
    EXPECT_TRUE(all_gone(program.output(), 3));
  }
}

TEST(SpawnLocal, CtrlCOnATerminalEndsAllRanks) {
  int terminal = -1;
  const pid_t pid = ::forkpty(&terminal, nullptr, nullptr, nullptr);
  if (pid == 0) {
    ::execl(kProgram.c_str(), kProgram.c_str(), "--spawn", "2", "hang", nullptr);
    ::_exit(127);
  }
  ASSERT_GT(pid, 0);
  std::string output;
  bool pressed = false;
  char buffer[4096];
  for (ssize_t n; (n = ::read(terminal, buffer, sizeof(buffer))) > 0;) {  // fails when all have ended
    output.append(buffer, static_cast<size_t>(n));
    const auto first = output.find("hangs");
    if (!pressed && first != std::string::npos && contains(output.substr(first + 1), "hangs")) {
      pressed = ::write(terminal, "\x03", 1) == 1;
    }
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  ::close(terminal);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 130) << output;
  EXPECT_TRUE(contains(output, "tessera: signal 2 (Interrupt); ending all ranks")) << output;
  EXPECT_TRUE(all_gone(output, 2));
}

// Ranks may take longer to save after a signal than the ranks of a failed group may take to end.
TEST(SpawnLocal, RanksSaveBeforeTheyStop) {
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) {
    ChildProcess program({kProgram, "--spawn", "3", "--grace-ms", "20000", "until-stopped"});
    ASSERT_TRUE(program.await("loops", 3)) << program.output();
    ::kill(program.pid(), signal);
    EXPECT_EQ(program.wait(seconds(30)), 128 + signal) << program.output();
    EXPECT_EQ(program.printed("saved at step "), 3) << program.output();
    const auto step = program.output().substr(program.output().find("saved at step "));
    EXPECT_EQ(program.printed(step.substr(0, step.find('\n') + 1)), 3) << "in one step\n" << program.output();
  }
  ChildProcess late({kProgram, "--spawn", "2", "--grace-ms", "100", "until-stopped"});
  ASSERT_TRUE(late.await("loops", 2)) << late.output();
  ::kill(late.pid(), SIGTERM);
  EXPECT_EQ(late.wait(seconds(20)), 128 + SIGTERM) << late.output();
  EXPECT_EQ(late.printed("saved"), 0) << late.output();
  EXPECT_EQ(late.printed("did not end; killing it"), 2) << late.output();
}

// The kernel gives the signal to the other thread, because the thread of spawn_local() blocks it.
TEST(SpawnLocal, ForwardsASignalThatAnotherThreadGets) {
  ChildProcess program({kProgram, "--spawn", "2", "--grace-ms", "20000", "beside"});
  ASSERT_TRUE(program.await("loops", 2)) << program.output();
  ::kill(program.pid(), SIGTERM);
  EXPECT_EQ(program.wait(seconds(30)), 128 + SIGTERM) << program.output();
  EXPECT_EQ(program.printed("saved at step "), 2) << program.output();
}

// SIGUSR1 is a warning: a rank that fails after it ends the others, and gives the exit code.
TEST(SpawnLocal, ARankThatDiesAfterAWarningEndsTheOthers) {
  ChildProcess program({kProgram, "--spawn", "3", "--grace-ms", "500", "stubborn"});
  ASSERT_TRUE(program.await("hangs", 3)) << program.output();
  ::kill(program.pid(), SIGUSR1);
  ASSERT_TRUE(program.await("signal 10", 1)) << program.output();
  ::kill(rank_pids(program.output()).at(1), SIGKILL);
  EXPECT_EQ(program.wait(seconds(20)), 128 + SIGKILL) << program.output();
  EXPECT_TRUE(all_gone(program.output(), 3));
}

TEST(RunMain, OneErrorPerFailure) {
  const std::string error = "rank has thrown this\n";
  const auto runs_to = [&](const std::vector<std::string>& command, const std::string& line) {
    ChildProcess program(command);
    EXPECT_EQ(program.wait(), 1) << program.output();
    EXPECT_EQ(program.printed("launch_program: " + line + error), 1) << program.output();
    EXPECT_EQ(program.printed("launch_program: "), 1) << program.output();
    EXPECT_EQ(program.printed("terminate called"), 0) << program.output();
    EXPECT_EQ(program.printed(error), 1) << program.output();
  };
  for (const char* rank : {"0", "2"})
    runs_to({kProgram, "--spawn", "3", "one-line", rank}, c10::str("rank ", rank, " of 3: "));
  runs_to({kProgram, "one-line"}, "");
  ChildProcess all({kProgram, "--spawn", "3", "one-line-all"});
  EXPECT_EQ(all.wait(), 1) << all.output();
  EXPECT_EQ(all.printed(error), 1) << all.output();
  ChildProcess empty({kProgram, "one-line-empty"});
  EXPECT_EQ(empty.wait(), 1);
  EXPECT_EQ(empty.printed("launch_program: an error without a message\n"), 1) << empty.output();
  ChildProcess well({kProgram, "--spawn", "2", "one-line-exit"});
  EXPECT_EQ(well.wait(), 3) << well.output();
}

// Without spawn_local, no supervisor ends the others.
TEST(RunMain, RanksOfALauncherSayWhyOnce) {
  const auto port = free_port();
  for (const char* failing : {"0", "1"}) {
    Processes processes;
    for (int rank = 0; rank < 3; ++rank)
      processes.push_back(std::make_unique<ChildProcess>(std::vector<std::string>{kProgram, "one-line", failing},
                                                         torchrun(rank, 3, port)));
    for (auto& process : processes) EXPECT_EQ(process->wait(seconds(30)), 1) << outputs(processes);
    const auto all = outputs(processes);
    EXPECT_TRUE(contains(all, c10::str("launch_program: rank ", failing, " of 3: rank has thrown this"))) << all;
    EXPECT_EQ(all.find("launch_program: "), all.rfind("launch_program: ")) << all;
  }
}

// SIGUSR1 is a warning, not a second request to end.
TEST(SpawnLocal, AWarningDoesNotEndTheGracePeriod) {
  ChildProcess program({kProgram, "--spawn", "2", "--grace-ms", "2000", "stubborn"});
  ASSERT_TRUE(program.await("hangs", 2)) << program.output();
  const auto began = std::chrono::steady_clock::now();
  ::kill(program.pid(), SIGTERM);
  ASSERT_TRUE(program.await("ending all ranks", 1)) << program.output();
  ::kill(program.pid(), SIGUSR1);
  EXPECT_EQ(program.wait(), 128 + SIGTERM) << program.output();
  EXPECT_GE(std::chrono::steady_clock::now() - began, seconds(2));
}

TEST(SpawnLocal, RanksThatDoNotEndAreKilled) {
  ChildProcess program({kProgram, "--spawn", "2", "--grace-ms", "1000", "stubborn"});
  ASSERT_TRUE(program.await("hangs", 2)) << program.output();
  ::kill(program.pid(), SIGTERM);
  EXPECT_EQ(program.wait(), 128 + SIGTERM) << program.output();
  EXPECT_EQ(program.printed("did not end; killing it"), 2) << program.output();
  EXPECT_TRUE(all_gone(program.output(), 2));

  ChildProcess impatient({kProgram, "--spawn", "2", "stubborn"});
  ASSERT_TRUE(impatient.await("hangs", 2));
  ::kill(impatient.pid(), SIGINT);
  ASSERT_TRUE(impatient.await("ending all ranks", 1));
  ::kill(impatient.pid(), SIGINT);
  EXPECT_EQ(impatient.wait(seconds(3)), 128 + SIGINT) << "a second Ctrl-C does not wait\n" << impatient.output();
}

TEST(SpawnLocal, NoOrphansWhenTheParentIsKilled) {
  ChildProcess program({kProgram, "--spawn", "3", "stubborn"});
  ASSERT_TRUE(program.await("hangs", 3)) << program.output();
  ::kill(program.pid(), SIGKILL);
  EXPECT_EQ(program.wait(), 128 + SIGKILL);
  EXPECT_TRUE(all_gone(program.output(), 3));
}

TEST(SpawnLocal, RefusesToRunInsideOfALauncher) {
  ChildProcess inside({kProgram, "spawn-again"}, {{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_EQ(inside.wait(), 128 + SIGABRT);
  EXPECT_TRUE(contains(inside.output(), "launcher has started this process already")) << inside.output();
  ChildProcess graceless({kProgram, "--spawn", "1", "--grace-ms", "-1"});
  EXPECT_EQ(graceless.wait(), 128 + SIGABRT);
  EXPECT_TRUE(contains(graceless.output(), "grace is -1 ms; expected at least 0")) << graceless.output();
  ChildProcess none({kProgram, "--spawn", "-1"});
  EXPECT_EQ(none.wait(), 128 + SIGABRT);
  EXPECT_TRUE(contains(none.output(), "world is -1; expected at least 1")) << none.output();
}

TEST(Trace, LeavesWhatIsNoTrace) {
  const testing_support::TemporaryFolder folder;
  const auto run = [&](const std::string& path, int world) {
    ChildProcess program({kProgram, "--spawn", std::to_string(world)}, {{"TESSERA_TRACE", path}});
    EXPECT_EQ(program.wait(), 0) << program.output();
    return program.printed("is not a trace; it is left as it is");
  };
  const auto text_of = [](const std::string& path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const auto notes = folder.write("notes.json", R"({"displayTimeUnits":"my only copy"})");
  EXPECT_EQ(run(notes, 1), 1);
  EXPECT_EQ(text_of(notes), R"({"displayTimeUnits":"my only copy"})");
  const auto pipe = folder / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(run(pipe, 1), 1);
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  const auto earlier = folder.write("earlier.json", R"({"displayTimeUnit":"ms","traceEvents":[]})");  // of old versions
  EXPECT_EQ(run(earlier, 1), 1);
  EXPECT_EQ(text_of(earlier), R"({"displayTimeUnit":"ms","traceEvents":[]})");
}

// Maps each run's number in the file to its id.
std::map<int64_t, std::set<std::string>> runs_of(const nlohmann::json& events) {
  std::map<int64_t, std::set<std::string>> runs;
  for (const auto& event : events)
    if (event["name"] == "tessera_trace")
      runs[event["pid"].get<int64_t>() / kPidsOfRun].insert(event["args"]["run"].get<std::string>());
  return runs;
}

TEST(Trace, RunsAreAddedAndAKillLeavesWhatWasThere) {
  const testing_support::TemporaryFolder folder;
  const auto trace = folder.write("trace.json", "");
  const ChildProcess::Environment environment = {{"TESSERA_TRACE", trace}};
  const auto text = [&] {
    std::ifstream file(trace);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const auto run_well = [&] {
    ChildProcess program({kProgram, "--spawn", "2"}, environment);
    EXPECT_EQ(program.wait(), 0) << program.output();
  };
  run_well();
  const auto first = text();
  ASSERT_EQ(runs_of(testing_support::trace_events(trace)).size(), 1u);
  {
    ChildProcess program({kProgram, "--spawn", "3", "hang"}, environment);
    ASSERT_TRUE(program.await("hangs", 3)) << program.output();
    for (int tries = 0; tries < 600 && text().size() <= first.size(); ++tries)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ::kill(program.pid(), SIGKILL);
    EXPECT_EQ(program.wait(), 128 + SIGKILL);
    EXPECT_TRUE(all_gone(program.output(), 3));
  }
  const auto second = text();
  EXPECT_GT(second.size(), first.size()) << "what was recorded before the kill";
  EXPECT_TRUE(second.starts_with(first.substr(0, first.size() - kTraceEnd.size()))) << second;
  EXPECT_EQ(runs_of(testing_support::trace_events(trace)).size(), 2u);

  std::filesystem::resize_file(trace, second.size() - 7);  // as after a kill during a write
  EXPECT_THROW(testing_support::trace_events(trace), nlohmann::json::exception);
  run_well();
  const auto events = testing_support::trace_events(trace);
  for (const auto& event : events) {
    if (event["name"] != "tessera_trace") continue;
    EXPECT_EQ(event["args"]["clock"], Trace::clock_id());
  }
  const auto runs = runs_of(events);
  EXPECT_EQ(runs.size(), 3u);
  std::set<std::string> ids;
  for (const auto& [number, of_run] : runs) {
    EXPECT_EQ(of_run.size(), 1u) << "ranks of run " << number << " know it by one id";
    ids.insert(of_run.begin(), of_run.end());
  }
  EXPECT_EQ(ids.size(), 3u);
}

// One of three ranks is not traced: the others must not wait for it.
TEST(Trace, SomeRanksMayBeWithout) {
  const testing_support::TemporaryFolder folder;
  const auto trace = folder.write("trace.json", "");
  const auto port = free_port();
  std::vector<std::unique_ptr<ChildProcess>> processes;
  for (const int rank : {0, 1, 2}) {
    auto environment = torchrun(rank, 3, port);
    environment["TESSERA_TRACE"] = rank == 0 ? "" : trace.string();
    processes.push_back(std::make_unique<ChildProcess>(std::vector<std::string>{kProgram}, environment));
  }
  for (auto& process : processes) EXPECT_EQ(process->wait(), 0) << process->output();
  const auto events = testing_support::trace_events(trace);
  EXPECT_EQ(runs_of(events).size(), 1u);
  for (const auto& event : events) EXPECT_NE(event["pid"], 0);
}

// Starts a process for each environment, and expects that all end with the sum of the ranks.
void expect_group(const std::vector<ChildProcess::Environment>& environments) {
  Processes processes;
  for (const auto& environment : environments) {
    processes.push_back(std::make_unique<ChildProcess>(std::vector<std::string>{kProgram}, environment));
  }
  const auto world = static_cast<int>(environments.size());
  for (auto& process : processes) EXPECT_EQ(process->wait(), 0) << outputs(processes);
  for (auto& process : processes) {
    EXPECT_TRUE(contains(process->output(), " of " + std::to_string(world) + " ")) << process->output();
    EXPECT_TRUE(contains(process->output(), "sum " + std::to_string(world * (world - 1) / 2) + " "));
  }
}

TEST(Launchers, RanksByHandShareTheCores) {
  if (available_cores() < 2) GTEST_SKIP() << "one core";
  const auto port = free_port();
  Processes processes;
  for (int rank = 0; rank < 2; ++rank)
    processes.push_back(std::make_unique<ChildProcess>(
        std::vector<std::string>{"env", "-u", "OMP_NUM_THREADS", kProgram}, torchrun(rank, 2, port)));
  const auto share = c10::str("threads default intra-op ", available_cores() / 2, "\n");
  for (auto& process : processes) {
    EXPECT_EQ(process->wait(), 0) << process->output();
    EXPECT_TRUE(contains(process->output(), share)) << process->output();
  }
}

TEST(Launchers, TorchrunsEnvironment) {
  const auto port = free_port();
  expect_group({torchrun(2, 3, port), torchrun(1, 3, port), torchrun(0, 3, port)});
}

// Starts ranks of kProgram with one intra-operator thread each.
Processes start_ranks(int world, const std::string& peer_memory, const std::vector<std::string>& arguments) {
  const auto port = free_port();
  Processes processes;
  std::vector<std::string> command = {kProgram};
  command.insert(command.end(), arguments.begin(), arguments.end());
  for (int rank = 0; rank < world; ++rank) {
    auto environment = torchrun(rank, world, port);
    environment["TESSERA_PEER_MEMORY"] = peer_memory;
    environment["OMP_NUM_THREADS"] = "1";
    processes.push_back(std::make_unique<ChildProcess>(command, environment));
  }
  return processes;
}

// Rank 0 serves the store, whose calls then never return; the others must fail with an error that names the rank.
TEST(Launchers, ARankThatIsStoppedEndsTheOthersInTime) {
  struct Case {
    int stopped;
    const char* peer_memory;
    const char* mode = "stop";
    Processes processes{};
  };
  std::vector<Case> cases;
  cases.push_back({0, "1"});
  cases.push_back({2, "1"});
  cases.push_back({0, "0"});
  cases.push_back({0, "1", "split"});
  for (Case& c : cases)
    c.processes = start_ranks(3, c.peer_memory, {"--timeout-ms", "3000", c.mode, std::to_string(c.stopped)});
  for (Case& c : cases) {
    SCOPED_TRACE(c10::str("rank ", c.stopped, " stops, TESSERA_PEER_MEMORY=", c.peer_memory, " ", c.mode));
    const auto stopped = static_cast<size_t>(c.stopped);
    ASSERT_TRUE(c.processes[stopped]->await("stops", 1)) << outputs(c.processes);
    bool some_timed_out = false;
    for (size_t rank = 0; rank < 3; ++rank) {
      if (rank == stopped) continue;
      EXPECT_EQ(c.processes[rank]->wait(), 128 + SIGABRT) << outputs(c.processes);
      // The second rank to notice may see the first one's end before its own timeout.
      const std::string output = c.processes[rank]->output();
      const bool made_no_group = contains(output, "could not join the group within 3 s");
      EXPECT_TRUE(contains(output, "timed out after 3 s") || contains(output, "is closed") || made_no_group)
          << outputs(c.processes);
      some_timed_out =
          some_timed_out || made_no_group ||
          (contains(output, "timed out after 3 s") && contains(output, "rank " + std::to_string(c.stopped)));
    }
    EXPECT_TRUE(some_timed_out) << outputs(c.processes);
  }
}

// As by Ctrl-Z, for longer than the timeout: timeouts count the time in which a process ran.
TEST(Launchers, AJobThatIsStoppedAndContinuedGoesOn) {
  std::vector<std::unique_ptr<ChildProcess>> jobs;
  for (const char* peer_memory : {"1", "0"})
    jobs.push_back(std::make_unique<ChildProcess>(
        std::vector<std::string>{kProgram, "--spawn", "3", "--timeout-ms", "2000", "pause", "1"},
        ChildProcess::Environment{{"TESSERA_PEER_MEMORY", peer_memory}, {"OMP_NUM_THREADS", "1"}}));
  for (const auto& job : jobs) {
    ASSERT_TRUE(job->await("runs", 3)) << job->output();
    ::kill(-job->pid(), SIGSTOP);
  }
  std::this_thread::sleep_for(seconds(6));
  for (const auto& job : jobs) ::kill(-job->pid(), SIGCONT);
  for (const auto& job : jobs) EXPECT_EQ(job->wait(), 0) << job->output();
}

// An asynchronous save ends although the store, to which it belongs, is silent: its calls have no deadline of their
// own.
TEST(Launchers, ASaveEndsWhenTheStoreIsSilent) {
  const testing_support::TemporaryFolder folder;
  const ChildProcess::Environment saves{{"TESSERA_TEST_FOLDER", folder.path().string()}, {"OMP_NUM_THREADS", "1"}};
  const auto port = free_port();
  Processes processes;
  for (int rank = 0; rank < 2; ++rank) {
    auto environment = torchrun(rank, 2, port);
    environment.insert(saves.begin(), saves.end());
    processes.push_back(std::make_unique<ChildProcess>(
        std::vector<std::string>{kProgram, "--timeout-ms", "3000", "save", "0"}, environment));
  }
  // The process that starts the ranks has the store. It is stopped, and a rank is killed.
  ChildProcess parent({kProgram, "--spawn", "3", "--timeout-ms", "3000", "saving"},
                      {{"TESSERA_TEST_FOLDER", (folder.path() / "spawned").string()}});
  ASSERT_TRUE(parent.await("saves", 3)) << parent.output();
  const auto pids = rank_pids(parent.output());
  ASSERT_EQ(pids.size(), 3U);
  ::kill(parent.pid(), SIGSTOP);
  ::kill(pids[1], SIGKILL);
  EXPECT_TRUE(parent.await("save ended: ", 2)) << parent.output();

  EXPECT_EQ(processes[1]->wait(), kSaveEnded) << outputs(processes);
  EXPECT_TRUE(contains(processes[1]->output(), "timed out after 3 s waiting for rank 0") ||
              contains(processes[1]->output(), "does not answer"))
      << outputs(processes);
}

// The child has the memory and the connections of the group, and none of the threads.
TEST(Launchers, AForkedChildLeavesTheGroupAsItIs) {
  for (const char* peer_memory : {"0", "1"}) {
    const Processes processes = start_ranks(2, peer_memory, {"--timeout-ms", "5000", "fork", "1"});
    for (const auto& process : processes) EXPECT_EQ(process->wait(), 0) << outputs(processes);
    EXPECT_TRUE(contains(processes[1]->output(), "child: all-reduce of sum of ranks (1 elements of Long): process "))
        << outputs(processes);
    EXPECT_TRUE(contains(processes[1]->output(), "the child's status is 0")) << outputs(processes);
  }
}

// Rank 0's process serves the store and ends first: by its own exception, by an operation that fails because of rank 1,
// or without error. Rank 2 starts its next operation long after that.
TEST(Launchers, AllReadWhyAGroupEndsHoweverLate) {
  struct Case {
    const char* mode;
    size_t first;
    const char* peer_memory;
    const char* reason;
    Processes processes{};
  };
  std::vector<Case> cases;
  for (const char* peer_memory : {"0", "1"}) {
    cases.push_back({"late", 0, peer_memory, "rank 0 failed: rank has thrown this"});
    cases.push_back({"late", 1, peer_memory, "rank 1 failed: rank has thrown this"});
    cases.push_back({"leave", 0, peer_memory, "the connection to rank 0 is closed"});
  }
  for (Case& c : cases) c.processes = start_ranks(3, c.peer_memory, {c.mode, std::to_string(c.first)});
  for (Case& c : cases) {
    SCOPED_TRACE(c10::str(c.mode, " ", c.first, ", TESSERA_PEER_MEMORY=", c.peer_memory));
    const bool is_well = c.mode == std::string("leave");
    EXPECT_EQ(c.processes[c.first]->wait(), is_well ? 0 : 128 + SIGABRT) << outputs(c.processes);
    for (size_t rank = 0; rank < 3; ++rank) {
      if (rank == c.first) continue;
      EXPECT_EQ(c.processes[rank]->wait(), 128 + SIGABRT) << outputs(c.processes);
      EXPECT_TRUE(contains(c.processes[rank]->output(), c.reason)) << outputs(c.processes);
    }
  }
}

// Without a failure, rank 0's process ends when it is done, and c10d logs nothing on the other ranks.
TEST(Launchers, ARunThatEndsWellEndsAtOnce) {
  for (const char* peer_memory : {"0", "1"}) {
    const Processes processes = start_ranks(3, peer_memory, {"linger", "0"});
    EXPECT_EQ(processes[0]->wait(), 0) << outputs(processes);
    const auto began = std::chrono::steady_clock::now();
    for (const size_t rank : {1, 2}) EXPECT_EQ(processes[rank]->wait(), 0) << outputs(processes);
    EXPECT_GT(std::chrono::steady_clock::now() - began, seconds(1)) << "of the three that they are later";
    EXPECT_FALSE(contains(outputs(processes), "Exception raised")) << outputs(processes);
  }
}

void expect_a_kill_ends_the_others(const char* peer_memory, const char* mode, const char* operation) {
  const Processes processes = start_ranks(3, peer_memory, {mode, "1"});
  EXPECT_EQ(processes[1]->wait(), 128 + SIGKILL) << outputs(processes);
  for (const size_t rank : {0, 2}) {
    EXPECT_EQ(processes[rank]->wait(), 128 + SIGABRT) << outputs(processes);
    EXPECT_TRUE(contains(processes[rank]->output(), operation)) << outputs(processes);
  }
  EXPECT_TRUE(contains(outputs(processes), "rank 1 is closed")) << outputs(processes);
}

// During chunked reductions.
TEST(Launchers, ARankThatIsKilledEndsTheOthersByName) {
  expect_a_kill_ends_the_others("0", "cut", "all-reduce of a large tensor");
}

// The transport has not started the awaited operation yet.
TEST(Launchers, ARankThatIsKilledEndsTheOthersConnecting) {
  expect_a_kill_ends_the_others("1", "connect", "all-reduce of a tensor");
}

// Heartbeats, as NCCL's groups use them, through the store of a launched group in rank 0's process.
TEST(Launchers, BeatsTellOfARankThatIsKilled) {
  const Processes without_1 = start_ranks(3, "0", {"beats", "1"}), without_0 = start_ranks(3, "0", {"beats", "0"});
  for (const size_t rank : {0, 2}) EXPECT_EQ(without_1[rank]->wait(), 4) << outputs(without_1);
  EXPECT_TRUE(contains(without_1[0]->output(), "cut: rank 1 has given no sign of life for 2.5 s"))
      << outputs(without_1);
  EXPECT_TRUE(contains(without_1[2]->output(), "cut: rank 0 failed: rank 1 has given no sign")) << outputs(without_1);
  for (const size_t rank : {1, 2}) {
    EXPECT_EQ(without_0[rank]->wait(), 4) << outputs(without_0);
    EXPECT_TRUE(contains(without_0[rank]->output(),
                         "cut: the store cannot be reached any more, so the process of rank "
                         "0 has probably ended"))
        << outputs(without_0);
  }
}

// gloo does not end the wait for a partly transferred message when its connection closes.
TEST(Launchers, ARankThatEndsInTheMiddleOfAMessageEndsTheOthersByName) {
  const Processes processes = start_ranks(2, "0", {"torn", "1"});
  EXPECT_EQ(processes[1]->wait(), 128 + SIGABRT) << outputs(processes);
  EXPECT_EQ(processes[0]->wait(), 128 + SIGABRT) << outputs(processes);
  // The rank may notice itself that its tensor cannot be read.
  const std::string told = processes[0]->output();
  EXPECT_TRUE(contains(told, "the connection to rank 1 is closed") || contains(told, "rank 1 failed")) << told;
}

TEST(Launchers, TorchrunsAgentServesTheStoreOverRestarts) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(free_port()));
  options.isServer = true;
  options.waitWorkers = false;
  const c10d::TCPStore agent("127.0.0.1", options);
  for (const char* restart : {"0", "1"}) {
    std::vector<ChildProcess::Environment> environments;
    for (int rank = 0; rank < 2; ++rank) {
      environments.push_back(torchrun(rank, 2, std::to_string(options.port)));
      environments.back().insert({{"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                  {"TORCHELASTIC_RUN_ID", "test"},
                                  {"TORCHELASTIC_RESTART_COUNT", restart}});
    }
    expect_group(environments);
  }
}

TEST(Launchers, SrunsEnvironment) {
  std::vector<ChildProcess::Environment> environments;
  const auto job = std::to_string(::getpid());
  for (int rank = 0; rank < 3; ++rank) {
    const auto text = std::to_string(rank);
    environments.push_back({{"SLURM_PROCID", text},
                            {"SLURM_LOCALID", text},
                            {"SLURM_NTASKS", "3"},
                            {"SLURM_STEP_NUM_TASKS", "3"},
                            {"SLURM_STEP_ID", "0"},
                            {"SLURM_JOB_ID", job},
                            {"SLURM_NODEID", "0"},
                            {"SLURM_STEP_NODELIST", "node[17]"},
                            {"SLURM_STEP_TASKS_PER_NODE", "3"},
                            {"SLURM_SUBMIT_DIR", "/"}});
  }
  expect_group(environments);
}

TEST(Launchers, Mpirun) {
  if (std::system("command -v mpirun > /dev/null") != 0) GTEST_SKIP() << "mpirun is not installed (openmpi-bin)";
  ChildProcess program({"mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "3", kProgram});
  EXPECT_EQ(program.wait(), 0) << program.output();
  EXPECT_EQ(program.printed("of 3 pid"), 3) << program.output();
  EXPECT_EQ(program.printed("sum 3 "), 3) << program.output();
}

// MPICH's launcher gives no id of the job. Open MPI's mpiexec may be installed beside it.
TEST(Launchers, MpiexecOfMpich) {
  if (std::system("command -v mpiexec.hydra > /dev/null") != 0) GTEST_SKIP() << "MPICH is not installed (mpich)";
  ChildProcess program({"mpiexec.hydra", "-n", "3", "sh", "-c", kProgram + " && true"});  // not its own child
  EXPECT_EQ(program.wait(), 0) << program.output();
  EXPECT_EQ(program.printed("of 3 pid"), 3) << program.output();
  EXPECT_EQ(program.printed("sum 3 "), 3) << program.output();
}

TEST(Launchers, ABatchScriptIsAWorldOfOneAndSaysSo) {
  ChildProcess program(
      {kProgram}, {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "1"}, {"SLURM_SUBMIT_DIR", "/"}});
  EXPECT_EQ(program.wait(), 0);
  EXPECT_TRUE(contains(program.output(), "rank 0 of 1")) << program.output();
  EXPECT_TRUE(contains(program.output(), "srun did not start it")) << program.output();
}

// Runs one process to its end and returns its output.
std::string run_to_error(const ChildProcess::Environment& environment, int code) {
  ChildProcess program({kProgram, "--timeout-ms", "1500"}, environment);
  EXPECT_EQ(program.wait(), code) << program.output();
  return program.output();
}

// Returns the store's keys, which every process of the network can list.
std::vector<std::string> keys_of_store(const std::string& port) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(port));
  options.waitWorkers = false;
  return c10d::TCPStore("127.0.0.1", options).listKeys();
}

// Blocks until a store listens and has a key with this end.
bool await_key(const std::string& port, const std::string& end) {
  for (int tries = 0; tries < 1200; ++tries) {
    const auto keys = keys_of_store(port);
    if (std::any_of(keys.begin(), keys.end(), [&](const std::string& key) { return key.ends_with(end); })) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return false;
}

TEST(LaunchErrors, HalfSetEnvironmentIsNamed) {
  EXPECT_TRUE(contains(run_to_error({{"RANK", "1"}}, kInvalidArgument), "RANK=1, WORLD_SIZE is not set"));
  const auto contradiction = run_to_error({{"RANK", "1"},
                                           {"WORLD_SIZE", "2"},
                                           {"MASTER_ADDR", "h"},
                                           {"MASTER_PORT", "1"},
                                           {"OMPI_COMM_WORLD_RANK", "0"},
                                           {"OMPI_COMM_WORLD_SIZE", "2"}},
                                          kInvalidArgument);
  EXPECT_TRUE(contains(contradiction, "RANK=1, WORLD_SIZE=2, but Open MPI's OMPI_COMM_WORLD_RANK=0")) << contradiction;
  auto interface = torchrun(1, 2, "1");
  interface["GLOO_SOCKET_IFNAME"] = "no-such-if";
  EXPECT_TRUE(contains(run_to_error(interface, kInvalidArgument), "GLOO_SOCKET_IFNAME=no-such-if"));
}

TEST(LaunchErrors, NobodyListens) {
  const auto port = free_port();
  const auto output = run_to_error(torchrun(1, 3, port), kCommError);
  EXPECT_TRUE(contains(output, "rank 1 of 3 (RANK and WORLD_SIZE)")) << output;
  EXPECT_TRUE(contains(output, "127.0.0.1:" + port + " (timeout 1.5 s)")) << output;
  EXPECT_TRUE(contains(output, "Connection refused")) << output;
}

TEST(LaunchErrors, AMasterWithoutAddressIsNamed) {
  for (const int rank : {0, 1}) {
    const auto output = run_to_error(torchrun(rank, 2, free_port(), "no-such-host.invalid"), kCommError);
    EXPECT_TRUE(contains(output, "the name \"no-such-host.invalid\" cannot be resolved")) << output;
    EXPECT_FALSE(contains(output, "GLOO_SOCKET_IFNAME")) << output;
  }
}

TEST(LaunchErrors, SomebodyListensAndSaysNothing) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(fd, 5), 0);
  ASSERT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const auto output = run_to_error(torchrun(1, 2, std::to_string(ntohs(address.sin_port))), kCommError);
  EXPECT_TRUE(contains(output, "whoever listens there does not answer")) << output;
  ::close(fd);
}

// An HTTP server waits for the end of a line, which c10d's client never sends.
TEST(LaunchErrors, AnotherServerIsNamedLongBeforeTheTimeout) {
  if (std::system("command -v python3 > /dev/null") != 0) GTEST_SKIP() << "python3 is not installed";
  const auto port = free_port();
  ChildProcess server({"python3", "-m", "http.server", port});
  while (server.printed("Serving HTTP") == 0 && server.wait(seconds(0)) < 0) {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(std::stoi(port)));
    const bool listens = ::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    ::close(fd);
    if (listens) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  ChildProcess program({kProgram, "--timeout-ms", "3600000"}, torchrun(1, 2, port));
  EXPECT_EQ(program.wait(), kCommError) << program.output();
  EXPECT_TRUE(contains(program.output(), "whoever listens there does not answer")) << program.output();
}

TEST(LaunchErrors, LoopbackIsDown) {
  if (std::system("unshare -rn true > /dev/null 2>&1") != 0) GTEST_SKIP() << "`unshare -rn` is not allowed here";
  ChildProcess spawned({"unshare", "-rn", kProgram, "--spawn", "2"});
  EXPECT_EQ(spawned.wait(), 128 + SIGABRT) << spawned.output();
  EXPECT_TRUE(contains(spawned.output(), "is the loopback interface down? (ip link set lo up)")) << spawned.output();
  ChildProcess first({"unshare", "-rn", kProgram}, torchrun(0, 2, free_port()));
  EXPECT_EQ(first.wait(), kCommError) << first.output();
  EXPECT_TRUE(contains(first.output(), "is the loopback interface down? (ip link set lo up)")) << first.output();
}

// Output must not be written to a socket that has got the number of stderr.
TEST(SpawnLocal, RunsWithoutStandardDescriptors) {
  ChildProcess program({"sh", "-c", "exec " + kProgram + " --spawn 2 exit 1 <&- >&- 2>&-"});
  EXPECT_EQ(program.wait(), 3);
  ChildProcess well({"sh", "-c", kProgram + " --spawn 2 <&- 2>&-"});
  EXPECT_EQ(well.wait(), 0);
  EXPECT_EQ(well.printed("sum 1 "), 2) << well.output();
}

TEST(LaunchErrors, MissingRanksAreNamed) {
  const auto output = run_to_error(torchrun(0, 4, free_port()), kCommError);
  EXPECT_TRUE(contains(output, "rank 0 of 4")) << output;
  EXPECT_TRUE(contains(output, "ranks 1, 2, 3 did not come")) << output;
}

TEST(LaunchErrors, AStrangerIsRefused) {
  const auto port = free_port();
  auto own = torchrun(0, 2, port), stranger = torchrun(1, 2, port), member = torchrun(1, 2, port);
  own["TESSERA_STORE_TOKEN"] = member["TESSERA_STORE_TOKEN"] = "of this group";
  ChildProcess zero({kProgram}, own);
  ASSERT_TRUE(await_key(port, "/rank/0"));
  for (const std::string& key : keys_of_store(port)) EXPECT_FALSE(contains(key, "of this group")) << key;
  const auto without = run_to_error(stranger, kCommError);
  EXPECT_TRUE(contains(without, "this process has no TESSERA_STORE_TOKEN, and the group has one")) << without;
  stranger["TESSERA_STORE_TOKEN"] = "of another";
  const auto other = run_to_error(stranger, kCommError);
  EXPECT_TRUE(contains(other, "this process has another TESSERA_STORE_TOKEN than rank 0")) << other;
  ChildProcess one({kProgram}, member);  // the refused processes must not take its place
  EXPECT_EQ(zero.wait(), 0) << zero.output();
  EXPECT_EQ(one.wait(), 0) << one.output();
}

TEST(LaunchErrors, PortInUse) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(free_port()));
  options.isServer = true;
  options.waitWorkers = false;
  const c10d::TCPStore other("127.0.0.1", options);
  const auto output = run_to_error(torchrun(0, 2, std::to_string(options.port)), kCommError);
  EXPECT_TRUE(contains(output, "the port is in use")) << output;
  EXPECT_TRUE(contains(output, "MASTER_PORT")) << output;
}

TEST(LaunchErrors, TheSameRankTwiceAndOtherWorldSizes) {
  const auto port = free_port();
  ChildProcess zero({kProgram}, torchrun(0, 3, port));
  ChildProcess one({kProgram}, torchrun(1, 3, port));
  ASSERT_TRUE(await_key(port, "/rank/1"));
  const auto twice = run_to_error(torchrun(1, 3, port), kCommError);
  EXPECT_TRUE(contains(twice, "has already come as rank 1")) << twice;
  const auto smaller = run_to_error(torchrun(1, 2, port), kCommError);
  EXPECT_TRUE(contains(smaller, "has already come as rank 1")) << smaller;
  const auto larger = run_to_error(torchrun(3, 4, port), kCommError);
  EXPECT_TRUE(contains(larger, "its world size is 4, but 3 on the rank that came first")) << larger;
}

// Two network namespaces, joined by a pair of virtual interfaces, act as two hosts that cannot reach each other's
// loopback. Each resolves the name "tessera-first" as Debian does; the first resolves it to 127.0.1.1.
class TwoHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!run("ip netns add " + first_) || !run("ip netns add " + second_)) {
      GTEST_SKIP() << "`ip netns add` is not allowed or not installed here (it needs root and iproute2)";
    }
    ASSERT_TRUE(
        run("ip link add ta" + id_ + " netns " + first_ + " type veth peer name tb" + id_ + " netns " + second_));
    for (const auto& [host, interface, address] :
         {std::tuple{first_, "ta" + id_, "10.213.7.1/24"}, std::tuple{second_, "tb" + id_, "10.213.7.2/24"}}) {
      ASSERT_TRUE(run("ip -n " + host + " link set lo up"));
      ASSERT_TRUE(run("ip -n " + host + " addr add " + address + " dev " + interface));
      ASSERT_TRUE(run("ip -n " + host + " link set " + interface + " up"));
    }
    // `ip netns exec` mounts the files of /etc/netns/<name> over those of /etc.
    write_hosts(first_, "127.0.0.1 localhost\n127.0.1.1 tessera-first\n");
    write_hosts(second_, "127.0.0.1 localhost\n10.213.7.1 tessera-first\n");
  }

  void TearDown() override {
    for (const auto& host : {first_, second_}) {
      run("ip netns del " + host);
      std::filesystem::remove_all("/etc/netns/" + host);
    }
  }

  // Two ranks on the first host (if `first_ranks` is 2), the others on the second.
  void expect_sum(const std::string& master, int first_ranks, int world) {
    Processes processes;
    for (int rank = 0; rank < world; ++rank) {
      const bool on_first = rank < first_ranks;
      auto environment = torchrun(rank, world, "29517", master);
      environment["LOCAL_RANK"] = std::to_string(on_first ? rank : rank - first_ranks);
      environment["LOCAL_WORLD_SIZE"] = std::to_string(on_first ? first_ranks : world - first_ranks);
      processes.push_back(
          std::make_unique<ChildProcess>(std::vector<std::string>{"ip", "netns", "exec", on_first ? first_ : second_,
                                                                  kProgram, "--timeout-ms", "20000"},
                                         environment));
    }
    for (auto& process : processes) EXPECT_EQ(process->wait(), 0) << outputs(processes);
    for (auto& process : processes) {
      EXPECT_TRUE(contains(process->output(), "sum " + std::to_string(world * (world - 1) / 2) + " "))
          << process->output();
    }
  }

  static bool run(const std::string& command) { return std::system((command + " > /dev/null 2>&1").c_str()) == 0; }

  static void write_hosts(const std::string& host, const std::string& text) {
    std::filesystem::create_directories("/etc/netns/" + host);
    std::ofstream("/etc/netns/" + host + "/hosts") << text;
  }

  const std::string id_ = std::to_string(::getpid());
  const std::string first_ = "tessera-a-" + id_;
  const std::string second_ = "tessera-b-" + id_;
};

TEST_F(TwoHosts, FindTheAddressesThatFaceEachOther) { expect_sum("10.213.7.1", 1, 2); }

TEST_F(TwoHosts, FirstHostKnowsItselfByALoopbackName) { expect_sum("tessera-first", 2, 3); }

// Packets vanish, so no call of the store's socket fails.
TEST_F(TwoHosts, ASaveEndsWhenTheLinkIsCut) {
  const testing_support::TemporaryFolder folder;
  Processes processes;
  for (int rank = 0; rank < 2; ++rank) {
    auto environment = torchrun(rank, 2, "29518", "10.213.7.1");
    environment.insert(
        {{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}, {"TESSERA_TEST_FOLDER", folder.path().string()}});
    processes.push_back(
        std::make_unique<ChildProcess>(std::vector<std::string>{"ip", "netns", "exec", rank == 0 ? first_ : second_,
                                                                kProgram, "--timeout-ms", "3000", "saving"},
                                       environment));
  }
  for (const auto& process : processes) ASSERT_TRUE(process->await("saves", 1)) << outputs(processes);
  ASSERT_TRUE(run("ip -n " + first_ + " link set ta" + id_ + " down"));
  for (const auto& process : processes) EXPECT_EQ(process->wait(), kSaveEnded) << outputs(processes);
}

}  // namespace
}  // namespace tessera::launch_test
