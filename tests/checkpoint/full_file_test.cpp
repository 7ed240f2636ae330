// Saves and loads whole models as safetensors files, from and to any layout.
#include <tessera/checkpoint/full_file.h>

#include <sys/resource.h>
#include <sys/stat.h>

#include <fstream>
#include <type_traits>

#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/shard_writer.h"
#include "checkpoint/format/slice_reader.h"
#include "checkpoint/full_file/find_full_tensors.h"
#include "tests/checkpoint/replicated.h"
#include "tests/checkpoint/slice_files.h"
#include "tests/support/random_net.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::full_file_test {
using namespace internal;
namespace {

using namespace testing_support;

void expect_equal_modules(const torch::nn::Module& a, const torch::nn::Module& b, const std::string& where) {
  const auto other = b.named_parameters();
  for (const auto& item : a.named_parameters())
    EXPECT_TRUE(torch::equal(item.value(), other[item.key()])) << where << item.key();
  const auto other_buffers = b.named_buffers();
  for (const auto& item : a.named_buffers())
    EXPECT_TRUE(torch::equal(item.value(), other_buffers[item.key()])) << where << item.key();
}

TEST(FullFile, HoldsTheModelHoweverManyRanksAndFiles) {
  for (unsigned tree = 0; tree < fewer_on_devices(6U, 2U); ++tree) {
    const TemporaryFolder folder;
    const int64_t max_file_bytes = tree % 2 == 0 ? 0 : 700;
    on_ranks(1 + static_cast<int>(tree) % 4, [&](std::shared_ptr<Communicator> comm) {
      FullyShardedDataParallel fsdp(seeded(tree, [&] { return RandomNet(tree); }), comm,
                                    {.auto_wrap = wrap_by_size(60)});
      save_full(folder / "model.safetensors", fsdp, {.max_file_bytes = max_file_bytes});
    });
    const auto original = seeded(tree, [&] { return RandomNet(tree); });
    const bool index = std::filesystem::exists(folder / "model.safetensors.index.json");
    const auto path = folder / (index ? "model.safetensors.index.json" : "model.safetensors");
    for (const auto& from : {path, folder.path(), folder / "model.safetensors"}) {
      auto loaded = seeded(tree, [&] { return RandomNet(tree); });
      on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
        auto net = seeded(tree, [&] { return RandomNet(tree); });
        {
          const at::NoGradGuard no_grad;
          for (auto& parameter : unique_parameters(*net)) parameter.zero_();
        }
        FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_by_size(60)});
        load_full(from, fsdp);
        expect_same_parameters(fsdp, *original, from.string());
      });
      on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
        Replicated model(loaded.ptr(), comm);
        load_full(from, model);
        loaded->to(at::kCPU);
      });
      expect_equal_modules(*original, *loaded, from.string());
    }
  }
}

TEST(FullFile, OptionsThatDifferAmongTheRanksAreRefused) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
    save_full(folder / "m.safetensors", model);
    expect_contains(error_of<std::invalid_argument>(
                        [&] { load_full(folder / "m.safetensors", model, {.strict = comm->rank() == 0}); }),
                    "strict");
  });
}

TEST(FullFile, FilesAreAsLargeAsAskedAndNothingIsLeftOver) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential net(torch::nn::Linear(10, 10), torch::nn::Linear(10, 10), torch::nn::Linear(10, 10));
    Replicated model(net.ptr(), comm);
    save_full(folder / "m.safetensors", model, {.max_file_bytes = 900});
  });
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) names.insert(entry.path().filename());
  EXPECT_EQ(names, (std::set<std::string>{"m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors",
                                          "m.safetensors.index.json"}));
}

TEST(FullFile, SeveralFilesOfAnyNameLoadByThatName) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    for (const char* name : {"weights", "weights.bin", "weights.safetensors"}) {
      auto net = seeded(1, [] { return torch::nn::Linear(9, 9); });
      Replicated model(net.ptr(), comm);
      save_full(folder / name, model, {.max_file_bytes = 1});
      auto other = seeded(2, [] { return torch::nn::Linear(9, 9); });
      Replicated loaded(other.ptr(), comm);
      load_full(folder / name, loaded);
      expect_equal_modules(*net, *other, name);
    }
  });
}

