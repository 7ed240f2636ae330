// Checkpoints in memory storage, which has the guarantees of an object store.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <optional>
#include <thread>

#include "checkpoint/format/entries.h"
#include "checkpoint/load/find_checkpoints.h"
#include "checkpoint/load/offline.h"
#include "checkpoint/save/commit.h"
#include "checkpoint/save/group_saves.h"
#include "checkpoint/storage/file_lock.h"
#include "tests/checkpoint/replicated.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::storage_test {
using namespace internal;
namespace {

using namespace testing_support;
namespace fs = std::filesystem;

// Uses a separate folder in memory.
class CheckpointStorage : public ::testing::Test {
 protected:
  CheckpointStorage()
      : folder_("memory://" + std::string(::testing::UnitTest::GetInstance()->current_test_info()->name())) {}
  ~CheckpointStorage() override { storage_of(folder_).remove_all(folder_); }

  fs::path at(const std::string& name) const { return folder_ / name; }
  std::vector<std::string> list(const std::string& name = "") const { return storage_of(folder_).list(folder_ / name); }

  const fs::path folder_;
};

// Memory storage, for classes that change some of its functions.
class OtherStorage : public Storage {
 public:
  explicit OtherStorage(ThrowFailure fail) : Storage(fail), files_(make_memory_storage(fail)) {}
  std::unique_ptr<InputFile> open(const fs::path& path) const override { return files_->open(path); }
  std::unique_ptr<OutputFile> create(const fs::path& path, int64_t start_bytes, int64_t bytes) const override {
    return files_->create(path, start_bytes, bytes);
  }
  void put(const fs::path& path, std::string_view text, bool durable) const override {
    files_->put(path, text, durable);
  }
  std::string beginning(const fs::path& path, int64_t max_bytes) const override {
    return files_->beginning(path, max_bytes);
  }
  bool exists(const fs::path& file) const override { return files_->exists(file); }
  std::vector<std::string> list(const fs::path& folder) const override { return files_->list(folder); }
  void remove(const fs::path& file) const override { files_->remove(file); }
  void remove_all(const fs::path& folder) const override { files_->remove_all(folder); }
  int reading_threads() const override { return 1; }

 private:
  const std::unique_ptr<Storage> files_;
};

// Refuses to remove drafts, as a bucket does without the permission to delete objects.
class UndeletingStorage : public OtherStorage {
 public:
  using OtherStorage::OtherStorage;
  void remove(const fs::path& file) const override {
    if (file.filename() == kDraftName) refuse(file, FileAction::kWrite, "403 AccessDenied");
    OtherStorage::remove(file);
  }
};

// Creates no file before `opened` is true.
class ClosedStorage : public OtherStorage {
 public:
  using OtherStorage::OtherStorage;
  std::unique_ptr<OutputFile> create(const fs::path& path, int64_t start_bytes, int64_t bytes) const override {
    opened.wait(false);
    return OtherStorage::create(path, start_bytes, bytes);
  }
  void remove_all(const fs::path& folder) const override {
    has_removed = true;
    OtherStorage::remove_all(folder);
  }
  static inline std::atomic<bool> opened = false, has_removed = false;
};

// Writes no manifest while `refuses` is true.
class RefusingStorage : public OtherStorage {
 public:
  using OtherStorage::OtherStorage;
  void put(const fs::path& path, std::string_view text, bool durable) const override {
    if (refuses && path.filename() == kManifestName) refuse(path, FileAction::kWrite, "503 SlowDown");
    OtherStorage::put(path, text, durable);
  }
  static inline std::atomic<bool> refuses = false;
};

template <class Kind>
std::unique_ptr<Storage> make(ThrowFailure fail) {
  return std::make_unique<Kind>(fail);
}

// Trained for one step of AdamW.
struct Trained {
  Trained(const std::shared_ptr<Communicator>& comm, uint64_t seed)
      : net(seeded(seed, [] { return torch::nn::Sequential(torch::nn::Linear(40, 30), torch::nn::Linear(30, 3)); })),
        fsdp(net, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()}),
        adam(fsdp.parameters(), 0.1) {
    step();
  }
  double step() {
    auto loss = fsdp(on_rank_device(torch::ones({2, 40}))).sum();
    adam.zero_grad();
    loss.backward();
    adam.step();
    return loss.item<double>();
  }
  torch::nn::Sequential net;
  FullyShardedDataParallel<torch::nn::Sequential> fsdp;
  torch::optim::AdamW adam;
};

