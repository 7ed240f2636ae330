// Copies of a save's data in host memory, and the checksums that are computed with them.
#include <random>

#include "checkpoint/format/checksum.h"
#include "checkpoint/format/copy_block.h"
#include "checkpoint/format/rank_files.h"
#include "checkpoint/format/shard_writer.h"
#include "checkpoint/save/save_plan.h"
#include "checkpoint/storage/storage.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::host_copies_test {
using namespace internal;
namespace {

using namespace testing_support;

std::vector<uint64_t> sums_of(const char* data, int64_t bytes, int64_t block_bytes) {
  std::vector<uint64_t> sums;
  for (int64_t begin = 0; begin < bytes; begin += block_bytes)
    sums.push_back(checksum(data + begin, std::min(block_bytes, bytes - begin)));
  return sums;
}

TEST(Checksum, CopiesOfAnySizeAndAlignmentHaveThoseOfTheirBlocks) {
  constexpr int64_t kRoom = 20000;
  std::string source(kRoom, '\0');
  std::mt19937 random(1);
  for (char& byte : source) byte = static_cast<char>(random());
  for (const int64_t bytes : {0, 1, 15, 16, 63, 64, 65, 127, 4095, 4096, 4097, 4160, 12289})
    for (const int64_t block_bytes : {16, 48, 4096, 8208, 1 << 20})
      for (const int64_t from : {0, 1, 17})
        for (const int64_t to : {64, 65, 80, 127}) {
          std::string target(kRoom, 'x');
          const auto copied = copy_with_checksums(target.data() + to, source.data() + from, bytes, block_bytes);
          std::string expected(kRoom, 'x');
          expected.replace(static_cast<size_t>(to), static_cast<size_t>(bytes), source, static_cast<size_t>(from),
                           static_cast<size_t>(bytes));
          const bool is_copy = target == expected;  // the bytes around the copy are unchanged
          EXPECT_TRUE(is_copy) << bytes << " from " << from << " to " << to << " by " << block_bytes;
          EXPECT_EQ(copied.block_bytes, block_bytes);
          EXPECT_EQ(copied.sums, sums_of(source.data() + from, bytes, block_bytes)) << bytes << " by " << block_bytes;
        }
}

// copy_with_checksums() may use the version for AVX2.
TEST(Checksum, ACopyForAnyProcessorHasTheSameChecksum) {
  std::string source(12289, '\0');
  std::mt19937 random(2);
  for (char& byte : source) byte = static_cast<char>(random());
  for (const int64_t bytes : {0, 1, 64, 4097, 12289}) {
    std::string target(source.size(), 'x');
    EXPECT_EQ(copy_block(target.data(), source.data(), bytes), checksum(source.data(), bytes)) << bytes;
    EXPECT_EQ(target.substr(0, static_cast<size_t>(bytes)), source.substr(0, static_cast<size_t>(bytes))) << bytes;
  }
}

Piece piece_of(const std::string& name, const at::Tensor& tensor) {
  return {.name = name,
          .dtype = tensor.scalar_type(),
          .shape = tensor.sizes().vec(),
          .box = whole_box(tensor.sizes().vec()),
          .data = [tensor] { return tensor.resolve_conj().contiguous(); },
          .memory = {0, tensor.numel()},
          .view = [tensor] { return tensor; }};
}

// Pieces with no block, with a part of one, and with several blocks of 32 bytes; some cannot be copied as bytes.
std::vector<Piece> sample() {
  return {piece_of("empty", at::empty({0, 3})),
          piece_of("bytes", at::arange(33, at::kByte)),
          piece_of("scalar", at::ones({})),
          piece_of("blocks", at::rand({5, 7})),
          piece_of("whole", at::rand({16}).to(at::kBFloat16)),
          piece_of("offset", at::rand({11}).narrow(0, 1, 9)),
          piece_of("strided", at::rand({6, 4}).t()),
          piece_of("conjugate", at::rand({6}, at::kComplexFloat).conj())};
}

// Writes the pieces to a file. Returns the file's checksums, by name.
std::map<std::string, std::vector<uint64_t>> written_sums(const std::filesystem::path& directory,
                                                          const std::vector<Piece>& pieces, int64_t block_bytes) {
  std::filesystem::create_directories(directory);
  const SavedTensors saved = write_rank_files(directory, {0, 7, block_bytes, {}}, pieces);
  return read_rank_file(*open_file(directory / rank_file_name(0, 0)), saved, 0).checksums;
}

TEST(HostCopies, HaveTheChecksumsThatTheWriterWouldCompute) {
  const TemporaryFolder folder;
  SavePlan plan{.pieces = sample()};
  const auto expected = written_sums(folder / "live", plan.pieces, 32);
  HostCopies copies;
  copies.begin(plan, at::kCPU, 32);
  copies.end(plan, at::kCPU, [] {});
  for (const Piece& piece : plan.pieces) {
    const bool is_by_bytes = piece.name != "strided" && piece.name != "conjugate";
    EXPECT_EQ(piece.checksums.block_bytes, is_by_bytes ? 32 : 0) << piece.name;
    EXPECT_EQ(piece.checksums.sums, is_by_bytes ? expected.at(piece.name) : std::vector<uint64_t>()) << piece.name;
  }
  EXPECT_EQ(written_sums(folder / "copied", plan.pieces, 32), expected);
  EXPECT_EQ(written_sums(folder / "other", plan.pieces, 64).at("bytes").size(), 1U);
}

// A wrong checksum reaches the file, so the writer has not read the data again. Other blocks need other checksums.
TEST(HostCopies, TheWriterTakesChecksumsOfItsBlocksOnly) {
  const TemporaryFolder folder;
  std::vector<Piece> pieces = sample();
  const auto right = written_sums(folder / "none", pieces, 32);
  for (Piece& piece : pieces) piece.checksums = {32, std::vector<uint64_t>(right.at(piece.name).size(), 5)};
  for (const auto& [name, sums] : written_sums(folder / "same", pieces, 32))
    EXPECT_EQ(sums, std::vector<uint64_t>(right.at(name).size(), 5)) << name;
  for (Piece& piece : pieces) piece.checksums.block_bytes = 16;
  EXPECT_EQ(written_sums(folder / "others", pieces, 32), right);
}

}  // namespace
}  // namespace tessera::host_copies_test
