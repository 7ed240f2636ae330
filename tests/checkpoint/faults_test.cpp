// Saves that fail or are killed: all ranks get the error, and no checkpoint is lost or incomplete.
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstring>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "checkpoint/format/entries.h"
#include "checkpoint/load/find_checkpoints.h"
#include "checkpoint/load/offline.h"
#include "checkpoint/save/commit.h"
#include "checkpoint/save/group_saves.h"
#include "checkpoint/save/save_coordinator.h"
#include "core/runtime/host.h"
#include "tests/checkpoint/file_calls.h"
#include "tests/checkpoint/replicated.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::faults_test {
using namespace internal;

using testing_support::FileCall;
using testing_support::observed;
using testing_support::path_of;

std::mutex synced_mutex;
std::set<std::filesystem::path> synced;  // files and directories that this program has synced

// By inode of each changed file and directory: whether all of it is durable.
std::map<ino_t, bool> is_durable;
std::vector<std::string> named_too_early;

ino_t inode_of(int fd) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 ? status.st_ino : 0;
}

// Checks that a power cut cannot take anything from a directory: all changes were synced.
void check_durable(const std::filesystem::path& directory) {
  const std::lock_guard lock(synced_mutex);
  std::error_code ignored;
  for (const auto& entry : entries_of(directory, ignored)) {
    struct stat status {};
    if (::stat(entry.path().c_str(), &status) == 0 && !is_durable[status.st_ino])
      named_too_early.push_back(entry.path().string());
  }
  struct stat status {};
  if (::stat(directory.c_str(), &status) == 0 && !is_durable[status.st_ino])
    named_too_early.push_back(directory.string());
}

// The rank whose file writes fail; -1: none.
std::atomic<int> failing_rank = -1;
std::atomic<int> slow_syncs_of_rank_1 = 0, slow_ms = 0;  // number of slow syncs left
std::atomic<int> reading_fails_with = 0;                 // an errno for reads of rank files
// As on NFS: renameat2() supports no flags, and removing an open file renames it until it is closed.
std::atomic<bool> is_like_nfs = false;
std::atomic<bool> opens_only_plainly = false;  // the file system has neither O_TMPFILE nor O_DIRECT
std::atomic<int> renamed_instead = 0;

std::atomic<int> interrupts_every = 0;  // of this many calls in succession, all but one fail with EINTR; 0: none
std::atomic<int> writes_of_bytes = -1;  // the most that a write takes; -1: all
std::atomic<int> calls_made = 0;
bool is_interrupted() {
  const int every = interrupts_every;
  return every > 0 && ++calls_made % every != 0;
}

// Called before a file is opened for reading, while it is set.
std::function<void(const std::string& path)> before_opening;

bool is_open(const std::filesystem::path& path) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    if (std::filesystem::read_symlink(entry, ignored) == path) return true;
  return false;
}

// Replaces the system's function.
extern "C" int fsync(int fd) {
  if (is_interrupted()) return errno = EINTR, -1;
  const std::filesystem::path path = path_of(fd);
  {
    const std::lock_guard lock(synced_mutex);
    synced.insert(path);
    is_durable[inode_of(fd)] = true;
  }
  auto is_of = [&](int rank) {
    return rank >= 0 && path.filename().string().starts_with("rank-0000" + std::to_string(rank));
  };
  if (is_of(1) && slow_syncs_of_rank_1 > 0 && slow_syncs_of_rank_1-- > 0)
    std::this_thread::sleep_for(std::chrono::milliseconds(slow_ms));
  if (is_of(failing_rank)) return errno = EIO, -1;
  return observed([&] { return static_cast<int>(::syscall(SYS_fsync, fd)); },
                  [&] { return FileCall{FileCall::kSync, path}; });
}

extern "C" ssize_t pwrite(int fd, const void* data, size_t bytes, off_t position) {
  if (is_interrupted()) return errno = EINTR, -1;
  if (const int most = writes_of_bytes; most >= 0) bytes = std::min(bytes, static_cast<size_t>(most));
  {
    const std::lock_guard lock(synced_mutex);
    is_durable[inode_of(fd)] = false;
  }
  return observed([&] { return ::syscall(SYS_pwrite64, fd, data, bytes, position); },
                  [&] {
                    return FileCall{FileCall::kWrite, path_of(fd), "",
                                    std::string(static_cast<const char*>(data), bytes), position};
                  });
}

