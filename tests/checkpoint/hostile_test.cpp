// Saves on a full disk, in a read-only or removed folder, beside a second job, or with a clock set back. Each rank gets
// the error within seconds, with rank and path, and the older checkpoint loads.
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstring>
#include <fstream>
#include <future>
#include <iostream>
#include <set>
#include <string>
#include <system_error>
#include <thread>

#include "checkpoint/load/find_checkpoints.h"
#include "checkpoint/load/offline.h"
#include "checkpoint/save/commit.h"
#include "checkpoint/storage/file_lock.h"
#include "core/comm/agreement.h"
#include "tests/checkpoint/file_calls.h"
#include "tests/checkpoint/replicated.h"
#include "tests/support/matrix.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::hostile_test {
using namespace internal;

std::atomic<int64_t> wall_clock_is_ahead_s = 0;
std::atomic<bool> no_locks = false;  // simulates a file system without locks

extern "C" int fcntl(int fd, int command, ...) {
  va_list more;
  va_start(more, command);
  void* const argument = va_arg(more, void*);
  va_end(more);
  if (no_locks && command == F_OFD_SETLK) return errno = ENOLCK, -1;
  return static_cast<int>(::syscall(SYS_fcntl, fd, command, argument));
}

// Replaces the system's function: this program's time of day.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(::syscall(SYS_clock_gettime, clock, time));
  if (clock == CLOCK_REALTIME) time->tv_sec += wall_clock_is_ahead_s;
  return result;
}

