// Checks ranks that are processes, which share one device. Usage: accelerator_ranks [world size ...] [check]. The world
// size is 2 by default. `check` is the name of a single check, such as "captured steps" or "is killed". NCCL refuses
// two ranks on a GPU of one host. So each process has its own NCCL_HOSTID: NCCL sees hosts that sockets on loopback
// connect. Without TESSERA_TEST_GPU, the device is simulated. Checks results, order and failures, but not speed.
//
// For each world size, one run checks the collectives and the wrappers. Then one run for each failure checks the errors
// of the surviving ranks, or that they continue (process_elastic.h). Prints a line for each check, and a verdict at the
// end.
#include <signal.h>
#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/accelerator/captured_training.h"
#include "tests/accelerator/collectives.h"
#include "tests/accelerator/process_elastic.h"
#include "tests/accelerator/rank_processes.h"
#include "tests/accelerator/training.h"
#include "tests/support/accelerator/accelerator.h"
#include "tests/support/accelerator/ranks.h"

namespace tessera::process_ranks {
using namespace internal;
namespace {

using accelerator_training::Case;
using accelerator_training::State;
using collectives::Results;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing_support::seeded;

constexpr const char* kChecks = "checks:";  // argument of ranks that run checks; a name after it selects one check
constexpr int kSurvived = 3;                // exit code of a rank that has caught a CommError
constexpr int kProcessesAtOnce = 16;
constexpr seconds kLimitOfChecks{180}, kLimitOfFailures{75};

const Case kWrappers[] = {{.name = "ddp", .wrapper = Case::kDdp},
                          {.name = "sdp", .wrapper = Case::kSdp},
                          {.name = "fsdp", .wrapper = Case::kFsdp}};

// Runs the checks on one rank. A check returns a summary with its counts, and reports differences by fail().
class Checks {
 public:
  explicit Checks(std::shared_ptr<Communicator> comm)
      : comm_(std::move(comm)), size_(comm_->size()), is_exact_(!accelerator::on_gpus()) {
    const char* const port = std::getenv(kStorePort);
    TORCH_CHECK(port != nullptr, kStorePort, " is not set: start this program without RANK");
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(std::stoi(port));
    options.isServer = comm_->rank() == 0;
    store_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }

  // Runs the check with the name `only`, or all checks if that is empty. Returns the exit code.
  int run(const std::string& only) {
    only_ = only;
    check("collectives", [&] { return compare(collectives::reduce_all, *comm_, is_exact_); });
    check("moves of all types", [&] { return compare(collectives::move_all, *comm_, true); });
    check("sums in rank order", [&] { return sums_in_rank_order(); });
    check("two groups at once", [&] { return two_groups(); });
    check("parity with CPUs", [&] { return parity(); });
    check("random delays", [&] { return delays(); });
    check("captured steps", [&] { return captured_steps(); });
    check("checkpoints", [&] { return checkpoints(); });
    if (!has_run_) throw std::invalid_argument("there is no check '" + only + "'");
    return failures_ > 0 ? 1 : 0;
  }

 private:
  void check(const char* name, const std::function<std::string()>& body) {
    if (!only_.empty() && only_ != name) return;
    has_run_ = true;
    const auto began = steady_clock::now();
    const int before = failures_;
    const std::string figures = body();
    comm_->barrier();
    if (comm_->rank() == 0 || failures_ > before)
      std::printf("%s, rank %d of %d: %s%s, %.1f s\n", name, comm_->rank(), size_, failures_ > before ? "FAILED; " : "",
                  figures.c_str(), seconds_since(began));
  }
  void fail(const std::string& text) {
    ++failures_;
    std::printf("FAILED on rank %d of %d: %s\n", comm_->rank(), size_, text.substr(0, 300).c_str());
  }

