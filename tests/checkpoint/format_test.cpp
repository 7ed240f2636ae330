// Damaged and hostile files are refused, with the file, the tensor and the reason.
#include <fstream>
#include <iterator>

#include "tessera/checkpoint/checked_json.h"
#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/commit.h"
#include "tessera/checkpoint/entries.h"
#include "tessera/checkpoint/errors.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/safetensors_header.h"
#include "tessera/checkpoint/shard_writer.h"
#include "tessera/checkpoint/verify.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::format_test {
namespace {

using namespace testing_support;
using nlohmann::json;

std::string header_error(const std::string& text, int64_t data_bytes) {
  return error_of<CheckpointError>(
      [&] { parse_safetensors_header(text, 8 + static_cast<int64_t>(text.size()) + data_bytes, "f.safetensors"); });
}

TEST(SafetensorsHeader, HostileOnesAreRefused) {
  auto one = [](const std::string& shape, const std::string& offsets, const std::string& dtype = "F32") {
    return R"({"w":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  EXPECT_EQ(header_error(one("[2,3]", "[0,24]"), 24), "");
  EXPECT_EQ(header_error(one("[]", "[0,4]"), 4), "");
  EXPECT_EQ(header_error(one("[0,3]", "[0,0]"), 0), "");
  EXPECT_EQ(header_error("{}", 0), "");
  const std::pair<std::string, const char*> wrong[] = {
      {one("[2,3]", "[0,20]"), "does not fit"},
      {one("[2,3]", "[8,32]"), "after a hole"},
      {one("[2,3]", "[24,0]"), "not a range"},
      {one("[2,3]", "[0]"), "not a range"},
      {one("[-2,-3]", "[0,24]"), "'shape'"},
      {one("[2.5]", "[0,24]"), "'shape'"},
      {one("[1e3]", "[0,24]"), "'shape'"},
      {one("[4294967296,4294967296]", "[0,0]"), "does not fit"},
      {one("[9223372036854775807,0]", "[0,24]"), "'shape'"},
      {one("[18446744073709551615]", "[0,24]"), "'shape'"},
      {one("[2,3]", "[0,24]", "F99"), "F99"},
      {one("[2,3]", "[0,24]") + "x", "not JSON"},
      {"[1]", "not an object"},
      {"", "not JSON"},
      {R"({"w":{"dtype":"F32","shape":[6]}})", "'data_offsets' is missing"},
      {R"({"w":{"dtype":"F32","shape":[6],"data_offsets":[0,24],"more":1}})", "'more' is not known"},
      {R"({"w":1})", "expected an object"},
      {R"({"":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}})", "name is empty"},
      {"{\"a\\nb\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24]}}", "control characters"},
      {R"({"__metadata__":{"a":1},"w":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}})", "not a text"},
      {R"({"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"w":{"dtype":"F32","shape":[3],"data_offsets":[12,24]}})",
       "twice"},
      {R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[3],"data_offsets":[12,24]}})",
       "inside another's"},
      {R"({"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]},"b":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}})",
       "inside another's"},
  };
  for (const auto& [text, reason] : wrong) {
    expect_contains(header_error(text, 24), reason);
    expect_contains(header_error(text, 24), "f.safetensors");
  }
  expect_contains(header_error(one("[2,3]", "[0,24]"), 23), "truncated");
  expect_contains(header_error(one("[2,3]", "[0,24]"), 25), "describes");
  for (const char* open : {"[", "{\"a\":"}) {
    std::string deep;
    for (int i = 0; i < 100000; ++i) deep += open;
    expect_contains(header_error(deep, 0), "deeper than");
  }
}

TEST(SafetensorsHeader, ALengthThatTheFileDoesNotHaveIsRefused) {
  const TemporaryFolder folder;
  int count = 0;
  for (const std::string& bytes :
       {std::string(), std::string(7, '\0'), std::string("\xff\xff\xff\xff\xff\xff\xff\x7f{}"),
        std::string("\x03\0\0\0\0\0\0\0{}", 10)}) {
    const auto path = folder / std::to_string(count++);
    std::ofstream(path, std::ios::binary) << bytes;
    EXPECT_NE(error_of<CheckpointError>([&] { read_safetensors_header(open_file(path)); }), "");
  }
}