// Old checkpoints are removed in the background, while new ones may take their names.
TEST_F(CheckpointStorage, NamesAreTakenAgain) {
  const TemporaryFolder local;
  for (const fs::path& folder : {folder_, local.path()})
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
      constexpr int kSaves = 100;
      for (int n = 1; n <= kSaves; ++n)
        save_checkpoint(folder / ("step-" + std::to_string(n % 2)), model, {{"value", n}}, {.keep_last = 1});
      EXPECT_EQ(load_checkpoint(*latest_checkpoint(folder), model)["value"], kSaves);
    });
}

TEST_F(CheckpointStorage, AnyNameInMemoryIsOneAndSchemesAreNeverFolders) {
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    save_checkpoint("memory://a", model, {{"step", 1}});
    save_checkpoint("memory://b", model, {{"step", 2}}, {.keep_last = 1});
    EXPECT_EQ(load_checkpoint("memory://b/", model)["step"], 2);
    EXPECT_EQ(load_newest_checkpoint("memory://", {model})->extra["step"], 2);
    for (const char* name : {"memory://", "s3://bucket", "s3://bucket/"})
      EXPECT_THROW(save_checkpoint(name, model), CheckpointError) << name;
    for (const char* name : {"S3://bucket/a", "Memory://a", "gs://bucket/a"})
      expect_contains(error_of<std::invalid_argument>([&] { save_checkpoint(name, model); }), "not known");
    EXPECT_FALSE(fs::exists("S3:"));
  });
  for (const char* name : {"memory://a", "memory://b"}) storage_of(name).remove_all(name);
}

TEST_F(CheckpointStorage, GoesOnFromMemoryOnAnyNumberOfRanks) {
  double expected = 0;
  on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
    Trained trained(comm, 1);
    save_checkpoint(at("step-1"), trained.fsdp, trained.adam, {{"step", 1}});
    const double loss = trained.step();
    if (comm->rank() == 0) expected = loss;
  });
  EXPECT_EQ(list(), std::vector<std::string>{"step-1/"});
  for (const int world : {1, 2, 5})
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      Trained other(comm, 2);
      EXPECT_EQ(load_checkpoint(at("step-1"), other.fsdp, other.adam)["step"], 1);
      EXPECT_NEAR(other.step(), expected, 1e-5);
    });
}

TEST_F(CheckpointStorage, TheManifestIsTheCommit) {
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Trained trained(comm, 1);
    auto newest = [&] { return load_newest_checkpoint(folder_, trained.fsdp, trained.adam)->path.filename(); };
    save_checkpoint(at("a"), trained.fsdp, trained.adam, {{"step", 1}});
    save_checkpoint_async(at("b"), trained.fsdp, trained.adam, {{"step", 2}}).wait();
    EXPECT_EQ(newest(), "b");
    save_checkpoint(at("a"), trained.fsdp, trained.adam, {{"step", 3}});  // replaced
    EXPECT_EQ(newest(), "a");
    EXPECT_EQ(load_checkpoint(at("a"), trained.fsdp)["step"], 3);
    comm->barrier();
    if (comm->rank() == 0) storage_of(folder_).remove(at("a") / kManifestName);
    comm->barrier();
    EXPECT_EQ(newest(), "b");
    comm->barrier();
    if (comm->rank() == 0)
      storage_of(folder_).put(at("b") / kManifestName, "{\"format\": \"tessera-checkpoint\", \"sequence\": 9", true);
    comm->barrier();
    expect_contains(error_of<CheckpointError>([&] { newest(); }), "none of its checkpoints can be read");
    expect_contains(error_of<CheckpointError>([&] { load_checkpoint(at("a"), trained.fsdp); }), "has no tessera.json");
    expect_contains(error_of<CheckpointError>([&] { load_checkpoint(at("none"), trained.fsdp); }), "there is nothing");
  });
}

TEST_F(CheckpointStorage, ASaveIsCompleteThoughItsDraftStays) {
  register_storage("undeleting", &make<UndeletingStorage>);
  const fs::path target = "undeleting://run/a";
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    for (int n = 1; n <= 2; ++n) {
      save_checkpoint(target, model, {{"value", n}});
      EXPECT_EQ(load_checkpoint(target, model)["value"], n);
    }
  });
}

