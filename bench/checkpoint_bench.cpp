// Measures saving and loading against `dd` with fsync on the same disk, and the stall of the training loop during an
// asynchronous save.
//
// The model is a chain of linear layers under FullyShardedDataParallel with AdamW; ranks are threads. A round has three
// comparisons: dd's write and a save; asynchronous saves; dd's read, a plain read and a load. The order within each is
// random. The table has medians, and medians of the rounds' ratios. Before a read, its files are dropped from the page
// cache. Before a write, older files are deleted.
//
// The row "the disk alone" is the fastest possible load: it reads the same files with direct I/O into new huge pages,
// with three threads per file, without checksums or tensors.
//
// Targets: a save takes at most dd's time; a load at most dd's time / 0.9; the stall at most 0.15 of a save. The stall
// is the time of the call, plus the wait before the optimizer's step, which follows one forward and backward.
#include <fcntl.h>
#include <sys/mman.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <boost/program_options.hpp>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <new>
#include <random>
#include <thread>

#include <tessera/tessera.h>
#include "median.h"

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

struct Settings {
  int ranks = 2;
  int layers = 32;
  int width = 1024;
  int rounds = 5;
  int batch = 64;
  fs::path folder = "out/checkpoint_bench";
  bool json = false;
};

struct Round {
  double dd_write = 0, save = 0, stall = 0, plain_stall = 0, async_total = 0, dd_read = 0, alone = 0, load = 0,
         copy = 0;
};

double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }
double seconds_of(const std::function<void()>& work) {
  const auto began = Clock::now();
  work();
  return seconds_since(began);
}

double run_dd(const std::string& arguments) {
  const auto began = Clock::now();
  if (std::system(("dd " + arguments + " 2>/dev/null").c_str()) != 0)
    throw std::runtime_error("dd " + arguments + " failed");
  return seconds_since(began);
}

void drop_from_cache(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY);
  if (fd < 0 || ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0)
    throw std::runtime_error("cannot drop " + path.string());
  ::close(fd);
}

int64_t drop_all_from_cache(const fs::path& folder) {
  int64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    drop_from_cache(entry.path());
    bytes += static_cast<int64_t>(entry.file_size());
  }
  return bytes;
}

// Reads one thread's part of a file, with direct I/O if the file system supports it. Returns the bytes read.
int64_t read_range(const fs::path& path, char* to, int64_t begin, int64_t end) {
  constexpr int64_t kPieceBytes = int64_t{2} << 20;
  int fd = ::open(path.c_str(), O_RDONLY | O_DIRECT);
  if (fd < 0) fd = ::open(path.c_str(), O_RDONLY);
  int64_t done = begin;
  for (ssize_t got = 1; done < end && got > 0; done += std::max<ssize_t>(got, 0))
    got = ::pread(fd, to + done, kPieceBytes, done);
  ::close(fd);
  return done - begin;
}

// Reads all files of the folder with the number of threads of a load.
double read_alone(const fs::path& folder) {
  constexpr int64_t kHugePageBytes = int64_t{2} << 20, kThreads = 3;
  const auto began = Clock::now();
  std::vector<std::pair<void*, size_t>> memory;
  std::atomic<int64_t> read_bytes = 0;
  int64_t all_bytes = 0;
  {
    std::vector<std::jthread> threads;
    for (const auto& entry : fs::directory_iterator(folder)) {
      const int64_t pieces = static_cast<int64_t>(entry.file_size()) / kHugePageBytes + 1;
      const auto room = static_cast<size_t>((pieces + 1) * kHugePageBytes);
      void* const to = ::mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (to == MAP_FAILED) throw std::bad_alloc();
      ::madvise(to, room, MADV_HUGEPAGE);
      memory.emplace_back(to, room);
      all_bytes += static_cast<int64_t>(entry.file_size());
      for (int64_t t = 0; t < kThreads; ++t)
        threads.emplace_back([=, &read_bytes, path = entry.path()] {
          read_bytes += read_range(path, static_cast<char*>(to), pieces * t / kThreads * kHugePageBytes,
                                   pieces * (t + 1) / kThreads * kHugePageBytes);
        });
    }
  }
  const double seconds = seconds_since(began);
  for (const auto& [begin, bytes] : memory) ::munmap(begin, bytes);
  if (read_bytes != all_bytes) throw std::runtime_error("cannot read all of " + folder.string());
  return seconds;
}

double digest(const std::vector<at::Tensor>& parameters, const torch::optim::Optimizer& optimizer) {
  double sum = 0;
  for (const at::Tensor& parameter : parameters) {
    sum += parameter.detach().to(at::kDouble).sum().item<double>();
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found != optimizer.state().end())
      sum += static_cast<torch::optim::AdamWParamState&>(*found->second).exp_avg().to(at::kDouble).sum().item<double>();
  }
  return sum;
}

class Bench {
 public:
  explicit Bench(Settings settings) : settings_(std::move(settings)) {}

  void run() {
    fs::create_directories(settings_.folder);
    tessera::run_ranks(settings_.ranks, [&](std::shared_ptr<tessera::Communicator> comm) { run_rank(comm); });
    fs::remove_all(settings_.folder);
  }