extern "C" int ftruncate(int fd, off_t bytes) noexcept {
  if (is_interrupted()) return errno = EINTR, -1;
  return observed([&] { return static_cast<int>(::syscall(SYS_ftruncate, fd, bytes)); },
                  [&] { return FileCall{FileCall::kResize, path_of(fd), "", "", bytes}; });
}

extern "C" int fallocate(int fd, int mode, off_t position, off_t bytes) {
  if (is_interrupted()) return errno = EINTR, -1;
  return observed([&] { return static_cast<int>(::syscall(SYS_fallocate, fd, mode, position, bytes)); },
                  [&] { return FileCall{FileCall::kResize, path_of(fd), "", "", position + bytes}; });
}

extern "C" int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  if (is_interrupted()) return errno = EINTR, -1;
  if (opens_only_plainly && (flags & O_TMPFILE) == O_TMPFILE) return errno = EOPNOTSUPP, -1;
  if (before_opening && (flags & O_CREAT) == 0) {
    const auto call = before_opening;  // which may replace it
    call(path);
  }
  auto act = [&] { return static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode)); };
  if ((flags & O_EXCL) == 0) return act();
  return observed(act, [&] { return FileCall{FileCall::kCreate, path}; });
}

// Without O_DIRECT, the kernel has made the file when it refuses the flag.
extern "C" int mkostemp(char* path, int flags) {
  const bool is_refused = opens_only_plainly && (flags & O_DIRECT) != 0;
  std::memcpy(path + std::strlen(path) - 6, is_refused ? "direct" : "plain-", 6);
  const int file = ::open(path, O_RDWR | O_CREAT | O_EXCL | (is_refused ? 0 : flags), 0600);
  if (!is_refused) return file;
  ::close(file);
  return errno = EINVAL, -1;
}

// Called by std::filesystem, which opens folders relative to others.
extern "C" int openat(int folder, const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  if (is_interrupted()) return errno = EINTR, -1;
  return static_cast<int>(::syscall(SYS_openat, folder, path, flags, mode));
}

extern "C" int mkdir(const char* path, mode_t mode) noexcept {
  return observed([&] { return static_cast<int>(::syscall(SYS_mkdirat, AT_FDCWD, path, mode)); },
                  [&] { return FileCall{FileCall::kMakeFolder, path}; });
}

extern "C" int unlinkat(int fd, const char* path, int flags) noexcept {
  const auto whole = [&] { return std::filesystem::path(fd == AT_FDCWD ? path : path_of(fd) + "/" + path); };
  auto act = [&] {
    if (!is_like_nfs || std::filesystem::is_directory(whole()) || !is_open(whole()))
      return static_cast<int>(::syscall(SYS_unlinkat, fd, path, flags));
    const auto other = whole().parent_path() / (".nfs" + std::to_string(++renamed_instead));
    return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, whole().c_str(), AT_FDCWD, other.c_str(), 0));
  };
  return observed(act, [&] { return FileCall{FileCall::kRemove, whole()}; });
}

extern "C" int remove(const char* path) noexcept {
  const int result = ::unlinkat(AT_FDCWD, path, 0);
  return result == 0 || errno != EISDIR ? result : ::unlinkat(AT_FDCWD, path, AT_REMOVEDIR);
}

extern "C" ssize_t pread(int fd, void* data, size_t bytes, off_t position) {
  if (is_interrupted()) return errno = EINTR, -1;
  if (reading_fails_with != 0) {
    const std::filesystem::path path = path_of(fd);
    if (path.filename().string().starts_with("rank-")) return errno = reading_fails_with, -1;
  }
  return ::syscall(SYS_pread64, fd, data, bytes, position);
}

extern "C" int renameat2(int from_fd, const char* from, int to_fd, const char* to, unsigned flags) noexcept {
  if (is_like_nfs && flags != 0) return errno = EINVAL, -1;
  if (std::string(from).find(".saving-") != std::string::npos) {
    if (std::filesystem::exists(std::filesystem::path(from) / "tessera.json")) check_durable(from);
    struct stat folder {};
    const std::lock_guard lock(synced_mutex);
    if (::stat(std::filesystem::path(from).parent_path().c_str(), &folder) == 0) is_durable[folder.st_ino] = false;
  }
  return observed([&] { return static_cast<int>(::syscall(SYS_renameat2, from_fd, from, to_fd, to, flags)); },
                  [&] {
                    const bool exchanges = (flags & RENAME_EXCHANGE) != 0;
                    return FileCall{exchanges ? FileCall::kExchange : FileCall::kRename, from, to};
                  });
}

