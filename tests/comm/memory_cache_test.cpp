#include "core/memory/memory_cache.h"

#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include <tessera/launch.h>
#include <tessera/peak_memory.h>
#include "core/launch/process_setup.h"
#include "core/memory/container_limits.h"
#include "core/memory/free_memory.h"
#include "tests/support/temporary_folder.h"

namespace {

using tessera::internal::ProcessEffects;

constexpr size_t kMiB = size_t{1} << 20;

#ifdef __SANITIZE_ADDRESS__
constexpr bool kHasAddressSanitizer = true;
#else
constexpr bool kHasAddressSanitizer = false;
#endif
#ifdef __SANITIZE_THREAD__
constexpr bool kHasThreadSanitizer = true;
#else
constexpr bool kHasThreadSanitizer = false;
#endif

// ---- a cache without libtorch ------------------------------------------------------------------

TEST(MemoryCache, GivesTheBlockThatWasFreedLast) {
  tessera::internal::MemoryCache cache;
  void* const first = cache.take(3 * kMiB);
  void* const second = cache.take(3 * kMiB);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % (2 * kMiB), 0u);
  EXPECT_EQ(cache.stats().live_bytes, static_cast<int64_t>(6 * kMiB));
  EXPECT_TRUE(cache.give(first));
  EXPECT_TRUE(cache.give(second));
  EXPECT_EQ(cache.take(3 * kMiB - 100), second);
  EXPECT_EQ(cache.take(3 * kMiB), first);
  EXPECT_EQ(cache.stats().mapped, 2);
  EXPECT_EQ(cache.stats().reused, 2);
  EXPECT_TRUE(cache.give(first));
  EXPECT_TRUE(cache.give(second));
}

TEST(MemoryCache, TakesNoBlockThatIsMoreThanAnEighthTooLarge) {
  tessera::internal::MemoryCache cache;
  cache.give(cache.take(9 * kMiB));
  cache.give(cache.take(8 * kMiB - 4096));  // the system may choose the same address again
  EXPECT_EQ(cache.stats().reused, 0);
  EXPECT_EQ(cache.stats().mapped + cache.stats().remade, 2);
}

TEST(MemoryCache, UnmapsWhatWasIdleLongestBeforeItGrowsPastItsBound) {
  tessera::internal::MemoryCache cache;
  void* const a = cache.take(8 * kMiB);
  void* const b = cache.take(4 * kMiB);
  void* const c = cache.take(2 * kMiB);
  cache.give(a);
  cache.give(b);
  cache.give(c);
  void* const d = cache.take(5 * kMiB);  // 19 MiB in all, 15.75 allowed
  EXPECT_EQ(cache.stats().idle_bytes, static_cast<int64_t>(6 * kMiB));
  EXPECT_EQ(cache.take(4 * kMiB), b);
  EXPECT_EQ(cache.take(2 * kMiB), c);
  for (void* block : {b, c, d}) cache.give(block);
  cache.release();
  EXPECT_EQ(cache.stats().idle_bytes, 0);
  EXPECT_EQ(cache.stats().peak_live_bytes, 0);
}

// An idle block that is due is resized to the requested block and keeps its pages, as a mark in each page shows.
TEST(MemoryCache, CutsOrGrowsWhatItWouldUnmap) {
  tessera::internal::MemoryCache cache;
  const auto take_marked = [&](size_t bytes) {
    auto* const block = static_cast<std::byte*>(cache.take(bytes));
    std::memset(block, 7, bytes);
    return block;
  };
  std::byte* const large = take_marked(8 * kMiB);
  cache.give(large);
  auto* const cut = static_cast<std::byte*>(cache.take(3 * kMiB));
  EXPECT_EQ(cut, large);
  EXPECT_EQ(cut[0], std::byte{7});
  EXPECT_EQ(cut[3 * kMiB - 1], std::byte{7});
  EXPECT_EQ(cache.stats().live_bytes + cache.stats().idle_bytes, static_cast<int64_t>(3 * kMiB));
  cache.give(cut);

  auto* const grown = static_cast<std::byte*>(cache.take(9 * kMiB));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(grown) % (2 * kMiB), 0u);
  EXPECT_EQ(grown[3 * kMiB - 1], std::byte{7});
  EXPECT_EQ(grown[9 * kMiB - 1], std::byte{0});  // a new page
  std::memset(grown, 1, 9 * kMiB);
  cache.give(grown);
  EXPECT_EQ(cache.stats().mapped, 1);
  EXPECT_EQ(cache.stats().remade, 2);

  // A block below a huge page grows at any page. One above it must start at a huge page, and keeps its contents.
  cache.release();
  cache.give(take_marked(kMiB));
  cache.give(cache.take(kMiB * 3 / 2));
  auto* const aligned = static_cast<std::byte*>(cache.take(4 * kMiB));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(aligned) % (2 * kMiB), 0u);
  EXPECT_EQ(aligned[kMiB - 1], std::byte{7});
  EXPECT_EQ(cache.stats().remade, 4);
  EXPECT_EQ(cache.stats().live_bytes, static_cast<int64_t>(4 * kMiB));
  EXPECT_EQ(cache.stats().idle_bytes, 0);
  cache.give(aligned);
}