TEST(FullFile, NamesOfOtherFilesAreRefused) {
  const TemporaryFolder folder;
  const auto manifest = folder / "tessera.json";
  std::ofstream(manifest) << "a manifest";
  std::filesystem::create_directories(folder / "d");
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    torch::nn::Linear net(3, 3);
    Replicated model(net.ptr(), comm);
    for (const int64_t max_file_bytes : {0, 1}) {
      const SaveFullOptions options{.max_file_bytes = max_file_bytes};
      expect_contains(error_of<std::invalid_argument>([&] { save_full(manifest, model, options); }),
                      "'tessera.json' is that of a checkpoint's manifest");
      expect_contains(
          error_of<std::invalid_argument>([&] { save_full(folder / "m.safetensors.index.json", model, options); }),
          "is that of an index");
      expect_contains(error_of<CheckpointError>([&] { save_full(folder / "d", model, options); }),
                      "d: is a directory; a file's name is expected");
    }
  });
  EXPECT_EQ(std::filesystem::file_size(manifest), 10U);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 2);
}

// Saves as fewer files, more, and one: each replaces the whole model.
TEST(FullFile, NothingOfAnOlderModelStaysAndNoFileOfItIsOverwritten) {
  const TemporaryFolder folder;
  auto names = [&] {
    std::set<std::string> all;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) all.insert(entry.path().filename());
    return all;
  };
  std::ofstream(folder / "m-notes.txt") << "mine";
  std::set<std::string> before;
  size_t round = 0;
  for (const auto& [max_file_bytes, files] :
       std::vector<std::pair<int64_t, size_t>>{{500, 4}, {500, 4}, {900, 3}, {0, 1}, {900, 3}}) {
    on_ranks(2, [&, bytes = max_file_bytes](std::shared_ptr<Communicator> comm) {
      torch::nn::Sequential net(torch::nn::Linear(10, 10), torch::nn::Linear(10, 10), torch::nn::Linear(10, 10));
      const at::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.fill_(static_cast<double>(round));
      Replicated model(net.ptr(), comm);
      save_full(folder / "m.safetensors", model, {.max_file_bytes = bytes});
    });
    EXPECT_EQ(names().size(), files + 1) << "round " << round;
    const SavedTensors found = find_full_tensors(folder.path());
    EXPECT_EQ(found.tensors.size(), 6u);
    SliceReader reader(found);
    for (const auto& [name, tensor] : found.tensors)
      EXPECT_TRUE(reader.read(name, whole_box(tensor.shape)).eq(static_cast<double>(round)).all().item<bool>());
    for (const auto& name : names())
      EXPECT_FALSE(before.contains(name) && name.find("-of-") != std::string::npos) << name;
    before = names();
    ++round;
  }
}

TEST(FullFile, ManyFilesNeedFewDescriptors) {
  const TemporaryFolder folder;
  const auto open_now = std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential net;
    for (int i = 0; i < 60; ++i) net->push_back(torch::nn::Linear(2, 2));
    FullyShardedDataParallel fsdp(on_rank_device(net), comm);
    comm->barrier();
    rlimit few = before;
    few.rlim_cur = static_cast<rlim_t>(open_now) + 60;
    if (comm->rank() == 0) ::setrlimit(RLIMIT_NOFILE, &few);
    comm->barrier();
    save_full(folder / "m.safetensors", fsdp, {.max_file_bytes = 1});
  });
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(find_full_tensors(folder.path()).files.size(), 120U);
}

// For example /dev/null.
TEST(FullFile, WhatIsNoRegularFileIsNotReplaced) {
  const TemporaryFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    torch::nn::Linear net(3, 3);
    Replicated model(net.ptr(), comm);
    expect_contains(error_of<CheckpointError>([&] { save_full(folder / "pipe", model); }),
                    "pipe: exists and is no regular file");
    expect_contains(error_of<std::invalid_argument>([&] { save_full("", model); }), "is not a name for a file");
    save_full(folder / "m.safetensors", model);  // the group still works
  });
  EXPECT_TRUE(std::filesystem::is_fifo(folder / "pipe"));
}

