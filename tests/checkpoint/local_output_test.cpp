// A local file has the written bytes, of any length and on any file system; a full or failing disk gives an error.
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "checkpoint/format/entries.h"
#include "checkpoint/storage/storage.h"
#include "tests/checkpoint/file_calls.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::local_output_test {
using namespace internal;
namespace {

using namespace testing_support;
using testing_support::FileCall;

constexpr int64_t kBuffer = int64_t{8} << 20;

// Generated word by word.
std::string random_bytes(int64_t bytes) {
  std::mt19937_64 random(1);
  std::vector<uint64_t> words(static_cast<size_t>(bytes) / sizeof(uint64_t) + 1);
  std::generate(words.begin(), words.end(), std::ref(random));
  return {reinterpret_cast<const char*>(words.data()), static_cast<size_t>(bytes)};
}

// Writes in parts of this size.
void write_in_parts(const std::filesystem::path& path, const std::string& start, const std::string& rest,
                    size_t part_bytes) {
  const auto file = storage_of(path).create(path, static_cast<int64_t>(start.size()),
                                            static_cast<int64_t>(start.size() + rest.size()));
  for (size_t begin = 0; begin < rest.size(); begin += part_bytes)
    file->append(rest.data() + begin, static_cast<int64_t>(std::min(part_bytes, rest.size() - begin)));
  file->finish(start);
}

TEST(LocalOutput, HasWhatItWasGivenWhateverTheFileSystemCan) {
  const TemporaryFolder folder;
  const std::string bytes = random_bytes(3 * kBuffer + 8192);
  int number = 0;
  for (const int refusal : {0, EOPNOTSUPP}) {
    refuse_file_calls([&](const FileCall& call) { return call.kind == FileCall::kResize ? refusal : 0; });
    for (const int64_t start_bytes : {int64_t{64}, int64_t{9000}, kBuffer + 64})
      for (const int64_t rest_bytes :
           {int64_t{0}, int64_t{1}, kBuffer - 64, kBuffer - 63, kBuffer, 2 * kBuffer + 4097}) {
        const std::string start = bytes.substr(0, static_cast<size_t>(start_bytes)),
                          rest = bytes.substr(static_cast<size_t>(start_bytes), static_cast<size_t>(rest_bytes));
        for (const size_t part_bytes : {size_t{3000007}, size_t{100} << 20}) {
          const auto path = folder / std::to_string(number++);
          write_in_parts(path, start, rest, part_bytes);
          EXPECT_TRUE(file_bytes(path) == start + rest) << refusal << " " << start_bytes << " " << rest_bytes;
          std::filesystem::remove(path);
        }
      }
    refuse_file_calls(nullptr);
  }
}

// Allocates the blocks of a large file first. A small file needs no such call.
TEST(LocalOutput, ClaimsTheDisksBlocksBeforeItWrites) {
  const TemporaryFolder folder;
  auto calls_of = [&](const std::string& name, int64_t bytes) {
    std::vector<FileCall> calls;
    tell_file_calls([&](const FileCall& call) { calls.push_back({call.kind, "", "", "", call.position}); });
    write_in_parts(folder / name, std::string(64, 's'), std::string(static_cast<size_t>(bytes), 'x'), 1 << 20);
    tell_file_calls(nullptr);
    return calls;
  };
  const auto large = calls_of("large", 2 * kBuffer), small = calls_of("small", 1000);
  ASSERT_GT(large.size(), 3U);
  EXPECT_EQ(large[1].kind, FileCall::kResize);
  EXPECT_EQ(large[1].position, 2 * kBuffer + 64);
  EXPECT_EQ(large.back().kind, FileCall::kSync);
  for (const auto& call : small) EXPECT_NE(call.kind, FileCall::kResize);
  struct stat status {};
  ASSERT_EQ(::stat((folder / "large").c_str(), &status), 0);
  EXPECT_GE(status.st_blocks * 512, 2 * kBuffer);
}

TEST(LocalOutput, AFullDiskIsToldOfBeforeAnythingIsWritten) {
  const TemporaryFolder folder;
  for (const int reason : {ENOSPC, EDQUOT, EFBIG, EIO}) {
    bool is_written = false;
    refuse_file_calls([&](const FileCall& call) {
      is_written = is_written || call.kind == FileCall::kWrite;
      return call.kind == FileCall::kResize ? reason : 0;
    });
    const auto path = folder / std::to_string(reason);
    const auto error = error_of<CheckpointError>(
        [&] { write_in_parts(path, std::string(64, 's'), std::string(3 * kBuffer, 'x'), 1 << 20); });
    refuse_file_calls(nullptr);
    expect_contains(error, path.string());
    expect_contains(error, std::strerror(reason));
    EXPECT_FALSE(is_written);
  }
}

// For each write in turn.
TEST(LocalOutput, AWriteThatFailsIsTold) {
  const TemporaryFolder folder;
  const std::string start(64, 's'), rest(3 * kBuffer + 100, 'x');
  for (int failing = 0;; ++failing) {
    const auto path = folder / std::to_string(failing);
    std::atomic<int> writes = 0;
    refuse_file_calls(
        [&](const FileCall& call) { return call.kind == FileCall::kWrite && writes++ == failing ? EIO : 0; });
    const auto error = error_of<CheckpointError>([&] { write_in_parts(path, start, rest, 1 << 20); });
    refuse_file_calls(nullptr);
    if (writes <= failing) {
      EXPECT_EQ(failing, 5) << "three buffers, the rest, the start";
      EXPECT_EQ(error, "");
      break;
    }
    expect_contains(error, path.string());
    expect_contains(error, std::strerror(EIO));
  }
}

}  // namespace
}  // namespace tessera::local_output_test
