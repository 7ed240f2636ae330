// Sources of weights: the archive, files, a callback; under FSDP each rank reads only its shards.
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <memory>

#include <tessera/checkpoint/full_file.h>
#include <tessera/exported.h>
#include "exported/archive/weights.h"
#include "tests/exported/expected.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::exported_test {
using namespace internal;
namespace {

using namespace testing_support;

const auto meta_archive = [] { return data_file("decoder_meta.pt2"); };
const auto meta_weights = [] { return data_file("decoder_meta_weights.safetensors"); };

void expect_same_values(const torch::nn::Module& a, const torch::nn::Module& b) {
  for (const auto& parameter : a.named_parameters())
    EXPECT_TRUE(at::equal(parameter.value(), b.named_parameters()[parameter.key()])) << parameter.key();
}

TEST(Weights, AbsentOnesAreNamed) {
  expect_contains(error_of<ExportedError>([] { load_exported(meta_archive()); }),
                  "there are no values of 29 tensors, such as 'embed.weight'");
}

TEST(Weights, ComeThroughLinksAndIndices) {
  const TemporaryFolder folder;
  // As in a hub's cache: links to blobs.
  folder.write("blobs/one", file_bytes(meta_weights()));
  std::filesystem::create_directory(folder / "snapshot");
  std::filesystem::create_symlink("../blobs/one", folder / "snapshot/model.safetensors");
  const auto expected = load_exported(meta_archive(), {.weights = meta_weights()});
  expect_same_values(*expected, *load_exported(meta_archive(), {.weights = folder / "snapshot/model.safetensors"}));
  expect_same_values(*expected, *load_exported(meta_archive(), {.weights = folder / "snapshot"}));
  std::string map;
  for (const auto& parameter : expected->named_parameters())
    map += std::string(map.empty() ? "" : ",") + "\"" + parameter.key() + "\":\"model.safetensors\"";
  std::ofstream(folder / "snapshot/model.safetensors.index.json") << "{\"metadata\":{},\"weight_map\":{" << map << "}}";
  expect_same_values(*expected,
                     *load_exported(meta_archive(), {.weights = folder / "snapshot/model.safetensors.index.json"}));
}

TEST(Weights, PointersOfGitLfsAreNamed) {
  const TemporaryFolder folder;
  const auto weights = folder.write("model.safetensors", kLfsPointer), archive = folder.write("model.pt2", kLfsPointer);
  expect_contains(error_of<CheckpointError>([&] { load_exported(meta_archive(), {.weights = weights}); }),
                  "model.safetensors: " + kLfsProblem);
  expect_contains(error_of<ExportedError>([&] { load_exported(archive); }), "model.pt2: " + kLfsProblem);
  const auto index = folder.write("model.safetensors.index.json", kLfsPointer);
  for (const auto& given : {index, folder.path()})
    expect_contains(error_of<CheckpointError>([&] { load_exported(meta_archive(), {.weights = given}); }),
                    "model.safetensors.index.json: " + kLfsProblem);
}

// Another process truncates the archive after it was opened.
TEST(Weights, OfAFileThatShrinksAreAnErrorThatNamesIt) {
  const TemporaryFolder folder;
  const auto file = folder.write("model.pt2", file_bytes(data_file("norms.pt2")));
  const auto read = load_exported(file);
  const auto later = deferred([&] { return load_exported(file); });
  std::filesystem::resize_file(file, 1);
  expect_same_values(*load_exported(data_file("norms.pt2")), *read);
  const std::string error = error_of<ExportedError>([&] { materialize(*later); });
  expect_contains(error, file.string());
  expect_contains(error, "ends at byte ");
}

TEST(Weights, NamesThatDoNotFitAreRefused) {
  const auto other = [](const std::string& fqn) { return fqn == "norm.bias" ? std::string("norm.other") : fqn; };
  expect_contains(error_of<ExportedError>([&] {
                    load_exported(meta_archive(), {.weights = meta_weights(), .weight_name = other, .strict = false});
                  }),
                  "there are no values of 1 tensors, such as 'norm.bias'");
  const auto swapped = [](const std::string& fqn) {
    return fqn == "position.weight" ? std::string("embed.weight") : fqn;
  };
  expect_contains(error_of<ExportedError>(
                      [&] { load_exported(meta_archive(), {.weights = meta_weights(), .weight_name = swapped}); }),
                  "'embed.weight' is [23, 12] in the weights, the model has [16, 12]");
  expect_contains(
      error_of<ExportedError>([&] { load_exported(data_file("adapted.pt2"), {.weights = meta_weights()}); }),
      "tensors that the model does not have");
  EXPECT_THROW(load_exported(meta_archive(), {.weights = "nowhere.safetensors"}), CheckpointError);
}

// Other programs save a tied tensor under each of its names.
TEST(Weights, TiedNamesWithOtherValuesAreRefused) {
  const TemporaryFolder folder;
  const auto expected = load_exported(meta_archive(), {.weights = meta_weights()});
  auto tensors = list_full(meta_weights());
  for (const auto& name : {"embed.weight", "head.weight"})
    if (std::ranges::find(tensors, name, &FullTensor::name) == tensors.end())
      tensors.push_back({name, at::kFloat, {23, 12}});
  const auto saved = [&](const std::string& file, const std::function<void(at::Tensor&)>& change_head) {
    write_full(folder / file, tensors,
               [&](const FullTensor& tensor) {
                 at::Tensor values = expected->named_parameters()[tensor.name].detach().clone();
                 if (tensor.name == "head.weight") change_head(values);
                 return values;
               },
               {}, {});
    return folder / file;
  };
  const auto equal = saved("equal.safetensors", [](at::Tensor&) {});
  const auto other = saved("other.safetensors", [](at::Tensor& head) { head[22][11] += 1; });
  expect_same_values(*expected, *load_exported(meta_archive(), {.weights = equal}));
  const std::string error = "'embed.weight' and 'head.weight' are tied in the model, saved with other values";
  expect_contains(error_of<ExportedError>([&] { load_exported(meta_archive(), {.weights = other}); }), error);
  const auto later = deferred([&] { return load_exported(meta_archive(), {.weights = other}); });
  expect_contains(error_of<ExportedError>([&] { materialize(*later); }), error);
}

TEST(Weights, AreConverted) {
  const auto expected = load_exported(meta_archive(), {.weights = meta_weights()});
  const auto half = load_exported(meta_archive(), {.weights = meta_weights(), .parameter_dtype = at::kBFloat16});
  for (const auto& parameter : expected->named_parameters())
    EXPECT_TRUE(at::equal(parameter.value().to(at::kBFloat16), half->named_parameters()[parameter.key()]));
  for (const at::ScalarType dtype : {at::kLong, at::kFloat8_e4m3fn})
    expect_contains(error_of<std::invalid_argument>(
                        [&] { load_exported(meta_archive(), {.weights = meta_weights(), .parameter_dtype = dtype}); }),
                    std::string("ExportedOptions::parameter_dtype is ") + c10::toString(dtype) + ", expected Half");
}

TEST(Weights, AreMadeByACallback) {
  std::vector<std::string> asked;
  const auto init = [&](const std::string& fqn, at::Tensor& tensor) {
    asked.push_back(fqn);
    fqn.ends_with("bias") ? tensor.zero_() : tensor.normal_(0, 0.02);
  };
  const auto plain = seeded(3, [&] { return load_exported(meta_archive(), {.init = init}); });
  EXPECT_EQ(asked.size(), 28u);  // tied ones once
  asked.clear();
  const auto later = seeded(3, [&] { return deferred([&] { return load_exported(meta_archive(), {.init = init}); }); });
  EXPECT_TRUE(is_deferred(later->named_parameters()["embed.weight"]));
  materialize(*later);
  expect_same_values(*plain, *later);
}

TEST(Weights, DeferredOnesAreFilledWithoutAWrapper) {
  for (const bool from_files : {false, true}) {
    const auto archive = from_files ? meta_archive() : data_file("norms.pt2");
    const ExportedOptions options{.weights = from_files ? meta_weights() : std::filesystem::path()};
    const auto expected = load_exported(archive, options);
    const auto later = deferred([&] { return load_exported(archive, options); });
    for (const auto& parameter : later->parameters()) EXPECT_TRUE(is_deferred(parameter));
    EXPECT_EQ(later->weight_bytes_read(), 0);
    materialize(*later);
    expect_same_values(*expected, *later);
    for (const auto& buffer : expected->named_buffers())
      EXPECT_TRUE(at::equal(buffer.value(), later->named_buffers()[buffer.key()])) << buffer.key();
  }
  EXPECT_THROW(deferred([&] {
                 auto model = load_exported(data_file("norms.pt2"));
                 const at::NoGradGuard no_grad;
                 model->parameters()[0].zero_();
                 return model;
               }),
               std::logic_error);
}

// Each rank reads the bytes of its shards; together they read each byte once.
TEST(Weights, RanksReadTheirShardsAndNoMore) {
  for (const bool from_files : {false, true}) {
    for (const int world : {1, 2, 3}) {
      std::atomic<int64_t> total{0};
      int64_t parameter_bytes = 0;
      const auto archive = from_files ? meta_archive() : data_file("decoder.pt2");
      const ExportedOptions options{.weights = from_files ? meta_weights() : std::filesystem::path()};
      const auto expected = load_exported(archive, options);
      for (const auto& parameter : unique_parameters(*expected)) parameter_bytes += parameter.nbytes();
      on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        auto model = deferred([&] { return load_exported(archive, options); });
        FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = wrap_classes({"Block"})});
        const int64_t own = model->weight_bytes_read();
        total += own;
        int64_t shard_bytes = 0;
        for (const NamedShard& shard : fsdp.named_shards()) shard_bytes += shard.tensor.nbytes();
        if (!from_files) {
          EXPECT_EQ(own, shard_bytes);
        }
        expect_same_parameters(fsdp, *expected, "deferred");
        // The model computes.
        model->eval();
        const Expected python(from_files ? "decoder_meta" : "decoder");
        expect_close(fsdp(python.inputs())["loss"].tensor(), python.at("eval.0"), "loss");
      });
      if (!from_files) {
        EXPECT_EQ(total, parameter_bytes);
      }
    }
  }
}