namespace {

using namespace testing_support;
namespace fs = std::filesystem;
using testing_support::FileCall;

constexpr auto kSeconds = std::chrono::seconds(20);  // on a busy machine

// A mounted disk; without permission to mount, writes to its folder fail after this number of bytes.
class SmallDisk {
 public:
  explicit SmallDisk(int64_t bytes) {
    // Mounts are visible to this thread and its children, and end with them.
    is_real_ = ::unshare(CLONE_NEWNS | CLONE_FS) == 0 &&
               ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
               ::mount("tmpfs", path().c_str(), "tmpfs", 0, size_of(bytes).c_str()) == 0;
    if (is_real_) return;
    if (errno != EPERM) throw std::system_error(errno, std::generic_category(), "mounting a small disk");
    std::cout << "[ no mount ] the disk is imitated\n";
    room_bytes_ = bytes;
    refuse_file_calls([this](const FileCall& call) { return refusal(call); });
  }
  ~SmallDisk() {
    if (is_real_)
      ::umount2(path().c_str(), MNT_DETACH);
    else
      refuse_file_calls(nullptr);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

  const fs::path& path() const { return folder_.path(); }
  void resize(int64_t bytes) {
    if (is_real_)
      remount(0, bytes);
    else
      room_bytes_ = written_bytes_ + bytes;
  }
  // Fills the disk with a file of this name.
  void fill(const std::string& name) {
    std::ofstream rest(path() / name);
    if (!is_real_) room_bytes_ = written_bytes_.load();
    while (is_real_ && rest << std::string(4096, 'x') << std::flush) {
    }
  }
  void set_read_only(bool is_read_only, int64_t bytes) {
    if (is_real_)
      remount(is_read_only ? MS_RDONLY : 0, bytes);
    else
      is_read_only_ = is_read_only;
  }

 private:
  static std::string size_of(int64_t bytes) { return "size=" + std::to_string(bytes); }
  // Waits until no file is open for writing: a save's lock is released by its removal thread.
  void remount(unsigned long flags, int64_t bytes) {
    for (int i = 0; ::mount("tmpfs", path().c_str(), "tmpfs", MS_REMOUNT | flags, size_of(bytes).c_str()) != 0; ++i) {
      if (errno != EBUSY || i == 500) throw std::system_error(errno, std::generic_category(), "remounting");
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  int refusal(const FileCall& call) {
    if (!call.path.starts_with(path().string())) return 0;
    if (is_read_only_) return EROFS;
    if (call.kind != FileCall::kWrite) return 0;
    if (written_bytes_ + static_cast<int64_t>(call.data.size()) > room_bytes_) return ENOSPC;
    written_bytes_ += static_cast<int64_t>(call.data.size());
    return 0;
  }

  const TemporaryFolder folder_;
  bool is_real_ = false;
  std::atomic<int64_t> room_bytes_ = 0, written_bytes_ = 0;
  std::atomic<bool> is_read_only_ = false;
};

void on_small_disk(int64_t bytes, const std::function<void(SmallDisk&)>& body) {
  std::async(std::launch::async, [&] {
    SmallDisk disk(bytes);
    body(disk);
  }).get();
}

// Returns the error of a save on this rank, or ""; checks that it takes seconds at most.
template <class Save>
std::string told_by(Save save) {
  const auto began = std::chrono::steady_clock::now();
  std::string told;
  try {
    save();
  } catch (const CheckpointError& error) {
    told = error.what();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - began, kSeconds) << told;
  return told;
}

template <class Model>
std::string save_either_way(bool in_background, const fs::path& path, Model& model, torch::optim::Optimizer& optimizer,
                            int step, const SaveOptions& options = {}) {
  return told_by([&] {
    if (in_background)
      save_checkpoint_async(path, model, optimizer, {{"step", step}}, options).wait();
    else
      save_checkpoint(path, model, optimizer, {{"step", step}}, options);
  });
}

// The error must have the rank, the path, and the system's reason.
void expect_told(const std::string& told, const fs::path& path, int reason) {
  for (const std::string& part : {std::string("rank "), path.string(), std::string(std::strerror(reason))})
    expect_contains(told, part);
}

int64_t entries(const fs::path& folder) {
  return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
}

// Returns a folder's names, except those that contain `but`, once they equal `expected` or after some seconds.
std::set<std::string> names_at_the_end(const fs::path& folder, const std::set<std::string>& expected,
                                       const std::string& but = "/") {
  std::set<std::string> names;
  for (int i = 0; i < 500 && names != expected; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    names.clear();
    for (const auto& entry : fs::directory_iterator(folder))
      if (const std::string name = entry.path().filename(); name.find(but) == std::string::npos) names.insert(name);
  }
  return names;
}

struct Trained {
  explicit Trained(const std::shared_ptr<Communicator>& comm, int width = 300)
      : fsdp(seeded(1, [&] { return torch::nn::Linear(width, width); }), comm), optimizer(fsdp.parameters(), 1e-3) {
    fsdp(torch::ones({1, width})).sum().backward();
    optimizer.step();
  }
  FullyShardedDataParallel<torch::nn::Linear> fsdp;
  AdamW optimizer;
};

void expect_newest(const fs::path& folder, Trained& trained, int step) {
  const auto newest = load_newest_checkpoint(folder, trained.fsdp, trained.optimizer);
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->extra["step"], step);
  EXPECT_EQ(newest->damaged, std::vector<std::string>());
}

TEST(HostileSave, AFullDiskIsToldToAllRanksAndTheOlderCheckpointLoads) {
  constexpr int64_t kRoom = 2 << 20;  // for one checkpoint of 1.1 MB
  for (const bool leaves_nothing : {false, true})
    on_small_disk(kRoom, [&](SmallDisk& disk) {
      on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
        Trained trained(comm);
        ASSERT_EQ(save_either_way(false, disk.path() / "a", trained.fsdp, trained.optimizer, 1), "");
        if (comm->rank() == 0 && leaves_nothing) disk.fill("rest");
        comm->barrier();
        for (const bool in_background : {false, true}) {
          const auto told = save_either_way(in_background, disk.path() / "b", trained.fsdp, trained.optimizer, 2);
          expect_told(told, disk.path(), ENOSPC);
          comm->barrier();
          EXPECT_EQ(entries(disk.path()), leaves_nothing ? 2 : 1) << "what was written is removed";
          expect_newest(disk.path(), trained, 1);
        }
        comm->barrier();
        if (comm->rank() == 0) disk.resize(4 * kRoom);
        comm->barrier();
        ASSERT_EQ(save_either_way(true, disk.path() / "b", trained.fsdp, trained.optimizer, 3), "");
        expect_newest(disk.path(), trained, 3);
      });
    });
}

TEST(HostileSave, AFolderThatTurnsReadOnlyIsToldToAllRanksAndLoads) {
  constexpr int64_t kRoom = 8 << 20;
  on_small_disk(kRoom, [&](SmallDisk& disk) {
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      Trained trained(comm);
      auto set_read_only = [&](bool is_read_only) {
        comm->barrier();
        if (comm->rank() == 0) disk.set_read_only(is_read_only, kRoom);
        comm->barrier();
      };
      ASSERT_EQ(save_either_way(true, disk.path() / "a", trained.fsdp, trained.optimizer, 1), "");
      set_read_only(true);
      for (const bool in_background : {false, true})
        for (const char* name : {"a", "b", "new/c"}) {
          const auto path = disk.path() / name;
          const auto told = save_either_way(in_background, path, trained.fsdp, trained.optimizer, 2, {.keep_last = 1});
          expect_told(told, disk.path(), EROFS);
          expect_newest(disk.path(), trained, 1);
        }
      set_read_only(false);
      ASSERT_EQ(save_either_way(false, disk.path() / "a", trained.fsdp, trained.optimizer, 3), "");
      expect_newest(disk.path(), trained, 3);
    });
  });
}

