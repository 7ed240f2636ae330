// The disk tier: files that leave nothing behind, tensors that page in and out, and FSDP with shards and state on disk,
// with bit-equal results.
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <random>

#include "checkpoint/state/saved_state.h"
#include "core/layout/shard_mark.h"
#include "offload/disk/disk_pager.h"
#include "tests/support/random_net.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::disk_test {
using namespace internal;
namespace {

using namespace testing_support;
namespace fs = std::filesystem;

// A folder that must be empty at the end of the test.
class Folder {
 public:
  ~Folder() { EXPECT_TRUE(fs::is_empty(folder_.path())); }
  std::string path() const { return folder_.path(); }

 private:
  const TemporaryFolder folder_;
};

TEST(File, GivesBackWhatWasWritten) {
  const Folder folder;
  File file = offload_file(folder.path());
  EXPECT_TRUE(fs::is_empty(folder.path()));  // the file has no name
  EXPECT_EQ(file.extend(2 * 4096), 0);
  EXPECT_EQ(file.extend(4096), 2 * 4096);
  alignas(4096) static char out[4096], in[4096];
  for (int i = 0; i < 4096; ++i) out[i] = static_cast<char>(i * 7);
  file.write(out, 4096, 4096);
  file.read(in, 4096, 4096);
  EXPECT_EQ(std::memcmp(in, out, 4096), 0);
  file.read(in, 4096, 0);
  EXPECT_EQ(std::count(in, in + 4096, 0), 4096);
  EXPECT_NE(error_of<std::runtime_error>([&] { file.read(in, 4096, 1 << 20); }), "");
}

TEST(File, AMissingFolderAndAFullDiskAreNamed) {
  expect_contains(error_of<std::runtime_error>([] { offload_file("/no/such/folder"); }),
                  "'/no/such/folder': cannot make a file");
  const Folder folder;
  File file = offload_file(folder.path());
  struct statvfs room {};
  ASSERT_EQ(::statvfs(folder.path().c_str(), &room), 0);
  const auto beyond = static_cast<int64_t>(room.f_blocks * room.f_frsize) + (int64_t{1} << 30);
  const std::string error = error_of<std::runtime_error>([&] { file.extend(File::whole_blocks(beyond)); });
  expect_contains(error, "has no room");
  expect_contains(error, "free");
  EXPECT_EQ(file.bytes(), 0);
  EXPECT_EQ(file.extend(4096), 0);
}

TEST(File, TellsFailuresAsItsUserDoes) {
  const Folder folder;
  const auto path = fs::path(folder.path()) / "file";
  const ThrowFailure fail = [](const FileFailure& failure) {
    throw std::domain_error(failure.path.string() + "|" + std::to_string(static_cast<int>(failure.action)) + "|" +
                            failure.problem + "|" + failure.reason());
  };
  auto told = [&](FileAction action) { return path.string() + "|" + std::to_string(static_cast<int>(action)) + "|"; };
  EXPECT_EQ(error_of<std::domain_error>([&] { File::open(path, fail); }),
            told(FileAction::kOpen) + "|No such file or directory");
  {
    const File file = File::create(path, fail);
    EXPECT_FALSE(file.is_direct());
    file.write("abc", 3, 2);
    EXPECT_EQ(file.bytes(), 5);
    char in[3];
    expect_contains(error_of<std::domain_error>([&] { file.read(in, 3, 4); }),
                    told(FileAction::kRead) + "ends at byte 5, 2 bytes early");
  }
  EXPECT_EQ(error_of<std::domain_error>([&] { File::create(path, fail); }), told(FileAction::kCreate) + "|File exists");
  expect_contains(error_of<std::domain_error>([&] { File::open(path, fail).write("x", 1, 0); }),
                  told(FileAction::kWrite));
  fs::create_symlink(path, path.string() + "-link");
  expect_contains(error_of<std::domain_error>([&] { File::open_to_write(path.string() + "-link", fail); }),
                  "is a symbolic link");
  fs::remove(path.string() + "-link");
  fs::remove(path);
}

TEST(File, AKilledProcessLeavesNothing) {
  const Folder folder;
  const pid_t child = ::fork();
  if (child == 0) {
    File file = offload_file(folder.path());
    file.extend(1 << 20);
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

// Uses ten times as many tensors as buffers in every way, and compares with tensors in memory.
TEST(DiskPager, TensorsOnDiskAreTensors) {
  const Folder folder;
  constexpr int kTensors = 30;
  DiskPager pager({.directory = folder.path(), .buffer_bytes = 6 * 12288, .read_ahead = 2, .threads = 2});
  std::vector<at::Tensor> own, expected;
  for (int i = 0; i < kTensors; ++i) {
    own.push_back(pager.make({30, 40}, i % 2 == 0 ? at::IntArrayRef({40, 1}) : at::IntArrayRef({1, 30}), at::kFloat,
                             "tensor " + std::to_string(i)));
    expected.push_back(torch::zeros({30, 40}));
    EXPECT_EQ(DiskPager::of(own.back()), &pager);
    EXPECT_EQ(DiskPager::of(expected.back()), nullptr);
  }
  EXPECT_EQ(pager.disk_bytes(), kTensors * 8192);
  std::mt19937 random(5);
  for (int step = 0; step < 600; ++step) {
    const size_t i = step % 3 == 0 ? random() % kTensors : static_cast<size_t>(step) % kTensors,
                 j = random() % kTensors;
    switch (random() % 5) {
      case 0:
        own[i].add_(own[j], 0.5), expected[i].add_(expected[j], 0.5);
        break;
      case 1:
        own[i].select(0, 3).fill_(step), expected[i].select(0, 3).fill_(step);
        break;
      case 2:
        own[i].copy_(expected[i]);
        break;
      case 3: {
        auto held = pager.hold(own[i], /*writes=*/true);
        held.values().mul_(0.5);
        expected[i].mul_(0.5);
        break;
      }
      default:
        ASSERT_TRUE(torch::equal(own[i] + own[j], expected[i] + expected[j])) << step;
    }
    EXPECT_LE(pager.buffer_bytes(), 6 * 12288);
  }
  for (int i = 0; i < kTensors; ++i) EXPECT_TRUE(torch::equal(own[i], expected[i])) << i;
  EXPECT_LE(pager.peak_buffer_bytes(), 6 * 12288);
  EXPECT_GT(pager.written_bytes(), kTensors * 8192);
  EXPECT_GT(pager.read_bytes(), kTensors * 8192);
}

TEST(DiskPager, WritesOnlyWhatChanged) {
  const Folder folder;
  DiskPager pager({.directory = folder.path(), .buffer_bytes = 3 * 8192, .read_ahead = 0});
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 6; ++i) tensors.push_back(pager.make({1024}, {1}, at::kFloat, "a tensor").fill_(i));
  for (const auto& tensor : tensors) EXPECT_GE(tensor.sum().item<float>(), 0);
  for (const auto& tensor : tensors) EXPECT_GE(tensor.sum().item<float>(), 0);
  const int64_t written = pager.written_bytes();
  EXPECT_LE(written, 6 * 4096);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(tensors[i].sum().item<float>(), 1024 * i);
  EXPECT_EQ(pager.written_bytes(), written);
}

// Reuses the space of tensors released in any state, as a whole and in pieces.
TEST(DiskPager, SpaceOfTensorsThatAreGoneIsTakenAgain) {
  const Folder folder;
  DiskPager pager({.directory = folder.path(), .buffer_bytes = 4 * 8192, .read_ahead = 2, .threads = 2});
  std::vector<at::Tensor> tensors;
  const auto make = [&](int64_t blocks) { return pager.make({blocks * 1024}, {1}, at::kFloat, "a tensor"); };
  for (int i = 0; i < 9; ++i) tensors.push_back(make(1).fill_(i));
  const int64_t claimed = pager.disk_bytes();
  for (int round = 0; round < 20; ++round) {
    for (const size_t i : {3U, 4U, 7U}) tensors[i].reset();
    const at::Tensor two = make(2);
    tensors[7] = make(1);
    EXPECT_EQ(two.abs().sum().item<float>(), 0) << "nothing of what was there";
    EXPECT_EQ(tensors[7].abs().sum().item<float>(), 0);
    two.fill_(100 + round);
    tensors[7].fill_(7);
    EXPECT_EQ(two.sum().item<float>(), 2048.0F * static_cast<float>(100 + round));
    EXPECT_EQ(pager.disk_bytes(), claimed) << round;
    for (const size_t i : {0U, 1U, 2U, 5U, 6U, 7U, 8U})
      EXPECT_TRUE(torch::equal(tensors[i], torch::full({1024}, static_cast<double>(i)))) << i;
  }
  {
    const auto held = pager.hold(tensors[0], /*writes=*/true);
    tensors[0].reset();
    make(1).fill_(1);  // must not use the space of a held tensor
    EXPECT_TRUE(torch::equal(held.values(), torch::zeros({1024})));
  }
  EXPECT_EQ(pager.disk_bytes(), claimed);
  make(3);
  EXPECT_EQ(pager.disk_bytes(), claimed + 3 * 4096);
}

// A load replaces the optimizer's states one by one.
TEST(DiskPager, AFileOfManyTensorsGrowsByLittleWhenAllAreReplaced) {
  const Folder folder;
  DiskPager pager({.directory = folder.path(), .buffer_bytes = 4 * 8192});
  std::vector<at::Tensor> tensors(160);
  for (int round = 0; round < 5; ++round)
    for (at::Tensor& tensor : tensors) tensor = pager.make({1024}, {1}, at::kFloat, "a tensor");
  EXPECT_LE(pager.disk_bytes(), (160 + 160 / 16 + 2) * 4096);
}

// Each thread evicts the tensors that the others look up and read.
TEST(DiskPager, ThreadsReadTensorsThatOtherThreadsEvict) {
  const Folder folder;
  DiskPager pager({.directory = folder.path(), .buffer_bytes = 5 * 8192, .read_ahead = 1, .threads = 2});
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 12; ++i) tensors.push_back(pager.make({1024}, {1}, at::kFloat, "a tensor").fill_(i));
  std::vector<std::future<int>> threads;
  for (unsigned seed = 0; seed < 3; ++seed)
    threads.push_back(std::async(std::launch::async, [&, seed] {
      std::mt19937 random(seed);
      int wrong = 0;
      for (int step = 0; step < 400; ++step) {
        const size_t i = random() % tensors.size();
        if (DiskPager::of(tensors[i]) != &pager) ++wrong;
        const auto sum = step % 2 == 0 ? tensors[i].sum() : pager.hold(tensors[i], /*writes=*/false).values().sum();
        if (sum.item<float>() != 1024.0F * static_cast<float>(i)) ++wrong;
      }
      return wrong;
    }));
  for (auto& thread : threads) EXPECT_EQ(thread.get(), 0);
}

// Only running operators keep their tensors in memory, also on threads that are idle or have ended.
TEST(DiskPager, AThreadKeepsNoTensorOfAnOperatorThatHasEnded) {
  const Folder folder;
  DiskPager pager({.directory = folder.path(), .buffer_bytes = 3 * 8192, .read_ahead = 0});
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 6; ++i) tensors.push_back(pager.make({1024}, {1}, at::kFloat, "a tensor").fill_(i));
  std::promise<void> end;
  const std::shared_future<void> ends = end.get_future().share();
  std::vector<std::future<void>> idle;
  for (int i = 0; i < 3; ++i) {
    std::async(std::launch::async, [&] { tensors[i].sum(); }).get();
    std::promise<void> has_run;
    auto runs = has_run.get_future();
    idle.push_back(std::async(std::launch::async, [&, i, ends, has_run = std::move(has_run)]() mutable {
      tensors[i].sum();
      has_run.set_value();
      ends.wait();
    }));
    runs.wait();
  }
  const float sum = torch::cat({tensors[3], tensors[4], tensors[5]}).sum().item<float>();
  end.set_value();
  EXPECT_EQ(sum, 1024 * 12);
}

