// Saves that fail or are killed: all ranks are told, nothing is lost, nothing is half there.
#include <signal.h>
#include <sys/resource.h>

#include <fstream>
#include <optional>

#include "tests/checkpoint/replicated.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::faults_test {
namespace {

using namespace testing_support;

// While it lives, no file can grow beyond this: what a full disk looks like to a program.
class FileLimit {
 public:
  explicit FileLimit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
    handler_ = ::signal(SIGXFSZ, SIG_IGN);
  }
  ~FileLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  sighandler_t handler_;
};

int entries(const std::filesystem::path& folder) {
  return static_cast<int>(
      std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator()));
}

TEST(CheckpointFaults, AFileThatCannotBeWrittenIsAnErrorOnAllRanksAndNothingIsLost) {
  const TemporaryFolder folder;
  on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(300, 300).ptr(), comm);
    save_checkpoint(folder / "a", model, {{"step", 1}});
    std::optional<FileLimit> limit;
    comm->barrier();
    if (comm->rank() == 0) limit.emplace(64 << 10);
    comm->barrier();
    const auto error = error_of<CheckpointError>([&] { save_checkpoint(folder / "a", model, {{"step", 2}}); });
    expect_contains(error, "File too large");
    expect_contains(error, "rank ");
    auto pending = save_checkpoint_async(folder / "a", model, {{"step", 3}});
    expect_contains(error_of<CheckpointError>([&] { pending.wait(); }), "File too large");
    { auto dropped = save_checkpoint_async(folder / "a", model, {{"step", 4}}); }
    expect_contains(error_of<CheckpointError>([&] { save_checkpoint(folder / "a", model); }), "before failed");
    comm->barrier();
    limit.reset();
    comm->barrier();
    EXPECT_EQ(entries(folder.path()), 1);
    EXPECT_EQ(load_checkpoint(folder / "a", model)["step"], 1);
    save_checkpoint(folder / "a", model, {{"step", 5}});
    EXPECT_EQ(load_checkpoint(folder / "a", model)["step"], 5);
  });
}

// A model that one rank cannot show.
struct Broken : Replicated {
  using Replicated::Replicated;
  std::vector<NamedShard> named_shards() const override {
    if (comm()->rank() == 1) throw std::runtime_error("the device is lost");
    return Replicated::named_shards();
  }
};

TEST(CheckpointFaults, OneRanksErrorIsEveryRanksError) {
  const TemporaryFolder folder;
  on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
    const auto net = torch::nn::Linear(3, 3);
    Broken broken(net.ptr(), comm);
    for (const auto& error :
         {error_of<CheckpointError>([&] { save_checkpoint(folder / "a", broken); }),
          error_of<CheckpointError>([&] { auto save = save_checkpoint_async(folder / "a", broken); })})
      expect_contains(error, "rank 1: the device is lost");
    comm->barrier();
    EXPECT_EQ(entries(folder.path()), 0);
    expect_contains(error_of<CheckpointError>([&] { save_checkpoint("/proc/none/a", broken); }), "rank 0");
  });
}

TEST(CheckpointFaults, DamageOnOneRanksPartLeavesEveryModelAsItWas) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto make = [&](uint64_t seed) {
      return FullyShardedDataParallel(seeded(seed, [] { return torch::nn::Linear(40, 40); }), comm);
    };
    auto fsdp = make(1);
    save_checkpoint(folder / "a", fsdp);
    if (comm->rank() == 0) {
      std::fstream file(folder / "a/rank-00001-0.safetensors", std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(-9, std::ios::end);
      file.put('\x55');
    }
    comm->barrier();
    auto other = make(2);
    std::vector<at::Tensor> before;
    for (const auto& shard : other.parameters()) before.push_back(shard.detach().clone());
    const auto error = error_of<CheckpointError>([&] { load_checkpoint(folder / "a", other); });
    for (const char* part : {"rank 1", "rank-00001-0.safetensors", "tensor '", "damaged"}) expect_contains(error, part);
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(before[i], other.parameters()[i].detach()));
  });
}

}  // namespace
}  // namespace tessera::faults_test