// Three pieces of two tensors in two files, and a manifest.
struct Sample {
  explicit Sample(const std::filesystem::path& target) : directory(target) {
    const at::Tensor a = at::arange(24, at::kFloat).view({4, 6}), b = at::arange(5, at::kLong);
    auto piece = [](const char* name, const at::Tensor& whole, Box box, const at::Tensor& data) {
      return Piece{name,           whole.scalar_type(),    whole.sizes().vec(), {}, TensorKind::kParameter,
                   std::move(box), [data] { return data; }};
    };
    PartialCheckpoint partial(directory);
    Manifest manifest{.world_size = 1, .extra = {{"step", 3}}};
    manifest.saved = write_pieces(partial.path(), "rank-00000",
                                  {piece("a", a, {{0, 0}, {3, 6}}, a.narrow(0, 0, 3)), piece("b", b, whole_box({5}), b),
                                   piece("a", a, {{3, 0}, {1, 6}}, a.narrow(0, 3, 1))},
                                  32);
    manifest.optimizer =
        SavedOptimizer{"Adam", {{{{"lr", 0.125}, {"amsgrad", false}}, {"a", "b"}}}, {{"a", {{"step", 7}}}}};
    manifest.rng.push_back({{"cpu", "\x01\xff"}});
    partial.commit(manifest);
  }
  std::filesystem::path directory;
};

std::string bytes_of_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void put_bytes(const std::filesystem::path& path, const std::string& bytes) {
  // In place: ext4 writes a file out at once that is cut to nothing first, thousands of times here.
  if (!std::filesystem::exists(path)) std::ofstream(path).close();
  std::fstream(path, std::ios::in | std::ios::out | std::ios::binary) << bytes;
  std::filesystem::resize_file(path, bytes.size());
}

// Whether anything is found wrong.
bool is_refused(const std::filesystem::path& directory) {
  try {
    return !verify_checkpoint(directory).empty();
  } catch (const CheckpointError&) {
    return true;
  }
}

TEST(Format, AManifestIsReadAsItWasWritten) {
  const TemporaryFolder folder;
  const Sample sample(folder / "a");
  EXPECT_TRUE(verify_checkpoint(sample.directory).empty());
  const Manifest manifest = read_manifest(sample.directory);
  EXPECT_EQ(manifest.extra["step"], 3);
  EXPECT_EQ(manifest.sequence, 1);
  EXPECT_EQ(peek_sequence(sample.directory), 1);
  EXPECT_EQ(manifest.saved.files.size(), 2U);
  EXPECT_EQ(manifest.saved.tensors.at("a").slices.size(), 2U);
  EXPECT_EQ(manifest.rng[0].at("cpu"), "\x01\xff");
  EXPECT_EQ(std::get<double>(manifest.optimizer->groups[0].options[1].second), 0.125);
  EXPECT_EQ(bytes_of_file(sample.directory / kManifestName), format_manifest(manifest));
}

TEST(Format, EveryFlippedBitIsFound) {
  const TemporaryFolder folder;
  const Sample sample(folder / "a");
  for (const auto& entry : std::filesystem::directory_iterator(sample.directory)) {
    const std::string whole = bytes_of_file(entry.path());
    for (size_t bit = 0; bit < 8 * whole.size(); ++bit) {
      std::string damaged = whole;
      damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
      put_bytes(entry.path(), damaged);
      // White space between the fields of the manifest may differ: JSON does not care.
      const bool harmless = entry.path().extension() == ".json" && [&] {
        try {
          return json::parse(damaged) == json::parse(whole);
        } catch (const json::exception&) {
          return false;
        }
      }();
      EXPECT_NE(is_refused(sample.directory), harmless) << entry.path() << " bit " << bit;
    }
    put_bytes(entry.path(), whole);
  }
  EXPECT_FALSE(is_refused(sample.directory));
}

TEST(Format, EveryTruncationIsFound) {
  const TemporaryFolder folder;
  const Sample sample(folder / "a");
  for (const auto& entry : std::filesystem::directory_iterator(sample.directory)) {
    const std::string whole = bytes_of_file(entry.path());
    for (size_t bytes = 0; bytes + 1 < whole.size(); ++bytes) {
      put_bytes(entry.path(), whole.substr(0, bytes));
      EXPECT_TRUE(is_refused(sample.directory)) << entry.path() << " of " << bytes;
    }
    put_bytes(entry.path(), whole + "x");
    EXPECT_TRUE(is_refused(sample.directory));
    put_bytes(entry.path(), whole);
  }
}