namespace {

using namespace testing_support;

// Limits the size of files during its lifetime, like a full disk.
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

TEST(CheckpointFaults, InterruptedCallsAreRepeatedAndShortWritesContinued) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(30, 30).ptr(), comm);
    auto set_on_all = [&](std::atomic<int>& setting, int value) {
      comm->barrier();
      setting = value;
      comm->barrier();
    };
    set_on_all(interrupts_every, 3);
    set_on_all(writes_of_bytes, 1000);
    save_checkpoint(folder / "a", model, {{"step", 1}}, {.keep_last = 1});
    save_checkpoint_async(folder / "a", model, {{"step", 2}}).wait();
    EXPECT_EQ(load_checkpoint(folder / "a", model)["step"], 2);
    EXPECT_TRUE(load_newest_checkpoint(folder.path(), {model}));
    for (int save = 0; save < 2; ++save) save_full(folder / "m.safetensors", model, {.max_file_bytes = 2000});
    load_full(folder / "m.safetensors.index.json", model);
    set_on_all(interrupts_every, 0);
    // A write that takes no bytes, and gives no error.
    set_on_all(writes_of_bytes, 0);
    expect_contains(error_of<CheckpointError>([&] { save_checkpoint(folder / "a", model); }), "takes no bytes");
    set_on_all(writes_of_bytes, -1);
    EXPECT_EQ(load_checkpoint(folder / "a", model)["step"], 2);
  });
}

// At each file that a reader opens in turn, another job completes a checkpoint and removes, or replaces, the one
// before.
TEST(CheckpointFaults, ReadersFindACheckpointWhateverOtherJobsDoMeanwhile) {
  namespace fs = std::filesystem;
  const TemporaryFolder all;
  for (const bool replaces : {false, true})
    on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
      Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
      const fs::path folder = all / (replaces ? "replaced" : "removed"), next = all / "next";
      int opened = 1;
      for (int at = 1; opened >= at; ++at) {
        fs::remove_all(folder);
        fs::remove_all(next);
        save_checkpoint(folder / "a", model, {{"step", 1}});
        save_checkpoint(folder / "b", model, {{"step", 2}});
        fs::rename(folder / "b", next);
        opened = 0;
        before_opening = [&](const std::string&) {
          if (++opened != at) return;
          const auto own = std::exchange(before_opening, nullptr);
          if (replaces) {
            const fs::path hidden = folder / ".a.saving-0123456789abcdef";
            fs::rename(next, hidden);
            exchange_entries(hidden, folder / "a");
            clear_local_leftovers(folder);
          } else {
            fs::rename(next, folder / "b");
            remove_old_checkpoints(folder, 1);
          }
          before_opening = [&](const std::string&) { ++opened; };
        };
        const bool is_of_folder = !replaces || at % 2 == 0;
        std::optional<int> step;
        const auto error = error_of<CheckpointError>([&] {
          if (is_of_folder) {
            const auto loaded = load_newest_checkpoint(folder, {model});
            if (loaded) step = loaded->extra["step"].get<int>();
          } else {
            step = load_checkpoint(folder / "a", model)["step"].get<int>();
          }
        });
        before_opening = nullptr;
        EXPECT_EQ(error, "") << "at file " << at;
        EXPECT_TRUE(step == 1 || step == 2) << "at file " << at;
      }
      EXPECT_GT(opened, 3);
    });
}

// Two jobs rotate the same names: a checkpoint that was listed as an old one may be the newest when it is removed.
TEST(CheckpointFaults, AnOldCheckpointThatWasReplacedIsNotRemoved) {
  const TemporaryFolder folder;
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    save_checkpoint(folder / "a", model, {{"step", 1}});
    const auto listed = find_checkpoints(folder.path());
    save_checkpoint(folder / "a", model, {{"step", 2}});
    remove_local_checkpoint(listed.whole.at(0), listed.sequences.at(0));
    EXPECT_EQ(load_checkpoint(folder / "a", model)["step"], 2);
  });
}