TEST(DiskPager, LimitsAreNamedAndHoldsEnd) {
  const Folder folder;
  at::Tensor outlives;
  {
    DiskPager pager({.directory = folder.path(), .buffer_bytes = 2 * 8192, .read_ahead = 1});
    expect_contains(
        error_of<std::runtime_error>([&] { pager.make({5000}, {1}, at::kFloat, "the shard of unit 'big'"); }),
        "the shard of unit 'big'");
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 3; ++i)
      tensors.push_back(pager.make({1000}, {1}, at::kFloat, "tensor " + std::to_string(i)).fill_(1));
    {
      const auto first = pager.hold(tensors[0], false), second = pager.hold(tensors[1], false);
      expect_contains(error_of<std::runtime_error>([&] { tensors[2].sum(); }), "tensor 2 needs 4096 bytes");
    }
    EXPECT_EQ(tensors[2].sum().item<float>(), 1000);
    expect_contains(error_of<std::runtime_error>([&] { torch::cat(tensors); }),
                    "all in use at once: raise OffloadOptions::disk_buffer_bytes");
    outlives = tensors[0];
  }
  EXPECT_NE(error_of<std::logic_error>([&] { outlives.sum(); }), "");
  expect_contains(
      error_of<std::invalid_argument>([&] { DiskPager pager({.directory = folder.path(), .buffer_bytes = 1}); }),
      "buffer_bytes is 1");
}