TEST(FullFile, ErrorsReachAllRanksAndTheOldFileStays) {
  const TemporaryFolder folder;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    torch::nn::Linear net(3, 3), other(4, 3);
    Replicated model(net.ptr(), comm), wrong(other.ptr(), comm);
    save_full(folder / "m.safetensors", model);
    std::filesystem::create_directories(folder / "d");
    expect_contains(error_of<CheckpointError>([&] { save_full(folder / "d", model); }), "is a directory");
    expect_contains(error_of<CheckpointError>([&] { load_full(folder / "m.safetensors", wrong); }),
                    "weight is [3, 3], the model has [3, 4]");
    expect_contains(error_of<CheckpointError>([&] { load_full(folder / "d", model); }), "no safetensors file");
    expect_contains(error_of<CheckpointError>([&] { load_full(folder / "none", model); }), "No such file");
    load_full(folder / "m.safetensors", model);
    for (const char* name : {"../m.safetensors", R"(m\u0000.safetensors)"}) {
      comm->barrier();
      if (comm->rank() == 0)
        std::ofstream(folder / "i.safetensors.index.json") << R"({"weight_map":{"weight":")" << name << "\"}}";
      comm->barrier();
      expect_contains(error_of<CheckpointError>([&] { load_full(folder / "i.safetensors.index.json", model); }),
                      "not a name beside");
    }
  });
}

// torch.distributed.checkpoint writes slices of a tensor to several files.
TEST(FullFile, SlicesInSeveralFilesAreOneTensor) {
  const TemporaryFolder folder;
  const at::Tensor whole = torch::arange(15, at::kFloat).view({5, 3});
  for (int part = 0; part < 2; ++part) {
    const Box box = part == 0 ? Box{{0, 0}, {3, 3}} : Box{{3, 0}, {2, 3}};
    std::vector<SafetensorsEntry> entries;
    write_slices(
        folder / ("shard-" + std::to_string(part) + ".safetensors"),
        {{"weight",
          at::kFloat,
          {5, 3},
          {},
          TensorKind::kParameter,
          box,
          [=] { return whole.narrow(0, box.offsets[0], box.sizes[0]); }},
         {"bias", at::kFloat, {5}, {}, TensorKind::kParameter, whole_box({5}), [] { return torch::ones({5}); }}},
        entries);
  }
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(on_rank_device(torch::nn::Linear(3, 5)), comm);
    load_full(folder.path(), fsdp);
    EXPECT_TRUE(torch::equal(fsdp.full_state_dict()["weight"].cpu(), whole));
    comm->barrier();
  });
  std::filesystem::remove(folder / "shard-0.safetensors");
  const auto error = error_of<CheckpointError>([&] { find_full_tensors(folder.path()); });
  expect_contains(error, "tensor 'weight': its slices have 6 of its 15 elements");
}

// Another program's model: other names, transposed weights, another dtype, its own head.
TEST(FullFile, NamesAreMappedWeightsTransposedAndDtypesConverted) {
  const TemporaryFolder folder;
  const at::Tensor weight = torch::arange(15, at::kFloat).view({3, 5}), bias = torch::arange(5, at::kFloat);
  write_full(
      folder / "m.safetensors",
      {{"h.0.w", at::kBFloat16, {3, 5}, {}}, {"h.0.b", at::kHalf, {5}, {}}, {"mask", at::kBool, {2}, {}}},
      [&](const FullTensor& tensor) {
        return (tensor.name == "h.0.w" ? weight : tensor.name == "h.0.b" ? bias : torch::ones({2})).to(tensor.dtype);
      });
  for (int world : {1, 3})
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      FullyShardedDataParallel fsdp(on_rank_device(torch::nn::Linear(3, 5)), comm);
      LoadOptions options{
          .rename = [](const std::string& name) { return name == "mask"    ? ""
                                                         : name == "h.0.w" ? "weight"
                                                                           : "bias"; },
          .transposed = [](const std::string& name) { return name == "h.0.w"; }};
      expect_contains(error_of<CheckpointMismatch>([&] { load_full(folder / "m.safetensors", fsdp, options); }),
                      "LoadOptions::convert_dtypes");
      options.convert_dtypes = true;
      load_full(folder / "m.safetensors", fsdp, options);
      auto state = fsdp.full_state_dict();
      EXPECT_TRUE(torch::equal(state["weight"].cpu(), weight.t()));
      EXPECT_TRUE(torch::equal(state["bias"].cpu(), bias));
      options.transposed = nullptr;
      expect_contains(error_of<CheckpointMismatch>([&] { load_full(folder / "m.safetensors", fsdp, options); }),
                      "weight is [3, 5], the model has [5, 3]");
      options.rename = [](const std::string&) { return "weight"; };
      expect_contains(error_of<CheckpointMismatch>([&] { load_full(folder / "m.safetensors", fsdp, options); }),
                      "become weight");
    });
}