// No later save reports the error, for example after a program's last save.
TEST(CheckpointFaults, ASaveThatFailedAndNobodyWaitedForIsAWarning) {
  struct Warnings : c10::WarningHandler {
    void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
    std::vector<std::string> texts;
  };
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(on_rank_device(torch::nn::Linear(30, 30)), comm);
    Warnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    failing_rank = 1;
    comm->barrier();
    {
      auto told = save_checkpoint_async(folder / "told", fsdp);
      EXPECT_NE(error_of<CheckpointError>([&] { told.wait(); }), "");
    }
    EXPECT_EQ(warnings.texts, std::vector<std::string>());
    { auto dropped = save_checkpoint_async(folder / "dropped", fsdp); }
    ASSERT_EQ(warnings.texts.size(), 1U);
    const std::string failed = "saving " + (folder / "dropped").string() + " failed, and nobody has waited for it: ";
    for (const std::string& part : {failed, std::string("rank 1: ")}) expect_contains(warnings.texts[0], part);
    comm->barrier();
    failing_rank = -1;
  });
}

// The other ranks get the error at once, and the group still works.
TEST(CheckpointFaults, OneRankThatCannotWriteInTheBackgroundIsNamedAtOnce) {
  for (int world : {3, 5}) {  // 3: rank 0 reads all ranks' descriptions; 5: those of subgroups
    const TemporaryFolder folder;
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      Replicated model(torch::nn::Linear(30, 30).ptr(), comm);
      FullyShardedDataParallel fsdp(on_rank_device(torch::nn::Linear(30, 30)), comm);
      save_checkpoint(folder / "a", fsdp, {{"step", 1}});
      comm->barrier();
      failing_rank = 1;
      comm->barrier();
      const auto began = std::chrono::steady_clock::now();
      auto pending = save_checkpoint_async(folder / "a", fsdp, {{"step", 2}});
      const auto error = error_of<CheckpointError>([&] { pending.wait(); });
      EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(20));
      for (const char* part : {"rank 1: ", "rank-00001-0.safetensors", "writing to the disk"})
        expect_contains(error, part);
      comm->barrier();
      failing_rank = -1;
      comm->barrier();
      EXPECT_EQ(load_checkpoint(folder / "a", fsdp)["step"], 1);
      auto again = save_checkpoint_async(folder / "a", fsdp, {{"step", 3}});
      again.wait();
      EXPECT_EQ(load_checkpoint(folder / "a", fsdp)["step"], 3);
    });
    EXPECT_EQ(verify_checkpoint(folder / "a"), std::vector<std::string>());
  }
}

// A rank may write longer than the timeout of a collective operation.
TEST(CheckpointFaults, OneRankMayBeSlowerThanTheGroupsTimeout) {
  const TemporaryFolder folder;
  run_ranks(2,
            [&](std::shared_ptr<Communicator> comm) {
              FullyShardedDataParallel fsdp(on_rank_device(torch::nn::Linear(30, 30)), comm);
              for (int step = 0; step < 2; ++step) {
                slow_ms = 1500;
                slow_syncs_of_rank_1 = 1;
                comm->barrier();
                if (step == 0)
                  save_checkpoint(folder / "a", fsdp, {{"step", step}});
                else
                  save_checkpoint_async(folder / "a", fsdp, {{"step", step}}).wait();
                comm->barrier();
                EXPECT_EQ(slow_syncs_of_rank_1, 0);
                comm->barrier();
              }
              EXPECT_EQ(load_checkpoint(folder / "a", fsdp)["step"], 1);
            },
            {.timeout = std::chrono::milliseconds(1000)});
}

// The others get an error that names a stuck rank, and do not wait for it.
TEST(CheckpointFaults, ARankThatIsStuckIsNamedToTheOthers) {
  const TemporaryFolder folder;
  slow_ms = 6000;
  slow_syncs_of_rank_1 = 2;
  auto save = [&](bool in_background) {
    run_ranks(2,
              [&](std::shared_ptr<Communicator> comm) {
                FullyShardedDataParallel fsdp(on_rank_device(torch::nn::Linear(30, 30)), comm);
                const auto began = std::chrono::steady_clock::now();
                const auto error = error_of<CheckpointError>([&] {
                  if (in_background)
                    save_checkpoint_async(folder / "a", fsdp).wait();
                  else
                    save_checkpoint(folder / "b", fsdp);
                });
                expect_contains(error, in_background ? "rank 1 did not finish writing" : "rank 1: gets no further");
                if (comm->rank() == 0) {
                  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(slow_ms));
                }
              },
              {.timeout = std::chrono::milliseconds(800)});
  };
  auto background = std::async(std::launch::async, [&] { save(true); });
  save(false);
  background.get();
}

