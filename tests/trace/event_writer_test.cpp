// Reads TensorBoard's files byte by byte; tests/interop/tensorboard_test.py reads them with TensorBoard.
#include <tessera/event_writer.h>

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/temporary_folder.h"

static std::atomic<bool> can_truncate = true;

// Replaces the system's function in this program.
extern "C" int ftruncate(int file, off_t bytes) noexcept {
  if (can_truncate) return static_cast<int>(::syscall(SYS_ftruncate, file, bytes));
  errno = EIO;
  return -1;
}

namespace tessera::event_writer_test {
namespace {

using testing_support::file_bytes;
using testing_support::TemporaryFolder;

template <class Value>
Value take(std::string_view& bytes) {
  Value value{};
  if (bytes.size() < sizeof value) throw std::runtime_error("the file ends within a record");
  std::memcpy(&value, bytes.data(), sizeof value);
  bytes.remove_prefix(sizeof value);
  return value;
}

// Bit by bit, as defined.
uint32_t masked_crc32c(std::string_view bytes) {
  uint32_t crc = ~0U;
  for (const char byte : bytes) {
    crc ^= static_cast<uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0x82f63b78U : 0);
  }
  crc = ~crc;
  return (crc >> 15 | crc << 17) + 0xa282ead8U;
}

std::vector<std::string> records_in(std::string_view file) {
  std::vector<std::string> records;
  while (!file.empty()) {
    const auto head = file.substr(0, 8);
    const auto length = take<uint64_t>(file);
    EXPECT_EQ(take<uint32_t>(file), masked_crc32c(head));
    records.emplace_back(file.substr(0, length));
    file.remove_prefix(std::min<size_t>(length, file.size()));
    EXPECT_EQ(take<uint32_t>(file), masked_crc32c(records.back()));
  }
  return records;
}

// The message of a scalar up to its tag, as protoc's encoder writes it.
struct Point {
  int64_t step;
  std::string tag;
  float value;
};
uint64_t take_varint(std::string_view& bytes) {
  uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = take<uint8_t>(bytes);
    value |= uint64_t{byte & 0x7fU} << shift;
    if (byte < 0x80) return value;
  }
}
Point point_of(std::string_view event) {
  Point point;
  const auto expect_rest = [&] {
    const auto rest_bytes = take_varint(event);
    EXPECT_EQ(rest_bytes, event.size());
  };
  EXPECT_EQ(take<uint8_t>(event), 0x09);  // 1, 64 bits
  EXPECT_GT(take<double>(event), 1.7e9);
  EXPECT_EQ(take<uint8_t>(event), 0x10);  // 2, a varint
  point.step = static_cast<int64_t>(take_varint(event));
  EXPECT_EQ(take<uint8_t>(event), 0x2a);  // 5, the summary
  expect_rest();
  EXPECT_EQ(take<uint8_t>(event), 0x0a);  // 1, its value
  expect_rest();
  EXPECT_EQ(take<uint8_t>(event), 0x0a);  // 1, the tag
  const auto tag_bytes = take_varint(event);
  point.tag = event.substr(0, tag_bytes);
  event.remove_prefix(tag_bytes);
  EXPECT_EQ(take<uint8_t>(event), 0x15);  // 2, 32 bits
  point.value = take<float>(event);
  EXPECT_TRUE(event.empty());
  return point;
}

TEST(EventWriter, WritesRecordsWithChecksums) {
  // the example of RFC 3720
  EXPECT_EQ(masked_crc32c("123456789"), (0xe3069283U >> 15 | 0xe3069283U << 17) + 0xa282ead8U);
  const TemporaryFolder folder;
  const auto runs = folder / "new/runs";
  std::filesystem::path path;
  {
    EventWriter events(runs), others(runs);
    path = events.path();
    EXPECT_NE(path, others.path());
    EXPECT_EQ(path.filename().string().find("events.out.tfevents."), 0u);
    events.scalar("train/loss", 1.5, 1);
    events.scalar("train/lr", NAN, 300);
    EXPECT_TRUE(events.flush());
    EXPECT_EQ(records_in(file_bytes(path)).size(), 3u);
    events.scalar(std::string(200, 'x'), -0.1, int64_t{1} << 40);
  }
  const auto records = records_in(file_bytes(path));
  ASSERT_EQ(records.size(), 4u);
  EXPECT_NE(records[0].find("brain.Event:2"), std::string::npos);
  const auto first = point_of(records[1]), second = point_of(records[2]), third = point_of(records[3]);
  EXPECT_EQ(first.tag, "train/loss");
  EXPECT_EQ(first.step, 1);
  EXPECT_EQ(first.value, 1.5F);
  EXPECT_EQ(second.step, 300);
  EXPECT_TRUE(std::isnan(second.value));
  EXPECT_EQ(third.tag, std::string(200, 'x'));
  EXPECT_EQ(third.step, int64_t{1} << 40);
  EXPECT_EQ(third.value, -0.1F);
}

