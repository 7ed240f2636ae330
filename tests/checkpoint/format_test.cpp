// Damaged and hostile files are refused with the file, the tensor and the reason.
#include <ctime>
#include <fstream>
#include <iterator>

#include <tessera/errors.h>
#include "checkpoint/format/checked_json.h"
#include "checkpoint/format/checksum.h"
#include "checkpoint/format/entries.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/rank_files.h"
#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/shard_writer.h"
#include "checkpoint/load/find_checkpoints.h"
#include "checkpoint/load/offline.h"
#include "checkpoint/save/commit.h"
#include "tests/checkpoint/slice_files.h"
#include "tests/support/built.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::format_test {
using namespace internal;
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
      {one("[0,4611686018427387904,4]", "[0,0]"), "does not fit"},  // its strides overflow
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

TEST(CheckedJson, HasALargestDepth) {
  auto nested = [](size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_TRUE(parse_json(nested(kMaxJsonDepth), "f").is_array());
  expect_contains(error_of<CheckpointError>([&] { parse_json(nested(kMaxJsonDepth + 1), "f"); }), "deeper than 64");
}

// Measures CPU time, which other programs do not affect. Four times the tensors must take four times as long, not 16.
TEST(SafetensorsHeader, CostsAreLinearInTheTensors) {
  auto seconds = [](int64_t tensors) {
    double least = 1e9;
    for (int repetition = 0; repetition < 3; ++repetition) {
      std::vector<SafetensorsEntry> entries;
      std::map<std::string, std::string> metadata;
      for (int64_t i = 0; i < tensors; ++i) {
        entries.push_back({"layers." + std::to_string(i) + ".weight", at::kFloat, {2, 3}});
        metadata["layers." + std::to_string(i) + ".tied"] = entries.back().name;
      }
      const auto began = std::clock();
      const std::string header = format_safetensors_header(entries, metadata);
      const auto parsed = parse_safetensors_header(header.substr(8), std::ssize(header) + 24 * tensors, "f");
      least = std::min(least, static_cast<double>(std::clock() - began) / CLOCKS_PER_SEC);
      EXPECT_EQ(std::ssize(parsed.entries), tensors);
      EXPECT_EQ(std::ssize(parsed.metadata), tensors);
    }
    return least;
  };
  EXPECT_LT(seconds(20000), 10 * seconds(5000));
}

TEST(SafetensorsHeader, ALengthThatTheFileDoesNotHaveIsRefused) {
  const TemporaryFolder folder;
  int count = 0;
  for (const std::string& bytes :
       {std::string(), std::string(7, '\0'), std::string("\xff\xff\xff\xff\xff\xff\xff\x7f{}"),
        std::string("\x03\0\0\0\0\0\0\0{}", 10)}) {
    const auto path = folder / std::to_string(count++);
    std::ofstream(path, std::ios::binary) << bytes;
    EXPECT_NE(error_of<CheckpointError>([&] { read_safetensors_header(*open_file(path)); }), "");
  }
  for (const char* bytes : {"PK\3\4 a zip archive", "\x80\2\x8a\nl\xfc a pickle"}) {
    std::ofstream(folder / "pytorch_model.bin", std::ios::binary) << bytes;
    expect_contains(
        error_of<CheckpointError>([&] { read_safetensors_header(*open_file(folder / "pytorch_model.bin")); }),
        "pytorch_model.bin: is a file of torch.save()");
  }
}

// Writes a checkpoint of version 1, which Tessera reads but does not write, with a list of pieces for each file.
void write_version_1(const std::filesystem::path& directory, const std::vector<std::vector<Piece>>& files,
                     const SavedOptimizer& optimizer) {
  constexpr int64_t kBlockBytes = 32;
  json manifest = {{"format", "tessera-checkpoint"},
                   {"version", 1},
                   {"sequence", 1},
                   {"id", to_hex(7)},
                   {"world_size", 1},
                   {"extra", {{"step", 3}}},
                   {"block_bytes", kBlockBytes},
                   {"optimizer", optimizers_to_json({{"", optimizer}})},
                   {"rng", json::array({json::object({{"cpu", bytes_to_hex("\x01\xff")}})})}};
  std::filesystem::create_directory(directory);
  for (size_t k = 0; k < files.size(); ++k) {
    const std::string name = "rank-00000-" + std::to_string(k) + ".safetensors";
    std::vector<SafetensorsEntry> entries;
    const std::string header = write_slices(directory / name, files[k], entries);
    manifest["files"].push_back({{"name", name},
                                 {"bytes", std::filesystem::file_size(directory / name)},
                                 {"header_bytes", header.size()},
                                 {"header_checksum", to_hex(checksum(header))}});
    const std::string bytes = file_bytes(directory / name);
    for (size_t i = 0; i < entries.size(); ++i) {
      const Piece& piece = files[k][i];
      const std::string_view data = std::string_view(bytes).substr(entries[i].begin, entries[i].bytes);
      std::vector<uint64_t> sums;
      for (size_t at = 0; at < data.size(); at += kBlockBytes) sums.push_back(checksum(data.substr(at, kBlockBytes)));
      json& tensor = manifest["tensors"][piece.name];
      tensor["dtype"] = safetensors_name(piece.dtype).value();
      tensor["shape"] = piece.shape;
      tensor["kind"] = "parameter";
      tensor["slices"].push_back({{"file", k},
                                  {"begin", entries[i].begin},
                                  {"offsets", piece.box.offsets},
                                  {"shape", piece.box.sizes},
                                  {"checksums", checksums_to_hex(sums)}});
    }
  }
  manifest["checksum"] = to_hex(checksum(manifest.dump()));
  std::ofstream(directory / kManifestName) << manifest;
}

// Three pieces of two tensors in two files, and a manifest of version 1 or 2.
struct Sample {
  explicit Sample(const std::filesystem::path& target, int version = 1) : directory(target) {
    const at::Tensor a = at::arange(24, at::kFloat).view({4, 6}), b = at::arange(5, at::kLong);
    auto piece = [](const char* name, const at::Tensor& whole, Box box, const at::Tensor& data, Range memory) {
      return Piece{.name = name,
                   .dtype = whole.scalar_type(),
                   .shape = whole.sizes().vec(),
                   .box = std::move(box),
                   .data = [data] { return data; },
                   .memory = memory};
    };
    const Piece rows = piece("a", a, {{0, 0}, {3, 6}}, a.narrow(0, 0, 3), {0, 18}),
                last_row = piece("a", a, {{3, 0}, {1, 6}}, a.narrow(0, 3, 1), {18, 24}),
                vector = piece("b", b, whole_box({5}), b, {0, 5});
    const SavedOptimizer optimizer{"Adam", {{{{"lr", 0.125}, {"amsgrad", false}}, {"a", "b"}}}, {{"a", {{"step", 7}}}}};
    if (version == 1) {
      write_version_1(directory, {{rows, vector}, {last_row}}, optimizer);
      return;
    }
    // Rank 0 has one and a half rows, rank 1 the rest.
    const auto partial = PartialCheckpoint::begin(directory);
    Manifest manifest{.world_size = 2, .extra = {{"step", 3}}};
    manifest.beside["sampler"] = {{"taken", int64_t{5}}, {"scale", 2.0}, {"on", true}, {"seed", std::string("7")}};
    auto half = a.select(0, 1);
    std::vector<Piece> pieces = {piece("a", a, {{0, 0}, {1, 6}}, a.narrow(0, 0, 1), {0, 6}),
                                 piece("a", a, {{1, 0}, {1, 3}}, half.narrow(0, 0, 3).view({1, 3}), {6, 9}), vector};
    const RankFileFields first{0, partial->id(), 32, {{"cpu", "\x01\xff"}}};
    append(manifest.saved, write_rank_files(partial->path(), first, pieces));
    pieces = {piece("a", a, {{1, 3}, {1, 3}}, half.narrow(0, 3, 3).view({1, 3}), {9, 12}),
              piece("a", a, {{2, 0}, {2, 6}}, a.narrow(0, 2, 2), {12, 24})};
    append(manifest.saved, write_rank_files(partial->path(), {1, partial->id(), 32, {{"cpu", "\x02"}}}, pieces));
    join_all(manifest.saved);
    manifest.saved.world_size = 2;
    manifest.saved.has_rng = true;
    manifest.optimizers[""] = optimizer;
    partial->commit(manifest);
  }
  std::filesystem::path directory;
};

void put_bytes(const std::filesystem::path& path, const std::string& bytes) {
  // Overwrites in place: ext4 flushes a truncated file at once, thousands of times here.
  if (!std::filesystem::exists(path)) std::ofstream(path).close();
  std::fstream(path, std::ios::in | std::ios::out | std::ios::binary) << bytes;
  std::filesystem::resize_file(path, bytes.size());
}

// Returns whether verification finds an error.
bool is_refused(const std::filesystem::path& directory) {
  try {
    return !verify_checkpoint(directory).empty();
  } catch (const CheckpointError&) {
    return true;
  }
}

TEST(Format, AManifestOfVersionOneIsRead) {
  const TemporaryFolder folder;
  const Sample sample(folder / "a");
  EXPECT_TRUE(verify_checkpoint(sample.directory).empty());
  const Manifest manifest = read_manifest(sample.directory);
  EXPECT_EQ(manifest.extra["step"], 3);
  EXPECT_EQ(manifest.sequence, 1);
  EXPECT_EQ(manifest.saved.files.size(), 2U);
  EXPECT_EQ(manifest.saved.tensors.at("a").slices.size(), 2U);
  EXPECT_EQ(manifest.rng[0].at("cpu"), "\x01\xff");
  EXPECT_EQ(std::get<double>(manifest.optimizers.at("").groups[0].options[1].second), 0.125);
}

TEST(Format, EveryFlippedBitIsFound) {
  const TemporaryFolder folder;
  for (int version : {1, 2}) {
    const Sample sample(folder / std::to_string(version), version);
    ASSERT_FALSE(is_refused(sample.directory));
    for (const auto& entry : std::filesystem::directory_iterator(sample.directory)) {
      const std::string whole = file_bytes(entry.path());
      // Version 2 has more files, so only every fifth bit is changed. That covers each position in a byte.
      for (size_t bit = 0; bit < 8 * whole.size(); bit += version == 1 ? 1 : 5) {
        std::string damaged = whole;
        damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
        put_bytes(entry.path(), damaged);
        // White space between the fields of the manifest may differ.
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
}

TEST(Format, EveryTruncationIsFound) {
  const TemporaryFolder folder;
  for (int version : {1, 2}) {
    const Sample sample(folder / std::to_string(version), version);
    for (const auto& entry : std::filesystem::directory_iterator(sample.directory)) {
      const std::string whole = file_bytes(entry.path());
      for (size_t bytes = 0; bytes + 1 < whole.size(); ++bytes) {
        put_bytes(entry.path(), whole.substr(0, bytes));
        EXPECT_TRUE(is_refused(sample.directory)) << entry.path() << " of " << bytes;
      }
      put_bytes(entry.path(), whole + "x");
      EXPECT_TRUE(is_refused(sample.directory));
      put_bytes(entry.path(), whole);
    }
  }
}

// Changes the manifest's JSON, corrects its checksum, and returns the error.
std::string changed(const Sample& sample, const std::function<void(json&)>& change) {
  json manifest = json::parse(file_bytes(sample.directory / kManifestName));
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
  expect("version 3", [](json& m) { m["version"] = 3; });
  expect_contains(error_of<CheckpointError>([] { parse_manifest(kLfsPointer, "m"); }), "m: " + kLfsProblem);
  expect("'files' is not known", [](json& m) { m["version"] = 2; });
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
  const json optimizer = {{"kind", "Adam"},
                          {"groups", {{{"options", {{"lr", 0.1}}}, {"parameters", {"a"}}}}},
                          {"numbers", {{"a", {{"step", 2}}}}}};
  EXPECT_EQ(changed(sample, [&](json& m) { m["optimizer"] = optimizer; }), "");
  for (const char* option : {"lr", "eps", "weight_decay", "beta1"})
    expect("is negative", [&](json& m) {
      m["optimizer"] = optimizer;
      m["optimizer"]["groups"][0]["options"][option] = -0.1;
    });
  for (const json& step : {json(-1), json(0.5), json(uint64_t{1} << 63)})
    expect("'step' of 'a' is not a count", [&](json& m) {
      m["optimizer"] = optimizer;
      m["optimizer"]["numbers"]["a"]["step"] = step;
    });
  expect("deeper", [](json& m) {
    json deep = 1;
    for (int i = 0; i < 80; ++i) deep = json::array({deep});
    m["extra"] = deep;
  });
}

TEST(Format, AManifestByRankIsReadAsItWasWritten) {
  const TemporaryFolder folder;
  const Sample sample(folder / "a", 2);
  EXPECT_EQ(verify_checkpoint(sample.directory), std::vector<std::string>());
  const Manifest manifest = read_manifest(sample.directory);
  EXPECT_EQ(peek_sequence(sample.directory), 1);
  EXPECT_EQ(file_bytes(sample.directory / kManifestName), format_manifest(manifest));
  EXPECT_EQ(manifest.saved.tensors.at("a").runs, (std::vector<RankRun>{{0, 0, 1, 0, 9}, {1, 0, 1, 9, 15}}));
  EXPECT_EQ(generators_of(manifest, 0).at("cpu"), "\x01\xff");
  EXPECT_EQ(generators_of(manifest, 1).at("cpu"), "\x02");
  EXPECT_EQ(manifest.beside.at("sampler").at("taken"), StateValue(int64_t{5}));
  EXPECT_EQ(manifest.beside.at("sampler").at("scale"), StateValue(2.0));
  const SavedTensors all = with_every_slice(manifest.saved);
  EXPECT_EQ(all.files.size(), 4U);
  EXPECT_EQ(all.tensors.at("a").slices.size(), 4U);
}

TEST(Format, HostileManifestsByRankAreRefused) {
  const TemporaryFolder folder;
  const Sample sample(folder / "a", 2);
  EXPECT_EQ(changed(sample, [](json&) {}), "");
  auto runs = [&](const char* reason, const char* changed_runs) {
    expect_contains(changed(sample, [&](json& m) { m["tensors"]["a"]["runs"] = json::parse(changed_runs); }), reason);
  };
  runs("not five numbers", "[[0,0,1,0]]");
  runs("not five numbers", "[[0,0,1,0,-9]]");
  runs("not five numbers", "[[0,0,1,0,4611686018427387905]]");
  runs("begins at element 10, expected 9", "[[0,0,1,0,9],[1,0,1,10,14]]");
  runs("ends outside", "[[0,0,1,0,9],[1,0,1,9,16]]");
  runs("ends outside", "[[0,1,2,0,4611686018427387904]]");
  runs("ends outside", "[[0,0,1,0,0],[1,0,1,0,24]]");
  runs("outside the world of 2", "[[2,0,1,0,24]]");
  runs("outside the world of 2", "[[1,1,2,0,12]]");
  runs("outside the world of 2", "[[0,4611686018427387904,2,0,12]]");
  runs("9 of its 24", "[[0,0,1,0,9]]");
  runs("0 of its 24", "[]");
  auto expect = [&](const char* reason, const std::function<void(json&)>& change) {
    expect_contains(changed(sample, change), reason);
  };
  for (const json& order : {json{0}, json{0, 0}, json{1, 2}, json{0, 1, 2}})
    expect("its order", [&](json& m) { m["tensors"]["a"]["order"] = order; });
  expect("'slices' is not known", [](json& m) { m["tensors"]["a"]["slices"] = json::array(); });
  expect("'rng' is neither", [](json& m) { m["rng"] = json::array(); });
  expect("neither a number nor a text", [](json& m) { m["beside"]["sampler"]["taken"] = json::array(); });
  expect("is not an object", [](json& m) { m["beside"]["sampler"] = 1; });
  expect("'beside' is not an object", [](json& m) { m["beside"] = 1; });
}

// Sound files of another checkpoint or rank are refused.
TEST(Format, FilesOfOthersAreRefused) {
  const TemporaryFolder folder;
  const Sample one(folder / "a", 2), other(folder / "b", 2);
  auto error_with = [&](const char* file, const std::filesystem::path& from) {
    const std::string whole = file_bytes(one.directory / file);
    put_bytes(one.directory / file, file_bytes(from));
    const auto problems = verify_checkpoint(one.directory);
    put_bytes(one.directory / file, whole);
    return problems.empty() ? "" : problems[0];
  };
  expect_contains(error_with("rank-00000-0.safetensors", other.directory / "rank-00000-0.safetensors"),
                  "of another checkpoint");
  expect_contains(error_with("rank-00000-0.safetensors", one.directory / "rank-00001-0.safetensors"), "is of rank 1");
  expect_contains(error_with("rank-00001-1.safetensors", one.directory / "rank-00001-0.safetensors"),
                  "is not what the manifest says");
}

// Many ranks become a few runs, in any order of merging.
TEST(Format, RunsOfRanksAreJoined) {
  constexpr int64_t kRanks = 1000, kEach = 7, kNumel = kRanks * kEach - 3;
  std::vector<RankRun> runs;
  for (int64_t rank = kRanks; rank-- > 0;)
    runs.push_back({rank, 0, 1, rank * kEach, std::min(kEach, kNumel - rank * kEach)});
  std::vector<RankRun> groups;  // as subgroups of 10 ranks send it
  for (int64_t group = 0; group < 100; ++group) {
    std::vector<RankRun> own;
    for (const auto& run : runs)
      if (run.rank / 10 == group) own.push_back(run);
    join_runs(own);
    EXPECT_LE(own.size(), 2U);
    groups.insert(groups.end(), own.begin(), own.end());
  }
  join_runs(groups);
  join_runs(runs);
  EXPECT_EQ(runs, (std::vector<RankRun>{{0, 1, 999, 0, 7}, {999, 0, 1, 6993, 4}}));
  EXPECT_EQ(groups, runs);
  const SavedTensor tensor{.shape = {kNumel}, .runs = runs};
  for (Range range : {Range{0, 1}, Range{6, 8}, Range{700, 777}, Range{6990, kNumel}, Range{0, kNumel}}) {
    int64_t next = range.begin / kEach;
    for_each_holder(tensor, range, [&](int64_t rank, Range held) {
      EXPECT_EQ(rank, next++);
      EXPECT_EQ(held.begin, rank * kEach);
      EXPECT_EQ(held.end, std::min((rank + 1) * kEach, kNumel));
    });
    EXPECT_EQ(next, (range.end - 1) / kEach + 1);
  }
}

// Files written by Tessera 0.1.
TEST(Format, VersionOneIsReadAndWrittenAnewAsVersionTwo) {
  const std::filesystem::path data = testing_support::built(TESSERA_CHECKPOINT_DATA);
  const TemporaryFolder folder;
  EXPECT_EQ(verify_checkpoint(data / "format1"), std::vector<std::string>());
  reshard_checkpoint(data / "format1", folder / "two", 2);
  reshard_checkpoint(data / "format1", folder / "three", 3);
  for (const auto& path : {data / "format1", folder / "two", folder / "three"}) {
    EXPECT_EQ(verify_checkpoint(path), std::vector<std::string>()) << path;
    const auto differences = diff_checkpoints(path, data / "format1.safetensors");
    EXPECT_TRUE(differences.empty()) << path << ": " << differences.at(0).name << differences[0].reason;
  }
  const Manifest old = read_manifest(data / "format1"), two = read_manifest(folder / "two");
  EXPECT_FALSE(old.saved.by_rank);
  EXPECT_TRUE(two.saved.by_rank);
  EXPECT_EQ(two.extra["step"], 2);
  EXPECT_EQ(generators_of(old, 1), generators_of(two, 1));
  EXPECT_FALSE(generators_of(two, 1).empty());
  EXPECT_EQ(optimizers_to_json(old.optimizers), optimizers_to_json(two.optimizers));
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