torch::nn::Sequential linears() {
  return seeded(9, [] {
    torch::nn::Sequential model;
    for (int i = 0; i < 4; ++i) model->push_back(torch::nn::Linear(kWidth, kWidth));
    return model;
  });
}

template <class Optimizer, class Model, class Options>
torch::OrderedDict<std::string, at::Tensor> train(std::shared_ptr<Communicator> comm, Model model,
                                                  FsdpOptions fsdp_options, Options options,
                                                  MemoryReport* memory = nullptr) {
  fsdp_options.auto_wrap = wrap_by_size(40);
  FullyShardedDataParallel fsdp(model, comm, fsdp_options);
  Optimizer optimizer(fsdp.parameters(), options);
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    const auto x = seeded(10 * step + comm->rank(), [] { return torch::randn({4, kWidth}); });
    torch::mse_loss(fsdp(x).to(at::kFloat), x).backward();
    fsdp.clip_grad_norm_(0.5);
    optimizer.step();
  }
  if (memory != nullptr) *memory = fsdp.memory();
  return fsdp.full_state_dict();
}

TEST(DiskTier, TrainsBitEqualToMemory) {
  const Folder folder;
  for (const int world : fewer_on_devices<std::vector<int>>({1, 2, 3}, {2})) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      for (int kind = 0; kind < fewer_on_devices(3, 1); ++kind) {
        FsdpOptions plain;
        if (comm->device().is_cuda()) plain.offload = {.params = true, .grads = true};  // the host optimizers need it
        if (kind == 1) plain.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
        FsdpOptions disk = plain;
        disk.offload = {.params = true, .grads = true, .directory = folder.path(), .disk_buffer_bytes = 24 * 8192};
        if (kind == 2) disk.offload.disk_units = [](const std::string& unit) { return unit.size() % 2 == 0; };
        auto compare = [&](const auto& expected, const auto& own, const char* what) {
          for (const auto& entry : expected)
            EXPECT_TRUE(same_values(entry.value(), own[entry.key()])) << what << " " << entry.key() << " kind " << kind;
        };
        MemoryReport memory;
        const auto adam = torch::optim::AdamWOptions(1e-2);
        auto compare_on = [&](auto make) {
          compare(train<HostAdamW>(comm, make(), plain, adam), train<HostAdamW>(comm, make(), disk, adam, &memory),
                  "HostAdamW");
          compare(train<torch::optim::AdamW>(comm, make(), plain, adam),
                  train<torch::optim::AdamW>(comm, make(), disk, adam), "torch's AdamW");
        };
        kind == 1 ? compare_on(linears) : compare_on([] { return seeded(7, [] { return RandomNet(31); }); });
        EXPECT_GT(memory.disk_bytes, 0);
        EXPECT_EQ(memory.device_bytes, 0);
      }
    });
  }
}