// All ranks throw and continue, or one fails: the save completes, and no rank waits for long.
TEST(CheckpointFaults, AnExceptionBesideASaveTakesNothingOfIt) {
  for (const int thrower : {-1, 0, 1}) {  // -1: all
    const TemporaryFolder folder;
    run_ranks(3,
              [&](std::shared_ptr<Communicator> comm) {
                FullyShardedDataParallel fsdp(torch::nn::Linear(30, 30), comm);
                slow_ms = 1000;
                slow_syncs_of_rank_1 = 1;
                comm->barrier();
                const bool throws = thrower < 0 || thrower == comm->rank();
                const auto began = std::chrono::steady_clock::now();
                const auto error = error_of<std::exception>([&] {
                  auto pending = save_checkpoint_async(folder / "a", fsdp, {{"step", 1}});
                  if (throws) throw std::runtime_error("mine");
                  pending.wait();
                });
                EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10)) << thrower;
                EXPECT_EQ(error, throws ? "mine" : "") << thrower;
                EXPECT_EQ(load_checkpoint(folder / "a", fsdp)["step"], 1) << thrower;
                save_checkpoint(folder / "b", fsdp);
              },
              {.timeout = std::chrono::seconds(20)});
    EXPECT_EQ(verify_checkpoint(folder / "a"), std::vector<std::string>());
  }
}

// A hurried save waits for a rank whose heartbeats arrive, but not for a silent one.
TEST(CheckpointFaults, WhoHurriesWaitsOnlyForRanksThatAreHeardOf) {
  const auto rank_0_is_told = [](std::chrono::milliseconds timeout,
                                 const std::function<void(SaveCoordinator&)>& rank_1) {
    std::string told;
    run_ranks(2,
              [&](std::shared_ptr<Communicator> comm) {
                SaveCoordinator coordinator(comm, "save/1", "saving a");
                if (comm->rank() == 1) return rank_1(coordinator);
                coordinator.hurry();
                Heartbeat heartbeat;
                told = coordinator.finish({}, heartbeat, [] {}, [] {}).error;
              },
              {.timeout = timeout});
    return told;
  };
  const auto works_long = [](SaveCoordinator& coordinator) {
    Heartbeat heartbeat;
    const auto own = coordinator.work(heartbeat, [] { std::this_thread::sleep_for(std::chrono::milliseconds(2200)); });
    EXPECT_EQ(coordinator.finish(own, heartbeat, [] {}, [] {}).error, "");
  };
  EXPECT_EQ(rank_0_is_told(std::chrono::milliseconds(2400), works_long), "");
  const auto began = std::chrono::steady_clock::now();
  expect_contains(rank_0_is_told(std::chrono::minutes(1), [](SaveCoordinator&) {}),
                  "rank 1 did not finish writing before the save was given up");
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(30));
}

// A failing rank reports its error, and may end before it reads the result.
TEST(CheckpointFaults, ARankThatFailsAndIsGoneIsNotWaitedFor) {
  const auto began = std::chrono::steady_clock::now();
  run_ranks(2,
            [](std::shared_ptr<Communicator> comm) {
              if (comm->rank() == 1) {
                const StoreMailbox notes(*comm, "save/1");
                notes.leave("outcome/1", Outcome{.error = "mine"}.to_text());
                notes.add("failed", 1);
                notes.add("written/0", 1);
                return;
              }
              SaveCoordinator coordinator(comm, "save/1", "saving a");
              Heartbeat heartbeat;
              EXPECT_EQ(coordinator.finish({}, heartbeat, [] {}, [] {}).error, "saving a: rank 1: mine");
            },
            {.timeout = std::chrono::minutes(1)});
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(30));
}

// An older checkpoint would silently undo the steps of a newer Tessera.
TEST(CheckpointFaults, ACheckpointOfANewerFormatIsNotPassedOver) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    for (const char* name : {"step-1", "step-2"}) save_checkpoint(folder / name, model);
    if (comm->rank() == 0) {
      const auto manifest = folder / "step-2" / kManifestName;
      std::string text = read_text(manifest, 1 << 20);
      const std::string version = "\"version\": 2";
      ASSERT_NE(text.find(version), std::string::npos);
      std::ofstream(manifest) << text.replace(text.find(version), version.size(), "\"version\": 3");
    }
    comm->barrier();
    expect_contains(error_of<CheckpointMismatch>([&] { load_newest_checkpoint(folder.path(), {model}); }),
                    "format version 3");
  });
}