  // Compares results with those of gloo, whose ranks are threads of this process.
  std::string compare(Results (*body)(Communicator&), Communicator& comm, bool is_exact) {
    Results expected;
    run_ranks(size_, [&](std::shared_ptr<Communicator> on_cpu) {
      Results results = body(*on_cpu);
      if (on_cpu->rank() == comm_->rank()) expected = std::move(results);
    });
    const Results got = body(comm);
    int equal = 0;
    for (const auto& [name, value] : expected) {
      const at::Tensor& own = got.at(name);
      const bool is_equal = torch::equal(own, value);
      equal += is_equal ? 1 : 0;
      if (!is_equal && (is_exact || !is_near(own, value))) fail(name + " differs");
    }
    return c10::str(expected.size(), " results, ", equal, " of them with the bits of gloo");
  }
  // Returns whether sums of at most 5 values, of up to about 500 each, are equal up to rounding.
  static bool is_near(const at::Tensor& own, const at::Tensor& expected) {
    const at::ScalarType dtype = expected.scalar_type();
    if (!at::isFloatingType(dtype)) return torch::equal(own, expected);
    const double spacing = dtype == at::kBFloat16 ? 4 : dtype == at::kHalf ? 1 : dtype == at::kFloat ? 1e-3 : 1e-10;
    return (own.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>() <= spacing;
  }

  std::shared_ptr<Communicator> group_in_rank_order() {
    return communicator_from(c10::make_intrusive<c10d::PrefixStore>("in rank order", store_), comm_->rank(), size_,
                             {.device = comm_->device(), .timeout = seconds(60), .rank_order_sums = true});
  }
  std::string sums_in_rank_order() {
    const auto group = group_in_rank_order();
    std::string figures = compare(collectives::reduce_all, *group, true);
    State first;
    for (const Case& of : kWrappers) {
      const State state = accelerator_training::train(of, group);
      if (first.empty()) first = state;
      const std::string difference = accelerator_training::difference(first, state);
      if (!difference.empty()) fail(of.name + " and ddp in rank order:" + difference);
    }
    return figures + ", wrappers equal bit for bit";
  }

  // Checks a group and two subgroups whose operations are in flight at the same time.
  std::string two_groups() {
    const int half = comm_->rank() % 2;
    const auto part = comm_->split(half);
    constexpr int kTimes = 50;
    for (int i = 0; i < kTimes; ++i) {
      at::Tensor all = torch::full({1000}, comm_->rank() + 1.0, comm_->device()), some = all.clone();
      auto of_part = part->all_reduce(some, ReduceOp::kSum, "some");
      auto of_all = comm_->all_reduce(all, ReduceOp::kSum, "all");
      of_all.wait();
      of_part.wait();
      double expected = 0;
      for (int rank = half; rank < size_; rank += 2) expected += rank + 1;
      if (comm_->to_host(some, "some").ne(expected).any().item<bool>()) fail("the sum of a part is wrong");
      if (comm_->to_host(all, "all").ne(size_ * (size_ + 1) / 2.0).any().item<bool>()) fail("the sum of all is wrong");
    }
    return c10::str(kTimes, " times");
  }

  std::string parity() {
    int count = 0;
    double worst = 0;
    for (Case of : accelerator_training::cases()) {
      const bool has_copies = of.fsdp.hybrid.ranks_per_copy > 0 || of.fsdp.hybrid.ranks_per_secondary_copy > 0;
      if (has_copies && size_ % 4 != 0) continue;
      of.world = size_;
      const State got = accelerator_training::train(of, comm_);
      ++count;
      if (comm_->rank() != 0) continue;  // all ranks have the same state
      const bool is_rounded = of.fsdp.mixed_precision.param_dtype || of.wire == WireFormat::kInt8Blocks;
      const State expected = accelerator_training::train_on_gloo(of);
      const double tolerance = is_exact_ ? 0 : is_rounded ? 2e-2 : 1e-4;
      const std::string difference = accelerator_training::difference(expected, got, tolerance);
      if (!difference.empty()) fail(of.name + ":" + difference);
      for (const auto& [name, value] : expected)
        if (const auto own = got.find(name); own != got.end() && !is_rounded)
          worst = std::max(worst, (own->second - value).abs().max().item<double>());
    }
    return c10::str(count, " cases, the largest difference in fp32 is ", worst);
  }

  // Trains the wrappers while a thread keeps streams busy for random times, which must not change the results.
  std::string delays() {
    int count = 0;
    for (Case of : kWrappers) {
      of.clips = true;
      const State expected = accelerator_training::train(of, comm_);
      for (uint32_t seed = 1; seed <= 3; ++seed) {
        std::atomic<bool> is_over = false;
        std::thread delaying([&] {
          const c10::DeviceGuard guard(comm_->device());
          for (uint32_t x = 17 * seed + comm_->rank(); !is_over; x = x * 1664525 + 1013904223) {
            accelerator::delay_next_stream(1 + x % 3'000'000);
            std::this_thread::sleep_for(std::chrono::microseconds(x % 2000));
          }
        });
        const State got = accelerator_training::train(of, comm_);
        is_over = true;
        delaying.join();
        if (const std::string difference = accelerator_training::difference(expected, got); !difference.empty())
          fail(of.name + " with delays:" + difference);
        ++count;
      }
    }
    return c10::str(count, " runs are equal bit for bit");
  }

  // Checks that CUDA graphs of steps give bitwise the results of a loop. (captured_step_test simulates all cases.)
  std::string captured_steps() {
    int count = 0;
    for (const captured_training::Case& of : captured_training::cases()) {
      if (of.world != size_ || (is_exact_ && count == 3)) continue;
      const auto began = steady_clock::now();
      const auto group = of.rank_order_sums ? group_in_rank_order() : comm_;
      const auto folder = std::filesystem::path(std::getenv(kFolder)) / of.name;
      const State expected = captured_training::train(of, /*captures=*/false, folder, group);
      const State got = captured_training::train(of, /*captures=*/true, folder, group);
      if (const auto text = accelerator_training::difference(expected, got); !text.empty()) fail(of.name + ":" + text);
      ++count;
      std::printf("%s: %.1f s\n", of.name.c_str(), seconds_since(began));
    }
    return c10::str(count, " cases are equal bit for bit to the loop");
  }

  // Saves a checkpoint with two ranks, and loads it with all ranks, and with one rank on a CPU.
  std::string checkpoints() {
    const auto pair = comm_->split(comm_->rank() < 2 ? 0 : -1);
    const std::filesystem::path folder = std::getenv(kFolder);
    const auto net = [](int seed, at::Device device) {
      return seeded(seed, [&] {
        torch::nn::Sequential layers(torch::nn::Linear(33, 17), torch::nn::Tanh(), torch::nn::Linear(17, 5));
        layers->to(device);
        return layers;
      });
    };
    const auto with = [&](int seed, const std::shared_ptr<Communicator>& comm, auto body) {
      FullyShardedDataParallel fsdp(net(seed, comm->device()), comm,
                                    {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
      AdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
      body(fsdp, optimizer);
      State state;
      for (auto& entry : fsdp.full_state_dict()) state[entry.key()] = entry.value().cpu();
      return state;
    };
    State saved;
    if (pair)
      saved = with(3, pair, [&](auto& fsdp, auto& optimizer) {
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          fsdp(torch::ones({2, 33}, pair->device())).square().sum().backward();
          optimizer.step();
        }
        save_checkpoint(folder / "saved", fsdp, optimizer);
      });
    comm_->barrier();
    const auto load = [&](auto& fsdp, auto& optimizer) { load_checkpoint(folder / "saved", fsdp, optimizer); };
    const State loaded = with(4, comm_, load);
    if (comm_->rank() != 0) return "";
    if (const auto text = accelerator_training::difference(saved, loaded); !text.empty()) fail("loaded by all:" + text);
    State on_cpu;
    run_ranks(1, [&](std::shared_ptr<Communicator> cpu) { on_cpu = with(5, cpu, load); });
    if (const auto text = accelerator_training::difference(saved, on_cpu); !text.empty())
      fail("loaded on a CPU:" + text);
    return c10::str("saved by 2 ranks, loaded by ", size_, " and by one on a CPU");
  }

  const std::shared_ptr<Communicator> comm_;
  const int size_;
  const bool is_exact_;  // true for the simulation, which adds in the same order as gloo
  c10::intrusive_ptr<c10d::Store> store_;
  int failures_ = 0;
  std::string only_;
  bool has_run_ = false;
};

// A failure of one rank in its third step. Errors of the other ranks must contain `reason`, with that rank for "%".
struct Failure {
  const char* name;
  const char* reason;
  bool is_of_rank_0 = false;
};
constexpr Failure kFailures[] = {
    {"is killed", "rank % has given no sign of life"},
    {"of the store is killed", "rank 0", /*is_of_rank_0=*/true},
    {"is stopped", "rank % has given no sign of life"},
    {"throws", "rank % failed: out of data"},
    {"leaves", "rank % has left the group"},
    {"skips a backward", "rank %"},
};
int rank_that_fails(const Failure& failure, int world) { return failure.is_of_rank_0 ? 0 : world - 1; }

int train_until_failure(const Failure& failure, const std::shared_ptr<Communicator>& comm) {
  const std::string name = failure.name;
  const bool fails = comm->rank() == rank_that_fails(failure, comm->size());
  torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Tanh(), torch::nn::Linear(8, 8));
  net->to(comm->device());
  FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
  const at::Tensor x = torch::ones({2, 8}, comm->device());
  auto began = steady_clock::now();
  try {
    for (int step = 0; step < 200; ++step) {
      fsdp.zero_grad();
      const bool fails_now = fails && step == 2;
      if (step == 2) {
        comm->barrier();  // so that all ranks have connected, and the device is idle
        began = steady_clock::now();
      }
      if (fails_now && name.ends_with("is killed")) ::raise(SIGKILL);
      if (fails_now && name == "is stopped") ::raise(SIGSTOP);
      if (fails_now && name == "throws") throw std::runtime_error("out of data");
      if (fails_now && name == "leaves") return 0;
      const at::Tensor loss = fsdp(x).square().sum();
      if (!(fails_now && name == "skips a backward")) loss.backward();
      fsdp.clip_grad_norm_(1.0);  // reads the norm
    }
  } catch (const CommError& error) {
    std::printf("survived for %.1f s: %s\n", seconds_since(began), error.what());
    return kSurvived;
  }
  return 0;
}

int rank_main(const std::string& part) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // keeps the order of lines: stderr writes to the same file
  const accelerator::Simulation simulation;
  return run_main([&] {
    at::set_num_threads(1);
    if (const auto* const death = std::ranges::find(kElasticDeaths, part, &ElasticDeath::name);
        death != std::end(kElasticDeaths))
      return train_elastically(*death);
    const auto comm = accelerator::init_on_shared_device({.timeout = seconds(60)});
    if (part.starts_with(kChecks)) return Checks(comm).run(part.substr(std::string_view(kChecks).size()));
    const auto* const failure = std::ranges::find(kFailures, part, &Failure::name);
    if (failure == std::end(kFailures)) throw std::invalid_argument("there is no part " + part);
    return train_until_failure(*failure, comm);
  });
}

// Returns only the lines that checks have printed, without warnings of libraries.
std::string lines_of_checks(const std::string& output) {
  std::istringstream lines(output);
  std::string line, text;
  while (std::getline(lines, line))
    if (line.find(", rank ") != std::string::npos || line.starts_with("FAILED")) text += line + "\n";
  return text.substr(0, 3000);
}

// Runs the checks on `world` processes, and prints their lines. Returns whether all ranks have succeeded.
bool run_checks(const std::string& program, const std::string& only, int world) {
  RankProcesses group(program, kChecks + only, world);
  bool is_right = true;
  for (int rank = 0; rank < world; ++rank) {
    const int code = group.wait(rank, kLimitOfChecks);
    is_right = is_right && code == 0;
    if (rank == 0 || code != 0) std::printf("%s", lines_of_checks(group.output(rank)).c_str());
    if (code != 0)
      std::printf("FAILED: rank %d of %d %s\n%s\n", rank, world,
                  code < 0 ? "did not end in time" : ("ended with code " + std::to_string(code)).c_str(),
                  last_lines(group.output(rank)).c_str());
  }
  return is_right;
}

// Prints the survivors' errors. Returns whether each error names the rank that has failed.
bool check_survivors(const Failure& failure, RankProcesses& group) {
  const int failed = rank_that_fails(failure, group.size());
  std::string reason = failure.reason;
  if (const auto at = reason.find('%'); at != std::string::npos) reason.replace(at, 1, std::to_string(failed));
  // A rank that skips a backward also survives, and gets an error.
  const bool all_survive = std::string_view(failure.name) == "skips a backward";
  int right = 0, survivors = 0;
  double longest_s = 0;
  std::string wrong;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank == failed && !all_survive) continue;
    ++survivors;
    const int code = group.wait(rank, kLimitOfFailures);
    const std::string output = group.output(rank);
    const std::string key = "survived for ";
    const auto at = output.find(key);
    if (code == kSurvived && at != std::string::npos && output.find(reason, at) != std::string::npos) {
      ++right;
      longest_s = std::max(longest_s, std::stod(output.substr(at + key.size())));
    } else {
      wrong += c10::str("FAILED: rank ", rank, " ended with code ", code, "; expected an error with '", reason, "':\n",
                        last_lines(output), "\n");
    }
  }
  std::printf("%d ranks, one %s: %d of %d report it, after %.1f s at most\n%s", group.size(), failure.name, right,
              survivors, longest_s, wrong.c_str());
  return right == survivors;
}