// Otherwise each forward would read the shard to make the copy.
TEST(DiskTier, ACopyIn16BitFollowsTheSteps) {
  const Folder folder;
  DiskPager pager({.directory = folder.path()});
  const at::Tensor parameter = pager.make({100}, {1}, at::kFloat, "a shard").detach().set_requires_grad(true);
  const auto copy = std::make_shared<LowPrecisionCopy>(
      LowPrecisionCopy{torch::zeros({100}, at::kBFloat16), page_of(parameter)->writes()});
  mark_as_shard(parameter, "", {100}, {copy->values, copy});
  HostAdamW optimizer({parameter}, torch::optim::AdamWOptions(1e-2));
  parameter.mutable_grad() = torch::linspace(-1, 1, 100);
  const auto steps = optimizer.revocable_steps();
  auto follows = [&](const char* what) {
    EXPECT_EQ(copy->writes, page_of(parameter)->writes()) << what;
    EXPECT_TRUE(torch::equal(copy->values, parameter.detach().to(at::kBFloat16))) << what;
  };
  optimizer.step();
  follows("a step");
  steps->step({parameter});
  follows("a step that can be taken back");
  steps->roll_back();
  follows("a step that was taken back");
}

// Shards and state of 24 MB, buffers of 9 MB.
TEST(DiskTier, StateLargerThanItsMemoryTrains) {
  const Folder folder;
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential model;
    for (int i = 0; i < 8; ++i) model->push_back(torch::nn::Linear(torch::nn::LinearOptions(512, 512).bias(false)));
    on_rank_device(model);
    constexpr int64_t kBuffers = 9 << 20;
    FullyShardedDataParallel fsdp(
        model, comm,
        {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(),
         .offload = {.params = true, .grads = true, .directory = folder.path(), .disk_buffer_bytes = kBuffers}});
    HostAdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
    StepInBackward step(fsdp, optimizer);
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      fsdp(on_rank_device(torch::ones({2, 512}))).sum().backward();
      step.finish();
      EXPECT_LE(fsdp.memory().host_bytes - fsdp.memory().grad_bytes, kBuffers);
    }
    EXPECT_EQ(fsdp.memory().disk_bytes, 3 * 8 * 512 * 512 * 4);
    EXPECT_EQ(fsdp.memory().shard_bytes, 8 * 512 * 512 * 4);
  });
}