// A damaged manifest is reported, and an older checkpoint loads. Training then continues: a new save may take the name,
// and keep_last removes the damaged one.
TEST(CheckpointFaults, ADamagedManifestIsToldOfPassedOverAndReplaced) {
  const auto replaced = [](const std::string& text, const std::string& from, const std::string& to) {
    return std::string(text).replace(text.find(from), from.size(), to);
  };
  const std::pair<int, std::function<std::string(const std::string&)>> damages[] = {
      {3, [](const std::string&) { return std::string(); }},
      {3, [](const std::string& text) { return std::string(300, '\1') + text.substr(300); }},
      {3, [](const std::string& text) { return text.substr(0, text.size() / 2); }},
      {3, [&](const std::string& text) { return replaced(text, "\"sequence\": 3", "\"sequence\": 1"); }},
      {1, [&](const std::string& text) { return replaced(text, "\"sequence\": 1", "\"sequence\": 9"); }},
  };
  for (const auto& [step, damage] : damages) {
    const TemporaryFolder folder;
    auto name = [&](int n) { return folder / ("step-" + std::to_string(n)); };
    on_ranks(2, [&, damaged = step](std::shared_ptr<Communicator> comm) {
      Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
      torch::optim::AdamW adam(model.parameters());
      auto newest = [&] { return load_newest_checkpoint(folder.path(), model, adam); };
      for (int n = 1; n <= 3; ++n) save_checkpoint(name(n), model, adam, {{"step", n}});
      if (comm->rank() == 0) {
        const std::string text = damage(read_text(name(damaged) / kManifestName, 1 << 20));
        std::ofstream(name(damaged) / kManifestName) << text;
      }
      comm->barrier();
      auto loaded = newest();
      EXPECT_EQ(loaded->extra["step"], damaged == 3 ? 2 : 3);
      ASSERT_EQ(loaded->damaged.size(), 1U);
      expect_contains(loaded->damaged[0], name(damaged).string());
      EXPECT_EQ(latest_checkpoint(folder.path()), name(damaged)) << "loading it says so";
      if (damaged == 3) {
        save_checkpoint(name(3), model, adam, {{"step", 30}});
        loaded = newest();
        EXPECT_EQ(loaded->extra["step"], 30);
        EXPECT_TRUE(loaded->damaged.empty());
      }
      save_checkpoint(name(4), model, adam, {{"step", 4}}, {.keep_last = 2});
      save_checkpoint(name(5), model, adam, {{"step", 5}}, {.keep_last = 3});
      EXPECT_TRUE(newest()->damaged.empty() || damaged == 1);
    });
    // A background thread renames step 1 and removes it.
    for (int i = 0; i < 3000 && entries(folder.path()) > 3; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_FALSE(std::filesystem::exists(name(1)));
    EXPECT_EQ(entries(folder.path()), 3);
  }
  // A folder without files of a save is not changed.
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder / "a");
  std::ofstream(folder / "a/tessera.json") << "{}";
  std::ofstream(folder / "a/notes.txt") << "mine";
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    expect_contains(error_of<CheckpointError>([&] { save_checkpoint(folder / "a", model); }), "something else");
    save_checkpoint(folder / "b", model, {}, {.keep_last = 1});
    EXPECT_EQ(load_checkpoint(folder / "b", model).value("step", 7), 7);  // `{}` is an empty object
    save_checkpoint(folder / "c", model, {}, {.keep_last = 1});
    // Checksums of every 16 bytes exceed the header's limit.
    Replicated large(torch::nn::Linear(5000, 5000).ptr(), comm);
    expect_contains(
        error_of<std::invalid_argument>([&] { save_checkpoint(folder / "d", large, {}, {.block_bytes = 16}); }),
        "take larger blocks");
  });
  EXPECT_TRUE(std::filesystem::exists(folder / "a/notes.txt"));
}