bool is_mapped(void* page) {
  unsigned char residency = 0;
  return ::mincore(page, 1, &residency) == 0;
}

// In huge pages, which other ranks read much faster; each block is unmapped separately.
TEST(MemoryCache, BlocksBelowAHugePageLieSideBySide) {
  constexpr size_t kBytes = kMiB / 4;
  tessera::internal::MemoryCache cache;
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 8; ++i) {
    blocks.push_back(static_cast<std::byte*>(cache.take(kBytes)));
    std::memset(blocks[i], i, kBytes);
    EXPECT_EQ(blocks[i], blocks[0] + i * kBytes);
  }
  EXPECT_EQ(reinterpret_cast<uintptr_t>(blocks[0]) % (2 * kMiB), 0u);
  cache.give(blocks[3]);
  cache.release();
  EXPECT_FALSE(is_mapped(blocks[3]));
  for (const int i : {2, 4}) {
    EXPECT_EQ(blocks[i][0], std::byte(i));
    EXPECT_EQ(blocks[i][kBytes - 1], std::byte(i));
  }
  blocks.erase(blocks.begin() + 3);
  std::byte* const behind = blocks.back() + kBytes;
  EXPECT_TRUE(is_mapped(behind));
  for (std::byte* block : blocks) cache.give(block);
  cache.release();
  EXPECT_FALSE(is_mapped(blocks[0]));
  EXPECT_FALSE(is_mapped(behind));  // the address of the next block
}

TEST(MemoryCache, KnowsWhatIsNotItsOwn) {
  tessera::internal::MemoryCache cache;
  int local = 0;
  EXPECT_FALSE(cache.give(&local));
  void* const block = cache.take(1);
  EXPECT_TRUE(cache.give(block));
  EXPECT_FALSE(cache.give(block));  // twice
}

TEST(MemoryCache, HasNothingWhereTheSystemHasNothing) {
  tessera::internal::MemoryCache cache;
  void* const block = cache.take(kMiB);
  EXPECT_EQ(cache.take(size_t{1} << 60), nullptr);
  EXPECT_EQ(cache.take(SIZE_MAX), nullptr);
  EXPECT_EQ(cache.stats().live_bytes, static_cast<int64_t>(kMiB));
  EXPECT_EQ(cache.stats().peak_live_bytes, static_cast<int64_t>(kMiB));  // otherwise nothing would be unmapped any more
  cache.give(block);
}

TEST(MemoryCache, StaysBelowItsBoundAndKeepsBlocksApart) {
  for (int seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    tessera::internal::MemoryCache cache;
    std::map<void*, std::pair<size_t, unsigned char>> live;
    size_t live_bytes = 0, most_bytes = 0;
    const auto give_one = [&] {
      auto one = std::next(live.begin(), static_cast<long>(random() % live.size()));
      auto* const bytes = static_cast<unsigned char*>(one->first);
      const auto [count, mark] = one->second;
      ASSERT_TRUE(bytes[0] == mark && bytes[count / 2] == mark && bytes[count - 1] == mark);
      ASSERT_TRUE(cache.give(bytes));
      live_bytes -= count;
      live.erase(one);
    };
    for (int i = 0; i < 400; ++i) {
      if (live.size() > 10 || (!live.empty() && random() % 2 == 0)) {
        give_one();
      } else {
        const size_t count = 1 + random() % (random() % 4 == 0 ? 6 * kMiB : 40000);
        auto* const bytes = static_cast<unsigned char*>(cache.take(count));
        ASSERT_NE(bytes, nullptr);
        const auto mark = static_cast<unsigned char>(random());
        bytes[0] = bytes[count / 2] = bytes[count - 1] = mark;
        ASSERT_TRUE(live.emplace(bytes, std::make_pair(count, mark)).second);
        live_bytes += count;
      }
      const auto stats = cache.stats();
      most_bytes = std::max(most_bytes, static_cast<size_t>(stats.live_bytes));
      ASSERT_GE(static_cast<size_t>(stats.live_bytes), live_bytes);
      ASSERT_LE(static_cast<size_t>(stats.live_bytes), live_bytes + live_bytes / 8 + live.size() * 8192);
      ASSERT_LE(static_cast<size_t>(stats.live_bytes + stats.idle_bytes), most_bytes + most_bytes / 8);
    }
    while (!live.empty()) give_one();
  }
}