// The disk is full for one rank only: a quota, or its host's disk.
TEST(HostileSave, OneRanksFullDiskIsToldByItsName) {
  const TemporaryFolder folder;
  on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
    Trained trained(comm);
    ASSERT_EQ(save_either_way(false, folder / "a", trained.fsdp, trained.optimizer, 1), "");
    for (const bool in_background : {false, true})
      for (const char* of : {"rank-00002-0.safetensors", ".part-00002"}) {
        comm->barrier();
        if (comm->rank() == 0)
          refuse_file_calls([&](const FileCall& call) {
            return call.kind == FileCall::kWrite && call.path.ends_with(of) ? ENOSPC : 0;
          });
        comm->barrier();
        const auto told = save_either_way(in_background, folder / "b", trained.fsdp, trained.optimizer, 2);
        expect_told(told, folder.path(), ENOSPC);
        expect_contains(told, "rank 2: ");
        expect_contains(told, of);
        comm->barrier();
        refuse_file_calls(nullptr);
        EXPECT_EQ(entries(folder.path()), 1);
        expect_newest(folder.path(), trained, 1);
      }
  });
}

// Makes call number `from` of a save fail; with `goes_on`, also all later calls.
class Refusal {
 public:
  void begin(fs::path folder, int from, bool goes_on, int reason) {
    calls_ = refused_ = 0;
    refuse_file_calls([=, this, folder = std::move(folder)](const FileCall& call) {
      if (!call.path.starts_with(folder.string())) return 0;
      const int number = calls_++;
      if (number < from || (number > from && !goes_on)) return 0;
      ++refused_;
      return reason;
    });
  }
  // Returns whether any call was refused.
  bool end() {
    refuse_file_calls(nullptr);
    return refused_ > 0;
  }

 private:
  std::atomic<int> calls_ = 0, refused_ = 0;
};

TEST(HostileSave, WhicheverCallFailsAllRanksKnowAndACheckpointLoads) {
  const auto ways = of_matrix<std::pair<bool, bool>>({{false, false}, {true, true}}, {{false, true}, {true, false}});
  for (const auto& [in_background, goes_on] : ways) {
    SCOPED_TRACE(std::string(in_background ? "in the background" : "at once") +
                 (goes_on ? ", from a call on" : ", one call"));
    const TemporaryFolder folder;
    const int reason = goes_on ? EROFS : ENOSPC;
    Refusal refusal;
    std::atomic<bool> was_refused = true;
    std::atomic<int> failed_count = 0;
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      Trained trained(comm, 20);
      ASSERT_EQ(save_either_way(false, folder / "step-0", trained.fsdp, trained.optimizer, 0), "");
      int last = 0;
      for (int n = 1; was_refused; ++n) {
        comm->barrier();
        if (comm->rank() == 0) refusal.begin(folder.path(), n - 1, goes_on, reason);
        comm->barrier();
        // Alternates a new name and an existing one.
        const auto path = folder / ("step-" + std::to_string(n % 2 == 0 ? last : n));
        const auto told = gather_texts(
            *comm, save_either_way(in_background, path, trained.fsdp, trained.optimizer, n, {.keep_last = 2}),
            "errors");
        comm->barrier();
        if (comm->rank() == 0) was_refused = refusal.end();
        comm->barrier();
        EXPECT_EQ(told[0].empty(), told[1].empty()) << n << ": " << told[0] << told[1];
        if (!told[comm->rank()].empty()) {
          expect_told(told[comm->rank()], folder.path(), reason);
          failed_count += comm->rank() == 0;
        }
        const auto newest = load_newest_checkpoint(folder.path(), trained.fsdp, trained.optimizer);
        ASSERT_TRUE(newest);
        EXPECT_EQ(newest->damaged, std::vector<std::string>());
        const int step = newest->extra["step"];
        EXPECT_TRUE(step == n || (step == last && !told[0].empty())) << n << " " << step << " " << told[0];
        if (comm->rank() == 0) {
          EXPECT_EQ(verify_checkpoint(newest->path), std::vector<std::string>());
        }
        last = step;
      }
      ASSERT_EQ(
          save_either_way(in_background, folder / "last", trained.fsdp, trained.optimizer, 1000, {.keep_last = 1}), "");
      save_checkpoint(folder / "last", trained.fsdp, trained.optimizer, {}, {.keep_last = 1});  // waits for the removal
    });
    EXPECT_GT(failed_count, 10);
    // A directory that failed before it was locked stays for minutes, because another save may be creating it.
    EXPECT_EQ(names_at_the_end(folder.path(), {"last"}, ".making-"), std::set<std::string>{"last"});
  }
}