// Reads only the pages that contain the elements: three runs for a part that begins and ends inside rows.
TEST(Weights, OfAFileTheWantedPagesAreRead) {
  constexpr int64_t kRows = 1000, kColumns = 500, kPages = 3 * 2 * 4096;
  const TemporaryFolder folder;
  const at::Tensor values = at::arange(kRows * kColumns, at::kFloat).view({kRows, kColumns});
  write_full(folder / "model.safetensors", {{"weight", at::kFloat, {kRows, kColumns}, {}}},
             [&](const FullTensor&) { return values; });
  const auto bytes_read = std::make_shared<std::atomic<int64_t>>(0);
  WeightFiles files(folder / "model.safetensors", bytes_read);
  const auto source = files.find({"weight"}, {.sizes = {kRows, kColumns}, .strides = {kColumns, 1}});
  ASSERT_TRUE(source);
  for (const Range part : {Range{0, 250'000}, {123'456, 234'567}, {499'999, 500'000}}) {
    const int64_t before = *bytes_read, own = part.numel() * 4;
    const at::Tensor read = at::empty({part.numel()});
    source->read(part, read.mutable_data_ptr());
    EXPECT_TRUE(at::equal(read, values.flatten().slice(0, part.begin, part.end)));
    EXPECT_GE(*bytes_read - before, own);
    EXPECT_LE(*bytes_read - before, own + kPages);
  }
}

// Building a sharded model needs the memory of its shards, and at most part of one unit.
TEST(Weights, ShardedLoadingTakesTheMemoryOfTheShards) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    PeakMemory peak;
    auto model = deferred([&] { return load_exported(meta_archive(), {.weights = meta_weights()}); });
    const int64_t before = peak.current_bytes();
    peak.reset();
    FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = wrap_classes({"Block"})});
    const int64_t shards = fsdp.memory().shard_bytes, unit = fsdp.memory().largest_unit_bytes;
    EXPECT_LE(peak.peak_bytes() - before, shards + unit + 2048);
  });
}

}  // namespace
}  // namespace tessera::exported_test