TEST_F(CheckpointStorage, TheNextSaveRemovesTheFilesOfACommitThatFailed) {
  register_storage("refusing", &make<RefusingStorage>);
  const fs::path target = "refusing://run/a";
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    RefusingStorage::refuses = true;
    expect_contains(error_of<CheckpointError>([&] { save_checkpoint(target, model); }), "503 SlowDown");
    RefusingStorage::refuses = false;
    EXPECT_EQ(storage_of(target).list(target).size(), 1U);  // the manifest may appear late
    save_checkpoint(target, model, {{"value", 1}});
    EXPECT_EQ(load_checkpoint(target, model)["value"], 1);
  });
  EXPECT_EQ(storage_of(target).list(target).size(), 2U);  // the folder of the second save, and the manifest
}

// The files of the save belong to the parent process.
TEST_F(CheckpointStorage, AChildOfForkRemovesNothingOfASaveInFlight) {
  register_storage("closed", &make<ClosedStorage>);
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    std::optional<PendingSave> save(save_checkpoint_async("closed://run/a", model, {{"value", 1}}));
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      save.reset();
      ::_exit(ClosedStorage::has_removed ? 1 : 0);
    }
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    ClosedStorage::opened = true;
    ClosedStorage::opened.notify_all();
    save->wait();
    EXPECT_EQ(load_checkpoint("closed://run/a", model)["value"], 1);
  });
}

// New threads of the child get the handles of the parent's threads.
TEST(Removal, AChildOfForkLeavesItsOwnThreadsAlone) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer still knows the parent's threads by these handles";
#endif
  std::optional<Removal> removal(std::in_place, [] {}, nullptr);
  while (!removal->has_ended()) std::this_thread::yield();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    std::atomic<bool> ends = false;
    std::vector<std::thread> threads;
    for (int i = 0; i < 64; ++i) threads.emplace_back([&] { ends.wait(false); });
    removal.reset();
    ends = true;
    ends.notify_all();
    for (std::thread& thread : threads) thread.join();
    ::_exit(0);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(CheckpointStorage, KeepsTheNewestAndClearsAwayWhatDeadSavesLeft) {
  const Storage& storage = storage_of(folder_);
  storage.put(at("step-4/0123456789abcdef/rank-00000-0.safetensors"), "x", true);
  storage.put(at("step-4/0123456789abcdef") / kDraftName,
              "process 999999999 on " + process_name().substr(process_name().rfind(' ') + 1) + "\n9999999999\n", true);
  storage.put(at("step-5/0123456789abcde0") / kDraftName,
              "process 1 on elsewhere\n" + std::to_string(std::time(nullptr)) + "\n", true);
  storage.put(at("step-5/0123456789abcde1") / kDraftName, "process 1 on elsewhere\n1000\n", true);
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Trained trained(comm, 1);
    for (int step = 0; step < 4; ++step)
      save_checkpoint(at("step-" + std::to_string(step)), trained.fsdp, trained.adam, {{"step", step}},
                      {.keep_last = 2});
    save_checkpoint(at("step-3"), trained.fsdp, trained.adam, {{"step", 4}}, {.keep_last = 2});
  });
  const std::vector<std::string> expected{"step-2/", "step-3/", "step-5/"};
  for (int i = 0; i < 500 && list() != expected; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(list(), expected);
  EXPECT_EQ(list("step-5"), std::vector<std::string>{"0123456789abcde0/"});  // it may be in use
  for (int i = 0; i < 500 && list("step-3").size() > 2; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(list("step-3").size(), 2U);  // its own folder, and the manifest
  EXPECT_EQ(verify_checkpoint(at("step-3")), std::vector<std::string>());
}

// A model whose state one rank cannot read.
struct Broken : Replicated {
  using Replicated::Replicated;
  std::vector<NamedShard> named_shards() const override {
    if (comm()->rank() == 1) throw std::runtime_error("the device is lost");
    return Replicated::named_shards();
  }
};

TEST_F(CheckpointStorage, WhatIsNoCheckpointIsLeftAndAFailureLeavesNothing) {
  storage_of(folder_).put(at("mine/notes.txt"), "important", true);
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    const auto net = torch::nn::Linear(3, 3);
    Broken broken(net.ptr(), comm);
    Replicated model(net.ptr(), comm);
    expect_contains(error_of<CheckpointError>([&] { save_checkpoint(at("a"), broken); }), "the device is lost");
    expect_contains(error_of<CheckpointError>([&] { save_checkpoint(at("mine"), model); }), "holds something else");
    expect_contains(error_of<CheckpointError>([&] { save_checkpoint("memory://", model); }),
                    "is not a name for a checkpoint");
    expect_contains(error_of<std::invalid_argument>([&] { save_checkpoint("gs://bucket/a", model); }),
                    "storage that is not known");
    expect_contains(error_of<std::invalid_argument>([&] { save_full(at("m.safetensors"), model); }),
                    "is not a local file");
  });
  EXPECT_EQ(list(), std::vector<std::string>{"mine/"});
  expect_contains(error_of<std::invalid_argument>([&] { FolderLock{folder_}; }), "has no locks");
}