  void print() const {
    auto of_rounds = [&](auto value) {
      std::vector<double> values;
      for (const Round& round : rounds_) values.push_back(value(round));
      return median(std::move(values));
    };
    const double save = of_rounds([](const Round& r) { return r.save; }),
                 load = of_rounds([](const Round& r) { return r.load; });
    const double write_ratio = of_rounds([](const Round& r) { return r.dd_write / r.save; });
    const double read_ratio = of_rounds([](const Round& r) { return r.dd_read / r.load; });
    const double stall = of_rounds([](const Round& r) { return r.stall; });
    const double plain_stall = of_rounds([](const Round& r) { return r.plain_stall; });
    const double total = of_rounds([](const Round& r) { return r.async_total; });
    const double dd_write = of_rounds([](const Round& r) { return r.dd_write; }),
                 dd_read = of_rounds([](const Round& r) { return r.dd_read; });
    const double copy = of_rounds([](const Round& r) { return r.copy; });
    const double alone = of_rounds([](const Round& r) { return r.alone; });
    const double alone_ratio = of_rounds([](const Round& r) { return r.alone / r.load; });
    if (settings_.json) {
      std::cout << nlohmann::json{{"bytes", bytes_},
                                  {"ranks", settings_.ranks},
                                  {"rounds", settings_.rounds},
                                  {"dd_write_s", dd_write},
                                  {"save_s", save},
                                  {"dd_write_over_save", write_ratio},
                                  {"dd_read_s", dd_read},
                                  {"read_alone_s", alone},
                                  {"load_s", load},
                                  {"read_alone_over_load", alone_ratio},
                                  {"dd_read_over_load", read_ratio},
                                  {"async_stall_s", stall},
                                  {"plain_stall_s", plain_stall},
                                  {"async_total_s", total},
                                  {"copy_s", copy},
                                  {"stall_over_save", stall / save}}
                << "\n";
      return;
    }
    const double megabytes = static_cast<double>(bytes_) * 1e-6;
    auto line = [&](const char* name, double seconds) {
      std::cout << std::left << std::setw(26) << name << std::right << std::fixed << std::setprecision(3)
                << std::setw(8) << seconds << " s" << std::setprecision(0) << std::setw(8) << megabytes / seconds
                << " MB/s\n";
    };
    std::cout << std::fixed << std::setprecision(0) << megabytes << " MB, " << settings_.ranks << " ranks, medians of "
              << settings_.rounds << " rounds\n";
    line("dd with fsync", dd_write);
    line("save_checkpoint", save);
    line("dd, cold read", dd_read);
    line("the disk alone, cold read", alone);
    line("load_checkpoint, cold", load);
    line("async: stall of the loop", stall);
    line("async: stall by default", plain_stall);
    line("async: until complete", total);
    line("a copy of the bytes", copy);
    std::cout << std::setprecision(2) << "dd / save " << write_ratio << ", dd / load " << read_ratio
              << ", alone / load " << alone_ratio << ", stall / save " << stall / save << ", by default "
              << plain_stall / save << "\n";
  }