TEST(MemoryCache, StopsAtItsNumberOfBlocks) {
  tessera::internal::MemoryCache cache;
  std::vector<void*> blocks;
  for (size_t i = 0; i < tessera::internal::MemoryCache::kMostBlocks; ++i) blocks.push_back(cache.take(1));
  EXPECT_EQ(std::count(blocks.begin(), blocks.end(), nullptr), 0);
  EXPECT_EQ(cache.take(1), nullptr);
  for (void* block : blocks) cache.give(block);
  void* const other = cache.take(kMiB);  // replaces idle ones
  EXPECT_NE(other, nullptr);
  cache.give(other);
}

TEST(MemoryCache, ServesThreadsThatFreeEachOthersBlocks) {
  tessera::internal::MemoryCache cache;
  std::mutex mutex;
  std::vector<int*> passed_on;
  const auto work = [&](int rank) {
    std::mt19937 random(rank);
    for (int i = 0; i < 500; ++i) {
      auto* block = static_cast<int*>(cache.take(4096 * (1 + random() % 5)));
      *block = rank;
      {
        std::lock_guard lock(mutex);
        passed_on.push_back(block);
        std::swap(passed_on.front(), passed_on.back());
        block = passed_on.back();
        passed_on.pop_back();
      }
      *block += 1;
      EXPECT_TRUE(cache.give(block));
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank) threads.emplace_back(work, rank);
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(cache.stats().live_bytes, 0);
  EXPECT_EQ(cache.stats().mapped + cache.stats().remade + cache.stats().reused, 2000);
}

// ---- limits of control groups, under which the system reclaims idle blocks ----------------------

TEST(ContainerLimits, TheSmallestOnTheWayUpCounts) {
  const tessera::testing_support::TemporaryFolder folder;
  const tessera::internal::ControlGroups groups{"0::/job/step\n", folder.path()};
  EXPECT_EQ(tessera::internal::cpu_quota(groups), std::nullopt);
  folder.write("job/step/cpu.max", "max 100000\n");
  folder.write("job/step/memory.max", "max\n");
  EXPECT_EQ(tessera::internal::cpu_quota(groups), std::nullopt);
  EXPECT_TRUE(tessera::internal::memory_limits(groups).empty());
  folder.write("job/cpu.max", "250000 100000\n");
  folder.write("cpu.max", "400000 100000\n");
  folder.write("job/memory.max", "1000\n");
  folder.write("job/memory.current", "900\n");
  folder.write("job/memory.stat", "anon 500\ninactive_file 300\nactive_file 100\n");
  EXPECT_EQ(tessera::internal::cpu_quota(groups), 2.5);
  const auto limits = tessera::internal::memory_limits(groups);
  ASSERT_EQ(limits.size(), 1);
  EXPECT_EQ(limits[0].limit_bytes, 1000);
  EXPECT_EQ(limits[0].needed_bytes(), 600);
}

// The outer group's limit is larger, but other groups in it have used most of its memory.
TEST(ContainerLimits, OfAnOuterGroupMayLeaveLess) {
  const tessera::testing_support::TemporaryFolder folder;
  folder.write("job/memory.max", "1000\n");
  folder.write("job/memory.current", "300\n");
  folder.write("memory.max", "5000\n");
  folder.write("memory.current", "4900\n");
  EXPECT_EQ(tessera::internal::free_memory_bytes(at::kCPU, {"0::/job\n", folder.path()}), 100);
}

// As in Docker: the group's name is the host's, and its folder is mounted at the top.
TEST(ContainerLimits, OfVersion1InAContainer) {
  const tessera::testing_support::TemporaryFolder folder;
  const tessera::internal::ControlGroups groups{
      "5:memory:/docker/c0ffee\n4:cpu,cpuacct:/docker/c0ffee\n3:cpuset:/docker/c0ffee\n0::/\n", folder.path()};
  folder.write("cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  folder.write("cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  folder.write("memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(tessera::internal::cpu_quota(groups), std::nullopt);
  EXPECT_TRUE(tessera::internal::memory_limits(groups).empty());
  folder.write("cpu,cpuacct/cpu.cfs_quota_us", "150000\n");
  folder.write("memory/memory.limit_in_bytes", "4096\n");
  folder.write("memory/memory.usage_in_bytes", "1024\n");
  folder.write("memory/memory.stat", "inactive_file 1\ntotal_inactive_file 24\n");
  EXPECT_EQ(tessera::internal::cpu_quota(groups), 1.5);
  ASSERT_EQ(tessera::internal::memory_limits(groups).size(), 1);
  EXPECT_EQ(tessera::internal::memory_limits(groups)[0].needed_bytes(), 1000);
}

// The bytes of this process that the system may reclaim; -1 if unknown.
int64_t lazily_freed_kib() {
  std::ifstream maps("/proc/self/smaps_rollup");
  for (std::string line; std::getline(maps, line);)
    if (line.starts_with("LazyFree:")) return std::stoll(line.substr(9));
  return -1;
}

TEST(MemoryCache, LetsTheSystemTakeWhatIsIdleOnceHalfOfTheLimitIsNeeded) {
  const tessera::testing_support::TemporaryFolder folder;
  const auto usage = folder.write("memory.current", "400");
  tessera::internal::MemoryCache cache({tessera::internal::MemoryLimit{1000, usage, folder / "memory.stat"}});
  const auto use = [&] {
    void* const block = cache.take(34 * kMiB);
    std::memset(block, 1, 34 * kMiB);
    return block;
  };
  void* const first = use();
  void* const second = use();
  cache.give(first);
  const int64_t before = lazily_freed_kib();
  if (before < 0) GTEST_SKIP() << "no LazyFree in /proc/self/smaps_rollup";
  EXPECT_LT(before, 1024);
  folder.write("memory.current", "501");
  cache.give(second);  // also marks the block that is idle already
  EXPECT_GT(lazily_freed_kib(), 67 * 1024);
  folder.write("memory.current", "400");
  void* const again = use();  // a block in use must not be reclaimed
  EXPECT_LT(lazily_freed_kib(), 35 * 1024);
  cache.give(again);
  EXPECT_EQ(cache.stats().reused, 1);
}

// The parent's thread, which checks the limit, does not exist in the child.
TEST(MemoryCache, LooksInAForkedChildToo) {
  if (kHasAddressSanitizer || kHasThreadSanitizer) GTEST_SKIP() << "a sanitizer takes memory of its own";
  const tessera::testing_support::TemporaryFolder folder;
  const auto usage = folder.write("memory.current", "400");
  tessera::internal::MemoryCache cache({tessera::internal::MemoryLimit{1000, usage, folder / "memory.stat"}});
  const auto use = [&] { cache.give(std::memset(cache.take(34 * kMiB), 1, 34 * kMiB)); };
  use();
  cache.before_fork();
  const pid_t child = ::fork();
  cache.after_fork(child == 0);
  if (child == 0) {
    use();
    if (lazily_freed_kib() < 0) ::_exit(77);
    folder.write("memory.current", "501");  // no block is allocated or freed from here on
    for (int i = 0; i < 1000; ++i) {
      if (lazily_freed_kib() > 33 * 1024) ::_exit(0);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    ::_exit(1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "no LazyFree in /proc/self/smaps_rollup";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

// Signals are for the program, whose threads may all have blocked them to wait for them.
TEST(MemoryCache, ItsThreadTakesNoSignals) {
  const auto threads_that_take = [](int signal) {
    int count = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::ifstream status(task.path() / "status");
      for (std::string line; std::getline(status, line);)
        if (line.starts_with("SigBlk:")) count += (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1) == 0;
    }
    return count;
  };
  const tessera::testing_support::TemporaryFolder folder;
  const int before = threads_that_take(SIGUSR1);
  tessera::internal::MemoryCache cache(
      {tessera::internal::MemoryLimit{1000, folder.write("memory.current", "400"), folder / "memory.stat"}});
  cache.give(cache.take(34 * kMiB));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // glibc's threads start with all signals blocked
  EXPECT_EQ(threads_that_take(SIGUSR1), before);
}

// Runs in a control group of its own, with this limit; a no-op if that is not possible.
class LimitedGroup {
 public:
  explicit LimitedGroup(const std::string& limit) {
    for (const auto& [root, file] :
         {std::pair{"/sys/fs/cgroup/memory", "memory.limit_in_bytes"}, std::pair{"/sys/fs/cgroup", "memory.max"}}) {
      folder_ = std::filesystem::path(root) / ("tessera-test-" + std::to_string(::getpid()));
      std::error_code error;
      if (!std::filesystem::is_directory(root) || !std::filesystem::create_directory(folder_, error)) continue;
      if (std::filesystem::exists(folder_ / file) && (std::ofstream(folder_ / file) << limit).flush()) return;
      ::rmdir(folder_.c_str());
    }
    folder_.clear();
  }
  ~LimitedGroup() {
    if (!folder_.empty()) ::rmdir(folder_.c_str());
  }
  bool join() const { return !folder_.empty() && (std::ofstream(folder_ / "cgroup.procs") << ::getpid()).flush(); }

 private:
  std::filesystem::path folder_;
};

// Runs in a process with a limit of 250 MiB: fills and frees blocks of 10 MiB, which stay idle, and calls `take_other`.
// The process must not be killed.
void expect_lives_under_a_limit(int idle_blocks, const std::function<void()>& take_other) {
  const LimitedGroup group(std::to_string(250 * kMiB));
  const pid_t child = ::fork();
  if (child == 0) {
    if (!group.join()) ::_exit(77);
    tessera::internal::MemoryCache cache(
        tessera::internal::memory_limits(tessera::internal::ControlGroups::of_this_process()));
    std::vector<void*> blocks;
    for (int i = 0; i < idle_blocks; ++i) blocks.push_back(std::memset(cache.take(10 * kMiB), 1, 10 * kMiB));
    for (void* block : blocks) cache.give(block);
    take_other();
    ::_exit(cache.stats().idle_bytes == idle_blocks * static_cast<int64_t>(10 * kMiB) ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "no control group can be made here (needs root)";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

TEST(MemoryCache, IsNoReasonToBeKilledUnderALimit) {
  if (kHasAddressSanitizer || kHasThreadSanitizer) GTEST_SKIP() << "a sanitizer takes memory of its own";
  expect_lives_under_a_limit(15, [] {
    static std::vector<std::vector<char>> other;
    for (int i = 0; i < 15; ++i) other.emplace_back(10 * kMiB, 1);
  });
}

// The idle blocks are less than half of the limit, so they are not marked, and no tensor is allocated or freed.
TEST(MemoryCache, IsNoReasonToBeKilledByMemoryThatIsNoTensors) {
  if (kHasAddressSanitizer || kHasThreadSanitizer) GTEST_SKIP() << "a sanitizer takes memory of its own";
  expect_lives_under_a_limit(9, [] {
    static std::vector<std::vector<char>> other;
    for (int i = 0; i < 21; ++i) {
      other.emplace_back(10 * kMiB, 1);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));  // as a program that reads it from a file
    }
  });
}

// ---- the cache of the process, in this order, because PeakMemory's allocator stays --------------

TEST(CachedTensors, AreNotMadeWhereTheUserSaysNo) {
  auto* const before = c10::GetCPUAllocator();
  const auto expect_no_cache = [&](const auto&) {
    EXPECT_EQ(c10::GetCPUAllocator(), before);
    const auto tensor = torch::empty({1 << 20});
    EXPECT_EQ(tessera::memory_cache_stats().live_bytes, 0);
  };
  tessera::run_ranks(1, expect_no_cache, {.process = {.cache_memory = false}});
  ::setenv("TESSERA_MEMORY_CACHE", "0", 1);
  tessera::run_ranks(1, expect_no_cache);
  ::unsetenv("TESSERA_MEMORY_CACHE");
}

struct OwnAllocator : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return c10::GetDefaultCPUAllocator()->allocate(bytes); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

TEST(CachedTensors, LeaveTheProgramItsOwnAllocator) {
  static OwnAllocator own;
  c10::SetCPUAllocator(&own);
  tessera::run_ranks(1, [](const auto&) { EXPECT_EQ(c10::GetCPUAllocator(), &own); });
  EXPECT_EQ(c10::GetCPUAllocator(), &own);
  c10::SetCPUAllocator(c10::GetDefaultCPUAllocator());
}

TEST(CachedTensors, UseMemoryAgain) {
  if (kHasAddressSanitizer) GTEST_SKIP() << "AddressSanitizer sees each tensor";
  const auto older = torch::full({1 << 20}, 3.0);
  const ProcessEffects caches{tessera::ProcessSetup{}};
  EXPECT_EQ(c10::GetCPUAllocator(), tessera::internal::memory_cache_allocator());

  auto tensor = torch::ones({1 << 20});
  const void* const memory = tensor.const_data_ptr();
  EXPECT_EQ(tessera::memory_cache_stats().live_bytes, 4 << 20);
  tensor.resize_({1 << 21});  // libtorch allocates, copies and frees
  EXPECT_EQ(tensor.slice(0, 0, 1 << 20).sum().item<double>(), 1 << 20);
  EXPECT_EQ(tessera::memory_cache_stats().live_bytes, 8 << 20);
  const auto next = std::async(std::launch::async, [] { return torch::zeros({1 << 20}); }).get();
  EXPECT_EQ(next.const_data_ptr(), memory);
  EXPECT_EQ(next.abs().max().item<float>(), 0);
  EXPECT_EQ(older.sum().item<double>(), 3 << 20);

  const int64_t live_bytes = tessera::memory_cache_stats().live_bytes;
  const auto small = torch::empty({1 << 10});
  EXPECT_EQ(tessera::memory_cache_stats().live_bytes, live_bytes);
  tessera::release_freed_memory();
  EXPECT_EQ(tessera::memory_cache_stats().idle_bytes, 0);
}

TEST(CachedTensors, OutliveTheCache) {
  if (kHasAddressSanitizer) GTEST_SKIP() << "AddressSanitizer sees each tensor";
  auto* const before = c10::GetCPUAllocator();
  std::vector<at::Tensor> tensors;
  {
    const ProcessEffects outer{tessera::ProcessSetup{}};
    tessera::run_ranks(1, [&](const auto&) {
      for (const int64_t numel : {1 << 17, 1 << 20}) tensors.push_back(torch::full({numel}, 3.0));
    });
    EXPECT_NE(c10::GetCPUAllocator(), before) << "another holder is left";
  }
  EXPECT_EQ(c10::GetCPUAllocator(), before);
  EXPECT_EQ(tessera::memory_cache_stats().idle_bytes, 0);
  EXPECT_GE(tessera::memory_cache_stats().live_bytes, 4 << 20);
  for (at::Tensor& tensor : tensors) {
    const int64_t numel = tensor.numel(), live_bytes = tessera::memory_cache_stats().live_bytes;
    EXPECT_TRUE(tensor.eq(3.0).all().item<bool>());
    tensor.resize_({2 * numel});  // into memory of libtorch's own allocator
    EXPECT_TRUE(tensor.slice(0, 0, numel).eq(3.0).all().item<bool>());
    EXPECT_EQ(tessera::memory_cache_stats().live_bytes, live_bytes - 4 * numel);
  }
  EXPECT_EQ(tessera::memory_cache_stats().idle_bytes, 0);
}

// Another rank may be in the middle of a step.
TEST(CachedTensors, OfOneRankStayWhenAnotherReleasesItsOwn) {
  if (kHasAddressSanitizer) GTEST_SKIP() << "AddressSanitizer sees each tensor";
  tessera::run_ranks(2, [](const auto& comm) {
    const int64_t numel = (3 + comm->rank()) << 18;  // neither block has the other's size
    at::Tensor tensor = torch::empty({numel});
    const void* const memory = tensor.const_data_ptr();
    comm->barrier();
    tensor.reset();
    comm->barrier();
    if (comm->rank() == 0) tessera::release_freed_memory();
    comm->barrier();
    const int64_t reused = tessera::memory_cache_stats().reused;
    comm->barrier();
    if (comm->rank() == 1) {
      EXPECT_EQ(torch::empty({numel}).const_data_ptr(), memory);
      EXPECT_EQ(tessera::memory_cache_stats().reused, reused + 1);
    }
  });
  tessera::release_freed_memory();
  EXPECT_EQ(tessera::memory_cache_stats().idle_bytes, 0);
}

TEST(CachedTensors, HaveTheRawInterfaceToo) {
  const ProcessEffects caches{tessera::ProcessSetup{}};
  auto* const allocator = tessera::internal::memory_cache_allocator();
  const int64_t live_bytes = tessera::memory_cache_stats().live_bytes;
  for (size_t bytes : {size_t{64}, kMiB, size_t{0}}) {
    void* const memory = allocator->raw_allocate(bytes);
    if (memory != nullptr) {
      std::memset(memory, 1, bytes);
      allocator->raw_deallocate(memory);
    }
    EXPECT_EQ(tessera::memory_cache_stats().live_bytes, live_bytes);
  }
}

// Must precede the tests that make a PeakMemory. Fails only with ThreadSanitizer.
TEST(CachedTensors, AreMadeWhileAnotherThreadMakesTheFirstPeakMemory) {
  std::atomic<int> made = 0;
  std::atomic<bool> ends = false;
  std::thread other([&] {
    for (; !ends; ++made) torch::empty({1});
  });
  const tessera::PeakMemory first;
  for (const int before = made; made < before + 2;) std::this_thread::yield();
  ends = true;
  other.join();
}

TEST(CachedTensors, AreMadeInAForkedChildToo) {
  if (kHasAddressSanitizer) GTEST_SKIP() << "AddressSanitizer's locks may be held by other threads at the fork";
  const ProcessEffects caches{tessera::ProcessSetup{}};
  tessera::PeakMemory counts;
  std::atomic<bool> ends = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&] {
      tessera::PeakMemory memory;
      while (!ends) torch::empty({1 << 17});
    });
  int well = 0;
  for (int i = 0; i < 30; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      // Filling uses OpenMP, whose threads do not exist in the child.
      at::globalContext().setDeterministicFillUninitializedMemory(false);
      for (int n = 0; n < 3; ++n) torch::empty({1 << 17});
      ::_exit(counts.peak_bytes() > 0 ? 0 : 1);
    }
    int status = -1;
    for (int tries = 0; tries < 2000 && ::waitpid(child, &status, WNOHANG) == 0; ++tries)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (status == -1) {
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
      break;  // the child hangs, and so would others
    }
    well += WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  ends = true;
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(well, 30);
}

TEST(CachedTensors, FailAsLibtorchsOwnDo) {
  if (kHasAddressSanitizer || kHasThreadSanitizer) GTEST_SKIP() << "a sanitizer's malloc ends the program instead";
  const ProcessEffects caches{tessera::ProcessSetup{}};
  try {
    torch::empty({int64_t{1} << 58});
    FAIL() << "made a tensor of 2^60 bytes";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("can't allocate memory"), std::string::npos) << error.what();
  }
  EXPECT_EQ(torch::ones({1 << 20}).sum().item<double>(), 1 << 20);
}

TEST(CachedTensors, AreCountedByPeakMemory) {
  if (kHasAddressSanitizer) GTEST_SKIP() << "AddressSanitizer sees each tensor";
  c10::SetCPUAllocator(c10::GetDefaultCPUAllocator());  // as if PeakMemory were made before init()
  tessera::PeakMemory memory;
  const int64_t live_bytes = tessera::memory_cache_stats().live_bytes;
  const ProcessEffects caches{tessera::ProcessSetup{}};
  const auto tensor = torch::empty({1 << 20});
  EXPECT_EQ(memory.current_bytes(), 4 << 20);
  EXPECT_EQ(tessera::memory_cache_stats().live_bytes, live_bytes + (4 << 20));
}

TEST(CachedTensors, CountsWhatKernelsAllocateWithoutATensor) {
  tessera::PeakMemory memory;
  const int64_t before = memory.current_bytes();
  c10::Allocator* allocator = c10::GetCPUAllocator();
  void* raw = allocator->raw_allocate(1000);  // as oneDNN's convolutions do
  EXPECT_EQ(memory.current_bytes(), before + 1000);
  std::thread([&] { allocator->raw_deallocate(raw); }).join();
  EXPECT_EQ(memory.current_bytes(), before);
  std::thread([&] { raw = allocator->raw_allocate(1000); }).join();  // an uncounted thread
  allocator->raw_deallocate(raw);
  EXPECT_EQ(memory.current_bytes(), before);
}

}  // namespace