// Weights in 8 bits, and their scales in powers of two (DeepSeek's F8_E8M0).
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    for (const char* name : {"tokens", "head"}) register_parameter(name, shared);
    register_parameter("bias", torch::arange(7, at::kFloat));
    register_buffer("mask", torch::ones({2}));
  }
  at::Tensor shared = torch::arange(35, at::kFloat).view({7, 5});
};
TORCH_MODULE(Tied);

TEST(FullFile, IsSavedUnderOtherNamesAndTransposed) {
  const TemporaryFolder folder;
  const auto file = folder / "m.safetensors";
  const auto rename = [](const std::string& own) { return own == "mask" || own == "tokens" ? "" : "net." + own; };
  for (const int64_t max_file_bytes : {0, 1})
    on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
      FullyShardedDataParallel fsdp(on_rank_device(Tied()), comm);
      const auto refused = [&](const SaveFullOptions& options, const std::string& expected) {
        expect_contains(error_of<std::invalid_argument>([&] { save_full(file, fsdp, options); }), expected);
      };
      refused({.rename = [](const std::string&) { return "same"; }}, "are both 'same' in the file");
      refused({.transposed = [](const std::string& own) { return own == "bias"; }}, "'bias' has 1 dimensions");
      refused({.rename = [&](const std::string& own) { return own + (comm->rank() == 2 ? "2" : ""); }},
              "rank 0 has ''bias' as 'bias'', rank 2 has ''bias' as 'bias2''");
      save_full(file, fsdp,
                {.max_file_bytes = max_file_bytes, .rename = rename, .transposed = [](const std::string& own) {
                   return own == "tokens";
                 }});
      FullyShardedDataParallel other(on_rank_device(Tied()), comm);
      const at::NoGradGuard no_grad;
      for (const at::Tensor& parameter : other.parameters()) parameter.zero_();
      load_full(folder.path(), other,
                {.strict = false,
                 .rename = [](const std::string& saved) { return saved.substr(4); },
                 .transposed = [](const std::string& saved) { return saved == "net.head"; }});
      auto state = other.full_state_dict();
      EXPECT_TRUE(torch::equal(state["tokens"].cpu(), torch::arange(35, at::kFloat).view({7, 5})));
      EXPECT_TRUE(torch::equal(state["bias"].cpu(), torch::arange(7, at::kFloat)));
    });
  const SavedTensors found = find_full_tensors(folder.path());
  ASSERT_EQ(found.tensors.size(), 2U);
  EXPECT_EQ(found.tensors.at("net.head").shape, (std::vector<int64_t>{5, 7}));
  EXPECT_TRUE(found.tensors.contains("net.bias"));
  const auto one = SaveFullOptions{.rename = rename, .transposed = [](const std::string&) { return true; }};
  write_full(
      folder / "one.safetensors", {{"w", at::kFloat, {2, 3}, {}}},
      [](const FullTensor& tensor) { return torch::arange(6, at::kFloat).view(tensor.shape); }, one);
  const SavedTensors alone = find_full_tensors(folder / "one.safetensors");
  EXPECT_TRUE(
      torch::equal(SliceReader(alone).read("net.w", whole_box({3, 2})), torch::arange(6, at::kFloat).view({2, 3}).t()));
}

TEST(FullFile, IsListedAndReadByName) {
  const TemporaryFolder folder;
  const at::Tensor ids = torch::arange(6).view({2, 3});
  write_full(folder / "rows.safetensors", {{"ids", at::kLong, {2, 3}, {"labels"}}, {"mask", at::kHalf, {2}, {}}},
             [&](const FullTensor& tensor) { return tensor.name == "ids" ? ids : torch::ones({2}, at::kHalf); });
  for (const auto& path : {folder / "rows.safetensors", folder.path()}) {
    const std::vector<FullTensor> all = list_full(path);
    ASSERT_EQ(all.size(), 2U);
    EXPECT_EQ(all[0].name + all[1].name, "idsmask");
    EXPECT_EQ(all[0].shape, (std::vector<int64_t>{2, 3}));
    EXPECT_EQ(all[0].aliases, (std::vector<std::string>{"labels"}));
    EXPECT_EQ(all[1].dtype, at::kHalf);
    for (const char* name : {"ids", "labels"}) EXPECT_TRUE(torch::equal(read_full(path, name), ids)) << name;
    expect_contains(error_of<CheckpointError>([&] { read_full(path, "weight"); }), ": has no tensor 'weight'");
  }
}