TEST_F(CheckpointStorage, WhatNoSaveHasWrittenIsNeverRemoved) {
  const TemporaryFolder local;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    save_checkpoint(local / "a", model);
    save_checkpoint(at("step-1"), model);
  });
  const Storage& storage = storage_of(folder_);
  // Copied from a local folder with all its files.
  for (const auto& entry : fs::directory_iterator(local / "a"))
    storage.put(at("copied") / entry.path().filename(), file_bytes(entry.path()), true);
  for (const char* name : {"copied", "step-1"}) storage.put(at(name) / "model.safetensors", "mine", true);
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    save_checkpoint(at("copied"), model);
    save_checkpoint(at("step-2"), model, {}, {.keep_last = 1});
    save_checkpoint(at("step-3"), model, {}, {.keep_last = 1});
  });
  const std::vector<std::string> folders{"copied/", "step-1/", "step-3/"}, own{"model.safetensors"};
  for (int i = 0; i < 500 && list() != folders; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(list(), folders);
  for (const char* name : {"copied", "step-1"}) EXPECT_EQ(list(name), own) << name;
}

TEST_F(CheckpointStorage, TheCommandsFunctionsTakeAnyStorage) {
  const TemporaryFolder local;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Trained trained(comm, 1);
    save_checkpoint(at("a"), trained.fsdp, trained.adam, {{"step", 1}});
  });
  auto differences = [](const fs::path& a, const fs::path& b) { return diff_checkpoints(a, b).size(); };
  reshard_checkpoint(at("a"), at("b"), 3);
  reshard_checkpoint(at("a"), local / "c", 1);
  reshard_checkpoint(local / "c", at("d"), 4);
  EXPECT_EQ(differences(at("a"), at("b")) + differences(at("b"), local / "c") + differences(local / "c", at("d")), 0U);
  EXPECT_TRUE(read_manifest(local / "c").folder.empty());
  for (const auto& path : {at("a"), at("b"), at("d"), local / "c"})
    EXPECT_EQ(verify_checkpoint(path), std::vector<std::string>());
  consolidate_checkpoint(at("a"), local / "m.safetensors", false);
  EXPECT_EQ(diff_checkpoints(at("a"), local / "m.safetensors", {.only_parameters = true}).size(), 0U);
  // Copied file by file, in both directions.
  for (const auto& name : storage_of(local.path()).list(local / "c"))
    storage_of(folder_).put(at("e") / name, read_text(local / "c" / name, 1 << 20), true);
  EXPECT_EQ(differences(at("e"), at("a")), 0U);
  reshard_checkpoint(at("b"), at("e"), 2);
  EXPECT_EQ(differences(at("e"), at("a")), 0U);
  EXPECT_EQ(list("e").size(), 2U);
  // Damage is detected and reported with its file.
  const std::string name = "e/" + list("e")[0] + rank_file_name(1, 0);
  std::string bytes = read_text(at(name), 1 << 20);
  bytes[bytes.size() - 3] = static_cast<char>(bytes[bytes.size() - 3] + 1);
  storage_of(folder_).put(at(name), bytes, true);
  ASSERT_EQ(verify_checkpoint(at("e")).size(), 1U);
  expect_contains(verify_checkpoint(at("e"))[0], at(name).string() + ": tensor '");
}

}  // namespace
}  // namespace tessera::storage_test