 private:
  void run_rank(const std::shared_ptr<tessera::Communicator>& comm) {
    at::set_num_threads(1);
    torch::nn::Sequential model;
    for (int i = 0; i < settings_.layers; ++i) model->push_back(torch::nn::Linear(settings_.width, settings_.width));
    tessera::FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = tessera::wrap_modules<torch::nn::LinearImpl>()});
    tessera::AdamW optimizer(fsdp.parameters(), 1e-3);
    fsdp(torch::ones({2, settings_.width})).sum().backward();
    optimizer.step();
    verify(*comm, fsdp, optimizer);
    for (int i = 0; i < settings_.rounds; ++i) {
      const Round round = measure(*comm, fsdp, optimizer, std::mt19937(static_cast<unsigned>(i)));
      if (comm->rank() == 0) rounds_.push_back(round);
    }
  }

  // Checks that a load restores changed values.
  template <class Model>
  void verify(tessera::Communicator& comm, Model& fsdp, torch::optim::Optimizer& optimizer) {
    const double before = digest(fsdp.parameters(), optimizer);
    tessera::save_checkpoint(checkpoint(), fsdp, optimizer);
    fsdp(torch::ones({2, settings_.width})).sum().backward();
    optimizer.step();
    if (digest(fsdp.parameters(), optimizer) == before) throw std::runtime_error("the step changed nothing");
    tessera::load_checkpoint(checkpoint(), fsdp, optimizer);
    if (digest(fsdp.parameters(), optimizer) != before)
      throw std::runtime_error("what was loaded is not what was saved");
    if (comm.rank() == 0) bytes_ = drop_all_from_cache(checkpoint());
    comm.barrier();
  }

  template <class Model>
  Round measure(tessera::Communicator& comm, Model& fsdp, torch::optim::Optimizer& optimizer, std::mt19937 random) {
    Round round;
    auto alone = [&](auto work) {  // only rank 0 runs work(); the other ranks wait
      if (comm.rank() == 0) work();
      comm.barrier();
    };
    auto drop_checkpoint = [&] { alone([&] { drop_all_from_cache(checkpoint()); }); };
    in_any_order({[&] {
                    alone([&] { clear(dd_file()); });
                    alone([&] { round.dd_write = dd_writes(); });
                  },
                  [&] {
                    alone([&] { clear(checkpoint()); });
                    round.save = seconds_of([&] { tessera::save_checkpoint(checkpoint(), fsdp, optimizer); });
                  }},
                 random);
    alone([&] { clear(checkpoint()); });
    const auto began = Clock::now();
    auto pending = tessera::save_checkpoint_async(checkpoint(), fsdp, optimizer, {}, {.copy_in_background = true});
    round.stall = seconds_since(began);
    fsdp(torch::ones({settings_.batch, settings_.width})).sum().backward();
    round.stall += seconds_of([&] { pending.copied(); });
    pending.wait();
    round.async_total = seconds_since(began);
    round.plain_stall = stall_by_default(comm, fsdp, optimizer);
    optimizer.zero_grad();
    alone([&] { await_removals(); });
    in_any_order({[&] {
                    alone([&] { drop_from_cache(dd_file()); });
                    alone([&] { round.dd_read = run_dd("if=" + dd_file().string() + " of=/dev/null bs=1M"); });
                  },
                  [&] {
                    drop_checkpoint();
                    alone([&] { round.alone = read_alone(checkpoint()); });
                  },
                  [&] {
                    drop_checkpoint();
                    round.load = seconds_of([&] { tessera::load_checkpoint(checkpoint(), fsdp, optimizer); });
                  }},
                 random);
    alone([&] {
      const at::Tensor from = at::ones({bytes_ / 4});
      round.copy = seconds_of([&] { from.clone(); });
    });
    return round;
  }

  // Returns the stall of a save with default options: the time of the call, plus the delay of the next step.
  template <class Model>
  double stall_by_default(tessera::Communicator& comm, Model& fsdp, torch::optim::Optimizer& optimizer) {
    auto seconds_of_step = [&] {
      fsdp(torch::ones({settings_.batch, settings_.width})).sum().backward();
      comm.barrier();
      const auto began = Clock::now();
      optimizer.step();
      return seconds_since(began);
    };
    const double usual = seconds_of_step();
    const auto began = Clock::now();
    auto pending = tessera::save_checkpoint_async(checkpoint(), fsdp, optimizer);
    const double call = seconds_since(began);
    const double step = seconds_of_step();
    pending.wait();
    return call + std::max(0.0, step - usual);
  }

  // Calls `turns` in a random order. Equal generators give all ranks the same order.
  static void in_any_order(std::vector<std::function<void()>> turns, std::mt19937& random) {
    std::shuffle(turns.begin(), turns.end(), random);
    for (const auto& turn : turns) turn();
  }
  double dd_writes() const {
    return run_dd("if=/dev/zero of=" + dd_file().string() +
                  " bs=1M count=" + std::to_string(std::max<int64_t>(1, bytes_ >> 20)) + " conv=fsync");
  }
  // Waits until background threads of saves have deleted the replaced checkpoints.
  void await_removals() const {
    while (std::distance(fs::directory_iterator(settings_.folder), fs::directory_iterator()) > 2)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ::sync();
  }
  static void clear(const fs::path& path) {
    fs::remove_all(path);
    ::sync();
  }

  fs::path checkpoint() const { return settings_.folder / "checkpoint"; }
  fs::path dd_file() const { return settings_.folder / "dd"; }

  const Settings settings_;
  int64_t bytes_ = 0;
  std::vector<Round> rounds_;
};

}  // namespace

int main(int argc, char** argv) try {
  namespace po = boost::program_options;
  Settings settings;
  std::string folder = settings.folder.string();
  po::options_description options("Options");
  options.add_options()("help,h", "this text")("ranks", po::value(&settings.ranks)->default_value(settings.ranks),
                                               "threads")(
      "layers", po::value(&settings.layers)->default_value(settings.layers), "linear layers")(
      "width", po::value(&settings.width)->default_value(settings.width),
      "their width; a layer saves 12 width^2 bytes")(
      "batch", po::value(&settings.batch)->default_value(settings.batch),
      "rows of the forward and backward that run while an asynchronous save copies")(
      "rounds", po::value(&settings.rounds)->default_value(settings.rounds), "rounds, of which medians are taken")(
      "dir", po::value(&folder)->default_value(folder), "where to write; says which disk is measured")(
      "json", po::bool_switch(&settings.json), "one line of JSON");
  po::variables_map values;
  po::store(po::parse_command_line(argc, argv, options), values);
  po::notify(values);
  if (values.count("help") > 0) return std::cout << options, 0;
  if (settings.ranks < 1 || settings.layers < 1 || settings.width < 1 || settings.rounds < 1)
    throw std::invalid_argument("--ranks, --layers, --width and --rounds must be 1 or more");
  settings.folder = folder;
  Bench bench(settings);
  bench.run();
  bench.print();
  return 0;
} catch (const std::exception& error) {
  std::cerr << "checkpoint_bench: " << error.what() << "\n";
  return 2;
}