// What loading refuses is refused when it is written.
TEST(FullFile, NamesAndDataThatDoNotFitAreRefused) {
  const TemporaryFolder folder;
  auto refused = [&]<class Error>(std::type_identity<Error>, const std::string& name, const at::Tensor& data) {
    const auto error = error_of<Error>(
        [&] { write_full(folder / "m", {{name, at::kFloat, {2, 3}, {}}}, [&](const FullTensor&) { return data; }); });
    EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << name;
    return error;
  };
  const auto unreadable = std::type_identity<CheckpointError>();
  const at::Tensor right = torch::zeros({2, 3});
  expect_contains(refused(unreadable, "a\xff", right), "a tensor's name is not UTF-8");
  expect_contains(refused(unreadable, "a\nb", right), "a tensor's name has control characters");
  expect_contains(refused(unreadable, "__metadata__", right), "a tensor's name is what safetensors");
  const auto mistake = std::type_identity<std::logic_error>();
  for (const auto& [data, text] : std::vector<std::pair<at::Tensor, std::string>>{
           {torch::zeros({3, 2}),
            "of 'a' is CPUFloatType [3, 2], expected Float [2, 3], contiguous and in host memory"},
           {torch::zeros({3, 2}).t(), "of 'a' is CPUFloatType [2, 3], expected"},
           {right.to(at::kDouble), "of 'a' is CPUDoubleType [2, 3], expected"},
           {at::Tensor(), "of 'a' is "}})
    expect_contains(refused(mistake, "a", data), text);
}

TEST(FullFile, EightBitFloatsAreReadAsTheirValues) {
  const TemporaryFolder folder;
  const at::Tensor values = torch::tensor({0.25, 1.0, 2.0, 64.0});
  for (const auto dtype :
       {at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e8m0fnu, at::kFloat8_e4m3fnuz, at::kFloat8_e5m2fnuz}) {
    write_full(folder / "m.safetensors", {{"weight", dtype, {4}, {}}},
               [&](const FullTensor& tensor) { return values.to(tensor.dtype); });
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      FullyShardedDataParallel fsdp(on_rank_device(torch::nn::LayerNorm(torch::nn::LayerNormOptions({4}))), comm);
      load_full(folder / "m.safetensors", fsdp, {.strict = false, .convert_dtypes = true});
      EXPECT_TRUE(torch::equal(fsdp.full_state_dict()["weight"].cpu(), values)) << dtype;
    });
  }
}

// Embedding and head are one tensor; other programs write both names, and an untied model has two tensors.
TEST(FullFile, AnUntiedHeadIsNotDroppedByATiedModel) {
  struct Weight : torch::nn::Module {
    explicit Weight(const at::Tensor& weight) { register_parameter("weight", weight); }
  };
  struct Model : torch::nn::Module {
    explicit Model(bool is_tied) {
      const at::Tensor weight = torch::randn({6, 4});
      register_module("embedding", std::make_shared<Weight>(weight));
      register_module("head", std::make_shared<Weight>(is_tied ? weight : weight.clone()));
    }
  };
  const TemporaryFolder folder;
  for (const bool is_tied : {true, false})
    write_full(folder / (is_tied ? "tied.safetensors" : "untied.safetensors"),
               {{"embedding.weight", at::kFloat, {6, 4}, {}}, {"head.weight", at::kFloat, {6, 4}, {}}},
               [&](const FullTensor& tensor) {
                 const at::Tensor value = torch::full(tensor.shape, 3.0);
                 if (!is_tied && tensor.name == "head.weight") value[5][3] = 4.0;
                 return value;
               });
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    DistributedDataParallel ddp(on_rank_device(std::make_shared<Model>(true)), comm);
    Replicated untied(std::make_shared<Model>(false), comm);
    auto first = [&] { return ddp.full_state_dict()["embedding.weight"].mean().item<double>(); };
    load_full(folder / "tied.safetensors", ddp);
    EXPECT_EQ(first(), 3.0);
    load_full(folder / "untied.safetensors", untied);
    save_checkpoint(folder / "untied", untied);
    load_full(folder / "tied.safetensors", untied);
    save_checkpoint(folder / "same", untied);
    for (const bool strict : {true, false})
      for (const auto& error :
           {error_of<CheckpointMismatch>([&] { load_full(folder / "untied.safetensors", ddp, {.strict = strict}); }),
            error_of<CheckpointMismatch>([&] { load_checkpoint(folder / "untied", ddp, {.strict = strict}); })})
        expect_contains(error, "tied in the model, saved with other values: embedding.weight and head.weight");
    {
      const at::NoGradGuard no_grad;
      for (auto& shard : ddp.parameters()) shard.zero_();
    }
    load_checkpoint(folder / "same", ddp);
    EXPECT_EQ(first(), 3.0);
  });
}