TEST(EventWriter, AChildOfForkWritesNoPointOfItsParent) {
  const TemporaryFolder folder;
  auto events = std::make_unique<EventWriter>(folder.path());
  const auto path = events->path();
  events->scalar("loss", 1, 1);
  const pid_t child = ::fork();
  if (child == 0) {
    events.reset();
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  events.reset();
  EXPECT_EQ(records_in(file_bytes(path)).size(), 2u);
}

// A file that may not grow simulates a full disk: the training continues, and the curves continue later. Exceptions of
// on_failure, of any type, are ignored.
TEST(EventWriter, AFullDiskIsToldOnceAndLeavesWholeRecords) {
  const TemporaryFolder folder;
  std::vector<std::string> problems;
  EventWriter events(folder.path(), {.on_failure = [&](const std::string& problem) {
                       problems.push_back(problem);
                       throw 7;
                     }});
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit full = before;
  full.rlim_cur = std::filesystem::file_size(events.path()) + 10;  // within a record
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &full), 0);
  events.scalar("loss", 1, 1);
  const bool first = events.flush();
  const auto left = file_bytes(events.path());
  events.scalar("loss", 2, 2);
  const bool second = events.flush();
  const std::string tag(EventWriter::kMaxKeptBytes / 2, 'x');
  for (int i = 0; i < 3; ++i) events.scalar(tag, 0, 0);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_FALSE(first || second);
  EXPECT_EQ(records_in(left).size(), 1u);
  EXPECT_EQ(events.dropped(), 2);
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_NE(problems[0].find(events.path().string()), std::string::npos) << problems[0];
  EXPECT_TRUE(events.flush());
  const auto records = records_in(file_bytes(events.path()));
  ASSERT_EQ(records.size(), 4u);
  EXPECT_EQ(point_of(records[2]).step, 2);
}

// The disk is full within a record, and the file system does not truncate the file until later.
TEST(EventWriter, AnIncompleteRecordIsRemovedBeforeTheNextOne) {
  const TemporaryFolder folder;
  std::string problem;
  EventWriter events(folder.path(), {.on_failure = [&](const std::string& text) { problem = text; }});
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit full = before;
  full.rlim_cur = std::filesystem::file_size(events.path()) + 10;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &full), 0);
  can_truncate = false;
  events.scalar("loss", 1, 1);
  const bool first = events.flush();
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  const bool second = events.flush();
  can_truncate = true;
  EXPECT_FALSE(first || second);
  EXPECT_NE(problem.find("it ends in a part of a record"), std::string::npos) << problem;
  EXPECT_TRUE(events.flush());
  const auto records = records_in(file_bytes(events.path()));
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(point_of(records[1]).step, 1);
}

TEST(EventWriter, TheLongestIntervalWritesOnlyInFlush) {
  const TemporaryFolder folder;
  EventWriter events(folder.path(), {.flush_every = std::chrono::milliseconds::max()});
  events.scalar("loss", 1.0, 1);
  EXPECT_EQ(records_in(file_bytes(events.path())).size(), 1u);
  EXPECT_TRUE(events.flush());
  EXPECT_EQ(records_in(file_bytes(events.path())).size(), 2u);
}

TEST(EventWriter, AFolderThatCannotBeIsNamed) {
  const TemporaryFolder folder;
  const auto file = folder.write("file", "");
  try {
    EventWriter events(file);
    ADD_FAILURE() << "was made";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find(file.string()), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tessera::event_writer_test