// A failure that proves no damage must not load an older checkpoint, which would lose progress.
TEST(CheckpointFaults, WhatIsNoDamageDoesNotGoBackToAnOlderCheckpoint) {
  const TemporaryFolder folder;
  struct OutOfMemory : Stateful {
    bool is_out = false;
    std::string state_name() const override { return "mine"; }
    StateValues state_values() const override { return {}; }
    void check_state_values(const StateValues&) const override {
      if (is_out) throw std::bad_alloc();
    }
    void load_state_values(const StateValues&) override {}
  };
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(on_rank_device(torch::nn::Linear(30, 30)), comm);
    OutOfMemory mine;
    for (int n = 1; n <= 2; ++n) save_checkpoint(folder / ("step-" + std::to_string(n)), {fsdp, mine}, {{"step", n}});
    auto newest = [&] { static_cast<void>(load_newest_checkpoint(folder.path(), {fsdp, mine})); };
    for (const int reason : {EIO, EMFILE, EACCES}) {
      comm->barrier();
      reading_fails_with = reason;
      comm->barrier();
      const auto error = error_of<StorageUnavailable>(newest);
      for (const std::string& part : {std::string("step-2/rank-0000"), std::string(std::strerror(reason))})
        expect_contains(error, part);
      comm->barrier();
      reading_fails_with = 0;
      comm->barrier();
    }
    mine.is_out = comm->rank() == 1;
    expect_contains(error_of<CheckpointError>(newest), "rank 1: out of memory");
    mine.is_out = false;
    EXPECT_EQ(load_newest_checkpoint(folder.path(), {fsdp, mine})->extra["step"], 2);
  });
}

TEST(CheckpointFaults, AFileSystemThatCannotReplaceSaysSoBeforeAnythingIsWritten) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    save_checkpoint(folder / "a", model, {{"step", 1}});
    is_like_nfs = true;
    comm->barrier();
    expect_contains(error_of<CheckpointError>([&] { auto save = save_checkpoint_async(folder / "a", model); }),
                    "cannot replace a directory in one step: save under a new name");
    save_checkpoint(folder / "b", model, {{"step", 2}});
    comm->barrier();
    is_like_nfs = false;
    EXPECT_EQ(entries(folder.path()), 2);
    EXPECT_EQ(load_checkpoint(folder / "a", model)["step"], 1);
  });
}

// Files must be closed before they are removed, or the folder stays.
TEST(CheckpointFaults, OnNfsOldCheckpointsAndSavesThatFailedGoWhole) {
  const TemporaryFolder folder;
  folder.write(".left.saving-0123456789abcdef/.manifest", "of a process that was killed\n");
  renamed_instead = 0;
  is_like_nfs = true;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    for (int step = 1; step <= 4; ++step)
      save_checkpoint(folder / ("step-" + std::to_string(step)), model, {{"step", step}}, {.keep_last = 2});
    comm->barrier();
    failing_rank = 1;
    comm->barrier();
    expect_contains(error_of<CheckpointError>([&] { save_checkpoint(folder / "step-5", model); }), "rank 1: ");
    comm->barrier();
    failing_rank = -1;
    std::shared_ptr<Removal> removal;
    with_group_saves(comm, [&](const GroupSaves& saves) { removal = saves.removal; });
    if (removal) removal->join();
    comm->barrier();
    EXPECT_EQ(load_newest_checkpoint(folder.path(), {model})->extra["step"], 4);
  });
  is_like_nfs = false;
  EXPECT_EQ(renamed_instead, 0);
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) names.insert(entry.path().filename());
  EXPECT_EQ(names, (std::set<std::string>{"step-3", "step-4"}));
}

TEST(CheckpointFaults, AnUnnamedFileLeavesNoNameOnAnyFileSystem) {
  const TemporaryFolder folder;
  opens_only_plainly = true;
  const File file = File::create_unnamed(folder.path(), [](const FileFailure& failure) { FAIL() << failure.reason(); });
  opens_only_plainly = false;
  EXPECT_FALSE(file.is_direct());
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(CheckpointFaults, FilesOfManyRanksNeedFewDescriptors) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(seeded(1, [] { return torch::nn::Linear(200, 200); }), comm);
    save_checkpoint(folder / "a", fsdp);
  });
  reshard_checkpoint(folder / "a", folder / "b", 150);
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  rlimit few = before;
  few.rlim_cur = static_cast<rlim_t>(entries("/proc/self/fd")) + 40;
  ::setrlimit(RLIMIT_NOFILE, &few);
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    auto net = seeded(2, [] { return torch::nn::Linear(200, 200); });
    FullyShardedDataParallel fsdp(net, comm);
    load_checkpoint(folder / "b", fsdp);
    EXPECT_TRUE(
        torch::equal(fsdp.full_state_dict()["weight"], seeded(1, [] { return torch::nn::Linear(200, 200); })->weight));
  });
  EXPECT_EQ(verify_checkpoint(folder / "b"), std::vector<std::string>());
  ::setrlimit(RLIMIT_NOFILE, &before);
}