TEST(DiskTier, CheckpointsComeAndGo) {
  const Folder folder, elsewhere;
  const std::string saved = folder.path() + "-checkpoint";
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto make = [&](uint64_t seed) {
      return seeded(seed, [] { return torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::Linear(16, 8)); });
    };
    const FsdpOptions options{.offload = {.params = true, .grads = true, .directory = folder.path()}};
    FullyShardedDataParallel one(make(1), comm, options), other(make(2), comm, options);
    HostAdamW first(one.parameters(), torch::optim::AdamWOptions(1e-2)),
        second(other.parameters(), torch::optim::AdamWOptions(1e-2));
    auto step = [&](auto& fsdp, auto& optimizer) {
      optimizer.zero_grad();
      fsdp(on_rank_device(torch::ones({2, 8}))).sum().backward();
      optimizer.step();
    };
    step(one, first);
    save_checkpoint(saved, one, first);
    load_checkpoint(saved, other, second);
    step(one, first);
    step(other, second);
    const auto expected = one.full_state_dict(), own = other.full_state_dict();
    for (const auto& entry : expected) EXPECT_TRUE(same_values(entry.value(), own[entry.key()])) << entry.key();
  });
  fs::remove_all(saved);
}

// Neither a save nor a load may hold as much as the model in memory that the kernel cannot write out.
TEST(DiskTier, ASaveReadsOneTensorAtATimeAndALoadKeepsValuesInAFile) {
  const Folder folder;
  run_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential model;
    for (int i = 0; i < 8; ++i) model->push_back(torch::nn::Linear(torch::nn::LinearOptions(64, 64).bias(false)));
    FsdpOptions options{.auto_wrap = wrap_modules<torch::nn::LinearImpl>()};
    options.offload = {.params = true, .grads = true, .directory = folder.path(), .disk_buffer_bytes = 3 * 32 * 1024};
    FullyShardedDataParallel fsdp(model, comm, options);
    const auto shards = internal::in_dense_order(fsdp.shards_to_save());
    internal::DiskPager* pager = internal::DiskPager::of(shards[0].tensor);
    ASSERT_NE(pager, nullptr);
    const int64_t before = pager->read_bytes();
    const auto pieces = internal::pieces_of(internal::local_tensors(fsdp, shards, {}), 0);
    ASSERT_EQ(pieces.size(), 8U);
    EXPECT_EQ(pager->read_bytes(), before);
    const auto expected = fsdp.full_state_dict();
    for (const auto& piece : pieces) EXPECT_TRUE(piece.data().equal(expected[piece.name]));
    EXPECT_GE(pager->read_bytes(), before + 8 * 64 * 64 * 4);
    const at::Tensor room = internal::host_like(shards[0], at::kFloat).first;
    const auto address = reinterpret_cast<uintptr_t>(room.const_data_ptr());
    std::string file;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      uintptr_t begin = 0, end = 0;
      if (std::sscanf(line.c_str(), "%zx-%zx", &begin, &end) == 2 && begin <= address && address < end) file = line;
    }
    expect_contains(file, folder.path().c_str());
  });
}

TEST(DiskTier, MistakesAreNamed) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    auto wrap = [&](CpuOffload offload) {
      FullyShardedDataParallel fsdp(torch::nn::Linear(2, 2), comm, {.offload = std::move(offload)});
    };
    expect_contains(error_of<std::invalid_argument>([&] { wrap({.directory = "/tmp"}); }), "offload.params is false");
    expect_contains(error_of<std::runtime_error>([&] { wrap({.params = true, .directory = "/no/such/folder"}); }),
                    "/no/such/folder");
    expect_contains(
        error_of<std::invalid_argument>([&] { wrap({.params = true, .directory = "/tmp", .disk_buffer_bytes = 10}); }),
        "FsdpOptions::offload.disk_buffer_bytes is 10, expected 4096 or more");
    expect_contains(error_of<std::invalid_argument>(
                        [&] { wrap({.params = true, .disk_units = [](const std::string&) { return true; }}); }),
                    "FsdpOptions::offload.disk_units is set, but offload.directory is empty");
  });
}

}  // namespace
}  // namespace tessera::disk_test