// Changes the manifest's JSON, with a checksum that is right, and returns the error.
std::string changed(const Sample& sample, const std::function<void(json&)>& change) {
  json manifest = json::parse(bytes_of_file(sample.directory / kManifestName));
  change(manifest);
  manifest.erase("checksum");
  manifest["checksum"] = to_hex(checksum(manifest.dump()));
  return error_of<CheckpointError>([&] { parse_manifest(manifest.dump(), "m"); });
}

TEST(Format, HostileManifestsAreRefused) {
  const TemporaryFolder folder;
  const Sample sample(folder / "a");
  EXPECT_EQ(changed(sample, [](json&) {}), "");
  auto expect = [&](const char* reason, const std::function<void(json&)>& change) {
    expect_contains(changed(sample, change), reason);
  };
  auto slice = [](json& m, int i = 0) -> json& { return m["tensors"]["a"]["slices"][i]; };
  for (const char* name : {"../b.safetensors", "/etc/passwd", "a/b", "..", ".hidden", "", "a\n", "a b"})
    expect("is not allowed", [&](json& m) { m["files"][0]["name"] = name; });
  expect("listed twice", [](json& m) { m["files"][0]["name"] = m["files"][1]["name"]; });
  expect("version 2", [](json& m) { m["version"] = 2; });
  expect("not tessera-checkpoint", [](json& m) { m["format"] = "other"; });
  expect("'tensors' is missing", [](json& m) { m.erase("tensors"); });
  expect("'more' is not known", [](json& m) { m["more"] = 1; });
  expect("overlap", [&](json& m) { slice(m, 1)["offsets"] = {2, 0}; });
  expect("18 of its 24", [](json& m) { m["tensors"]["a"]["slices"].erase(1); });
  expect("0 of its 24", [](json& m) { m["tensors"]["a"]["slices"] = json::array(); });
  expect("outside the shape", [&](json& m) { slice(m)["shape"] = {30, 6}; });
  expect("outside the shape", [&](json& m) { slice(m)["offsets"] = {int64_t{1} << 62, 0}; });
  expect("number of dimensions", [&](json& m) { slice(m)["offsets"] = {0}; });
  expect("ends outside", [&](json& m) { slice(m)["begin"] = int64_t{1} << 60; });
  expect("ends outside", [&](json& m) { slice(m)["begin"] = 0; });
  expect("file number 9", [&](json& m) { slice(m)["file"] = 9; });
  expect("not a number of things", [&](json& m) { slice(m)["file"] = -1; });
  expect("checksums", [&](json& m) { slice(m)["checksums"] = ""; });
  expect("hex", [&](json& m) { slice(m)["checksums"] = "0123"; });
  expect("shares bytes", [&](json& m) {
    slice(m)["begin"] = m["tensors"]["b"]["slices"][0]["begin"];
    m["files"][0]["bytes"] = 100000;
  });
  expect("too large", [](json& m) { m["tensors"]["a"]["shape"] = {int64_t{1} << 40, int64_t{1} << 40}; });
  expect("block_bytes", [](json& m) { m["block_bytes"] = 0; });
  expect("block_bytes", [](json& m) { m["block_bytes"] = int64_t{1} << 61; });
  expect("another tensor's name", [](json& m) { m["tensors"]["a"]["aliases"] = {"b"}; });
  expect("world_size", [](json& m) { m["world_size"] = 0; });
  expect("deeper", [](json& m) {
    json deep = 1;
    for (int i = 0; i < 80; ++i) deep = json::array({deep});
    m["extra"] = deep;
  });
}

TEST(Format, LinksAndFilesTooManyAreReported) {
  const TemporaryFolder folder;
  const Sample sample(folder / "a");
  const auto file = sample.directory / "rank-00000-0.safetensors";
  std::filesystem::rename(file, folder / "elsewhere");
  std::filesystem::create_symlink(folder / "elsewhere", file);
  expect_contains(verify_checkpoint(sample.directory).at(0), "symbolic link");
  std::filesystem::remove(file);
  std::filesystem::create_directory(file);
  expect_contains(verify_checkpoint(sample.directory).at(0), "not a regular file");
  std::filesystem::remove(file);
  expect_contains(verify_checkpoint(sample.directory).at(0), "No such file");
  std::filesystem::rename(folder / "elsewhere", file);
  put_bytes(sample.directory / "other.safetensors", "");
  expect_contains(verify_checkpoint(sample.directory).at(0), "not in the manifest");
}

}  // namespace
}  // namespace tessera::format_test