TEST(CheckpointFaults, OneJobAtATimeHasAFolder) {
  const TemporaryFolder folder;
  std::optional<FolderLock> lock(std::in_place, folder / "out");
  const auto error = error_of<CheckpointError>([&] { FolderLock second(folder / "out"); });
  for (const std::string& part : {std::string("in use by process "), std::to_string(::getpid())})
    expect_contains(error, part);
  lock.reset();
  std::ofstream(folder / "out/.tessera.lock") << "process 1 on elsewhere\n";  // of a killed process
  FolderLock(folder / "out");
  EXPECT_THROW(FolderLock(""), std::invalid_argument);
  std::filesystem::remove(folder / "out/.tessera.lock");
  ASSERT_EQ(::mkfifo((folder / "out/.tessera.lock").c_str(), 0600), 0);  // to open a pipe would block
  expect_contains(error_of<CheckpointError>([&] { FolderLock piped(folder / "out"); }), "is not a regular file");
  EXPECT_TRUE(is_of_ended_process("process 999999999 on " + process_name().substr(process_name().rfind(' ') + 1)));
  EXPECT_FALSE(is_of_ended_process(process_name()));
  EXPECT_FALSE(is_of_ended_process("process 999999999 on elsewhere"));
  EXPECT_FALSE(is_of_ended_process("process 999999999 on " + host_name()));  // of an unknown PID namespace
  EXPECT_FALSE(is_of_ended_process("{"));
}

// For example, a data loader's process forked while the parent removes old checkpoints: the child does not have that
// thread.
TEST(CheckpointFaults, AForkedChildDoesNotWaitForTheParentsRemoval) {
  std::promise<void> go_on;
  Removal removal([gone = go_on.get_future().share()] { gone.wait(); }, nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);  // terminates it by SIGALRM
    removal.join();
    ::_exit(7);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
  go_on.set_value();
  removal.join();
  EXPECT_TRUE(removal.has_ended());
}

TEST(CheckpointFaults, ASaveDoesNotWaitForTheRemovalOfAGroupThatHasEnded) {
  auto go_on = std::make_shared<std::promise<void>>();
  auto has_ended = std::make_shared<std::atomic<bool>>(false);
  on_ranks(1, [&](const std::shared_ptr<Communicator>& comm) {
    with_group_saves(comm, [&](GroupSaves& saves) {
      saves.removal = std::make_shared<Removal>(
          [gone = go_on->get_future().share(), has_ended] {
            gone.wait_for(std::chrono::seconds(20));
            *has_ended = true;
          },
          nullptr);
    });
  });
  on_ranks(1, [](const std::shared_ptr<Communicator>& comm) { with_group_saves(comm, [](const GroupSaves&) {}); });
  EXPECT_FALSE(*has_ended);
  go_on->set_value();
}

// A power cut takes writes since the last sync, in any order: a checkpoint must be durable before it gets its name.
TEST(CheckpointFaults, EverythingIsOnTheDiskBeforeItHasItsName) {
  const TemporaryFolder folder;
  {
    const std::lock_guard lock(synced_mutex);
    named_too_early.clear();
  }
  for (const auto& [world, width] : {std::pair(5, 30), {2, 2200}})  // large files have their blocks allocated first
    on_ranks(world, [&, width = width](std::shared_ptr<Communicator> comm) {
      FullyShardedDataParallel fsdp(on_rank_device(torch::nn::Linear(width, width)), comm);
      for (const char* name : {"a", "b", "a"}) {
        save_checkpoint(folder / name, fsdp);
        save_checkpoint_async(folder / name, fsdp).wait();
      }
    });
  reshard_checkpoint(folder / "a", folder / "c", 2);
  const std::lock_guard lock(synced_mutex);
  EXPECT_EQ(named_too_early, std::vector<std::string>());
  struct stat status {};
  ASSERT_EQ(::stat(folder.path().c_str(), &status), 0);
  EXPECT_TRUE(is_durable[status.st_ino]) << "the name itself";
}

// A model whose state one rank cannot read.
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

TEST(CheckpointFaults, NewFoldersAreAsDurableAsWhatIsInThem) {
  const TemporaryFolder folder;
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    save_checkpoint(folder / "run/a/checkpoints/step-1", model);
    save_full(folder / "run/full/model.safetensors", model);
  });
  const std::lock_guard lock(synced_mutex);
  for (const char* name : {"", "run", "run/a", "run/a/checkpoints", "run/full"}) {
    const auto path = *name == '\0' ? folder.path() : folder / name;  // its new entry must be durable
    EXPECT_TRUE(synced.contains(std::filesystem::canonical(path))) << path;
  }
}

}  // namespace
}  // namespace tessera::faults_test