// A part in which ranks fail, and its check.
struct FailurePart {
  std::string name;
  std::function<bool(RankProcesses&)> check;
};
std::vector<FailurePart> failures() {
  std::vector<FailurePart> parts;
  for (const Failure& failure : kFailures)
    parts.push_back({failure.name, [&](RankProcesses& ranks) { return check_survivors(failure, ranks); }});
  for (const ElasticDeath& death : kElasticDeaths)
    parts.push_back(
        {death.name, [&](RankProcesses& ranks) { return check_elastic_survivors(death, ranks, kLimitOfFailures); }});
  return parts;
}

// Runs several parts concurrently, because they mostly wait; their processes share the device. Returns the number of
// parts whose check failed.
int wrong_failures(const std::string& program, const std::vector<FailurePart>& parts, int world) {
  int wrong = 0;
  const auto at_once = static_cast<size_t>(std::max(1, kProcessesAtOnce / world));
  for (size_t begin = 0; begin < parts.size(); begin += at_once) {
    const size_t end = std::min(parts.size(), begin + at_once);
    std::vector<std::unique_ptr<RankProcesses>> groups;
    for (size_t i = begin; i < end; ++i)
      groups.push_back(std::make_unique<RankProcesses>(program, parts[i].name, world));
    for (size_t i = begin; i < end; ++i) wrong += parts[i].check(*groups[i - begin]) ? 0 : 1;
  }
  return wrong;
}