TEST(FullFile, ThatIsNotStrictTellsWhatItLeft) {
  const TemporaryFolder folder;
  write_full(folder / "m.safetensors", {{"weight", at::kFloat, {2, 2}, {}}, {"extra", at::kFloat, {1}, {}}},
             [&](const FullTensor& tensor) { return torch::full(tensor.shape, 4.0); });
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Replicated model(torch::nn::Linear(2, 2).ptr(), comm);
    LoadReport report;
    load_full(folder / "m.safetensors", model, {.strict = false, .report = &report});
    EXPECT_EQ(report.missing, std::vector<std::string>{"bias"});
    EXPECT_EQ(report.unexpected, std::vector<std::string>{"extra"});
    EXPECT_TRUE(torch::equal(model.parameters()[0].detach().cpu(), torch::full({2, 2}, 4.0)));
  });
}

// models--x/snapshots/<revision>/<name> -> ../../blobs/<hash>, and a file beside it that the index does not list.
TEST(FullFile, CachesOfModelHubsOpenAndTheirIndexDecides) {
  const TemporaryFolder folder;
  const auto snapshot = folder / "snapshots/abc", blobs = folder / "blobs";
  std::filesystem::create_directories(snapshot);
  std::filesystem::create_directories(blobs);
  const char* names[] = {"weight", "bias"};
  auto write = [&](const std::filesystem::path& path, std::vector<FullTensor> tensors, double value) {
    write_full(path, tensors, [&](const FullTensor& tensor) { return torch::full(tensor.shape, value); });
  };
  write(blobs / "0", {{"weight", at::kFloat, {3, 3}, {}}}, 1);
  write(blobs / "1", {{"bias", at::kFloat, {3}, {}}, {"weight", at::kFloat, {3, 3}, {}}}, 2);
  std::ofstream(blobs / "2") << R"({"weight_map":{"weight":"a-0.safetensors","bias":"a-1.safetensors"}})";
  for (int i = 0; i < 2; ++i)
    std::filesystem::create_symlink("../../blobs/" + std::to_string(i),
                                    snapshot / ("a-" + std::to_string(i) + ".safetensors"));
  std::filesystem::create_symlink("../../blobs/2", snapshot / "model.safetensors.index.json");
  write(snapshot / "stray.safetensors", {{"bias", at::kFloat, {3}, {}}, {"other", at::kFloat, {1}, {}}}, 3);
  std::filesystem::create_directories(folder / "refs");
  std::ofstream(folder / "refs/main") << "abc";
  std::filesystem::create_directories(folder / "snapshots/older");
  for (const auto& path : {snapshot, snapshot / "model.safetensors.index.json", folder.path()}) {
    const SavedTensors found = find_full_tensors(path);
    EXPECT_EQ(found.tensors.size(), 2u);
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      Replicated model(torch::nn::Linear(3, 3).ptr(), comm);
      load_full(path, model);
      for (int i = 0; i < 2; ++i) EXPECT_EQ(model.parameters()[i].detach().min().item<double>(), i + 1) << names[i];
    });
  }
  std::filesystem::remove(folder / "refs/main");
  expect_contains(error_of<CheckpointError>([&] { find_full_tensors(folder.path()); }),
                  "a hub's cache with 2 snapshots");
  std::filesystem::remove(blobs / "1");
  expect_contains(error_of<CheckpointError>([&] { find_full_tensors(snapshot); }), "link to what is not there");
}

}  // namespace
}  // namespace tessera::full_file_test