TEST(HostileSave, AFolderRemovedMeanwhileIsToldToAllRanks) {
  const TemporaryFolder folder;
  on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
    Trained trained(comm);
    for (const bool in_background : {false, true})
      for (const bool with_parent : {false, true}) {
        const auto run = folder / "run";
        ASSERT_EQ(save_either_way(false, run / "a", trained.fsdp, trained.optimizer, 1), "");
        comm->barrier();
        if (comm->rank() == 0)
          refuse_file_calls([&, with_parent](const FileCall& call) {
            if (call.kind == FileCall::kWrite && call.path.ends_with("rank-00001-0.safetensors"))
              fs::remove_all(with_parent ? run : fs::path(call.path).parent_path());
            return 0;
          });
        comm->barrier();
        const auto told = save_either_way(in_background, run / "b", trained.fsdp, trained.optimizer, 2);
        expect_contains(told, "rank ");
        expect_contains(told, run.string());
        EXPECT_TRUE(told.find("No such file or directory") != std::string::npos ||
                    told.find("somebody has removed it") != std::string::npos)
            << told;
        comm->barrier();
        refuse_file_calls(nullptr);
        if (!with_parent) {
          expect_newest(run, trained, 1);
          EXPECT_EQ(entries(run), 1);
        }
        ASSERT_EQ(save_either_way(in_background, run / "b", trained.fsdp, trained.optimizer, 3), "");
        expect_newest(run, trained, 3);
        comm->barrier();
        if (comm->rank() == 0) fs::remove_all(run);
        comm->barrier();
      }
  });
}

TEST(HostileSave, AClockThatGoesBackOrAheadChangesNothing) {
  const TemporaryFolder folder;
  constexpr int64_t kDay = 24 * 60 * 60;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Trained trained(comm);
    int step = 0;
    for (const int64_t ahead : {int64_t{0}, -400 * kDay, 3 * kDay, -10 * kDay})
      for (const bool in_background : {false, true}) {
        comm->barrier();
        wall_clock_is_ahead_s = ahead;
        comm->barrier();
        const auto path = folder / ("at-" + std::to_string(++step));
        ASSERT_EQ(save_either_way(in_background, path, trained.fsdp, trained.optimizer, step, {.keep_last = 2}), "");
        // The files' times follow the changed clock, too.
        if (comm->rank() == 0) {
          const auto time = fs::file_time_type::clock::now();
          fs::last_write_time(path / "tessera.json", time);
          fs::last_write_time(path, time);
        }
        expect_newest(folder.path(), trained, step);
        EXPECT_EQ(latest_checkpoint(folder.path()), path);
      }
    comm->barrier();
    wall_clock_is_ahead_s = 0;
  });
  const std::set<std::string> last{"at-7", "at-8"};  // saved checkpoints
  EXPECT_EQ(names_at_the_end(folder.path(), last), last);
}

TEST(HostileSave, WithoutLocksOldCheckpointsGoAndWhatDeadSavesLeft) {
  const TemporaryFolder folder;
  no_locks = true;
  const std::string here = process_name().substr(process_name().find(" on "));
  auto leave = [&](const std::string& name, const std::string& of, std::chrono::hours age) {
    const auto path = folder / ("." + name + ".saving-0123456789abcdef");
    fs::create_directories(path);
    std::ofstream(path / ".manifest") << of << "\n";
    fs::last_write_time(path, fs::file_time_type::clock::now() - age);
    return path;
  };
  leave("ended", "process 999999999" + here, std::chrono::hours(0));
  leave("of-yesterday", "process 1 on elsewhere", std::chrono::hours(25));
  const std::set<fs::path> live{leave("at-work", process_name(), std::chrono::hours(0)),
                                leave("elsewhere", "process 1 on elsewhere", std::chrono::hours(23))};
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Trained trained(comm, 20);
    for (int step = 1; step <= 4; ++step)
      ASSERT_EQ(save_either_way(step % 2 == 0, folder / ("step-" + std::to_string(step)), trained.fsdp,
                                trained.optimizer, step, {.keep_last = 2}),
                "");
    expect_newest(folder.path(), trained, 4);
  });
  std::set<std::string> expected{"step-3", "step-4"};
  for (const auto& path : live) expected.insert(path.filename());
  EXPECT_EQ(names_at_the_end(folder.path(), expected), expected);
  {
    const FolderLock lock(folder / "out");
    expect_contains(error_of<CheckpointError>([&] { FolderLock second(folder / "out"); }),
                    "seems to be in use by " + process_name());
  }
  FolderLock(folder / "out");
  std::ofstream(folder / "out/.tessera.lock") << "process 999999999" << here << "\n";
  FolderLock(folder / "out");
  no_locks = false;
}