int supervise(const std::string& program, const std::vector<int>& worlds, const std::string& only) {
  int wrong = 0, parts = 0;
  const auto began = steady_clock::now();
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::vector<FailurePart> selected = failures();
  std::erase_if(selected, [&](const FailurePart& part) { return !only.empty() && part.name != only; });
  const bool has_checks = only.empty() || selected.empty();
  for (const int world : worlds) {
    parts += static_cast<int>(selected.size()) + (has_checks ? 1 : 0);
    if (has_checks) wrong += run_checks(program, only, world) ? 0 : 1;
    wrong += wrong_failures(program, selected, world);
  }
  std::printf("ranks as processes: %s, %d of %d parts, %.0f s\n", wrong > 0 ? "FAILED" : "passed", parts - wrong, parts,
              seconds_since(began));
  return wrong > 0 ? 1 : 0;
}

}  // namespace
}  // namespace tessera::process_ranks

int main(int argc, char** argv) {
  if (tessera::launched()) return tessera::process_ranks::rank_main(argc > 1 ? argv[1] : "checks:");
  std::vector<int> worlds;
  std::string only;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (std::ranges::all_of(word, [](char c) { return c >= '0' && c <= '9'; }))
      worlds.push_back(std::atoi(argv[i]));
    else
      only = word;
  }
  if (worlds.empty()) worlds.push_back(2);
  if (std::ranges::any_of(worlds, [](int world) { return world < 2 || world > 16; })) {
    std::fprintf(stderr, "accelerator_ranks: world sizes are 2 to 16\n");
    return 2;
  }
  return tessera::process_ranks::supervise(argv[0], worlds, only);
}