// Without a FolderLock and with equal names: the second job may fail, but no checkpoint is ever incomplete.
TEST(HostileSave, TwoJobsWithOneFolderLeaveWholeCheckpoints) {
  const TemporaryFolder folder;
  std::atomic<int> saved = 0, refused = 0;
  auto job = [&](int number) {
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      Trained trained(comm, 40);
      for (int n = 0; n < 20; ++n) {
        const auto told = save_either_way(n % 2 == 1, folder / ("step-" + std::to_string(n % 3)), trained.fsdp,
                                          trained.optimizer, 100 * number + n, {.keep_last = 2});
        ++(told.empty() ? saved : refused);
        if (!told.empty()) {
          expect_contains(told, "rank 0: ");
          expect_contains(told, folder.path().string());
        }
      }
    });
  };
  auto other = std::async(std::launch::async, [&] { job(1); });
  job(2);
  other.get();
  EXPECT_GT(saved, refused);
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    Trained trained(comm, 40);
    save_checkpoint(folder / "last", trained.fsdp, trained.optimizer, {{"step", 7}}, {.keep_last = 3});
    expect_newest(folder.path(), trained, 7);
    save_checkpoint(folder / "last", trained.fsdp, trained.optimizer, {{"step", 8}});  // waits for the removal
  });
  for (const auto& path : checkpoints_in(folder.path()))
    EXPECT_EQ(verify_checkpoint(path), std::vector<std::string>()) << path;
  // The replaced checkpoint is removed in the background.
  for (int waits = 0; waits < 1000 && entries(folder.path()) > 3; ++waits)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_LE(entries(folder.path()), 3);
}

// Another job's cleanup locks a draft briefly to check whether it is abandoned, possibly just when its owner locks it.
TEST(HostileSave, ADraftIsLockedThoughAnotherJobLooksAtItMeanwhile) {
  const TemporaryFolder folder;
  FileLock other;
  std::future<void> looks;
  refuse_file_calls([&](const FileCall& call) {
    const bool is_draft = call.kind == FileCall::kWrite && fs::path(call.path).filename() == kDraftName;
    if (!is_draft || looks.valid()) return 0;
    EXPECT_EQ(other.take_exclusive(call.path), LockOutcome::kTaken);
    looks = std::async(std::launch::async, [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      other.release();
    });
    return 0;
  });
  const auto save = begin_local_checkpoint(folder / "step-1", [] {});
  refuse_file_calls(nullptr);
  ASSERT_TRUE(looks.valid());
  looks.get();
  clear_local_leftovers(folder.path());
  EXPECT_EQ(entries(folder.path()), 1);
}

// Two jobs with keep_last in one folder may remove the same checkpoint; a missing one counts as removed.
TEST(HostileSave, AnOldCheckpointThatAnotherJobRemovesMeanwhileIsNoError) {
  const TemporaryFolder folder;
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    Trained trained(comm, 20);
    for (const auto another_removes : {FileCall::kRename, FileCall::kRemove}) {
      for (const char* name : {"step-1", "step-2", "step-3"})
        ASSERT_EQ(save_either_way(false, folder / name, trained.fsdp, trained.optimizer, 1), "");
      int removed = 0;
      refuse_file_calls([&](const FileCall& call) {
        const fs::path path = call.path;
        if (removed == 0 && call.kind == another_removes && path.string().find("step-1") != std::string::npos)
          removed += fs::remove_all(call.kind == FileCall::kRename ? path : path.parent_path()) > 0;
        return 0;
      });
      EXPECT_NO_THROW(remove_old_checkpoints(folder.path(), 2));
      refuse_file_calls(nullptr);
      EXPECT_EQ(removed, 1);
      EXPECT_EQ(names_at_the_end(folder.path(), {"step-2", "step-3"}), (std::set<std::string>{"step-2", "step-3"}));
    }
  });
}

}  // namespace
}  // namespace tessera::hostile_test
