// Figures of the literature, worlds of any size, plans, and errors of dry runs.
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include <tessera/checkpoint/full_file.h>
#include <tessera/exported.h>
#include <tessera/optim/fused_optimizers.h>
#include <tessera/plan/timeline_page.h>
#include "plan/record/counting_communicator.h"
#include "plan/report/plan_search.h"
#include "tests/plan/models.h"
#include "tests/plan/page.h"
#include "tests/support/built.h"
#include "tests/support/temporary_folder.h"

namespace tessera::plan_tests {
using namespace internal;
namespace {

using namespace testing_support;

RunRecord dry_gpt(int world, int rank, FsdpOptions options = {}) {
  options.auto_wrap = wrap_modules<BlockImpl>();
  return dry_run(
      [&](std::shared_ptr<Communicator> comm) {
        return zero(Gpt(), torch::optim::AdamWOptions(1e-3), std::move(comm), {.stage = 3, .fsdp = options});
      },
      [](auto& model) {
        model.optimizer().zero_grad();
        const auto tokens = torch::zeros({2, 24}, at::kLong);
        torch::cross_entropy_loss(model(tokens), tokens.flatten()).backward();
        model.clip_grad_norm_(1.0);
        model.step();
      },
      {.world_size = world, .rank = rank});
}

TEST(PlanScale, AnyRankOfAnyWorld) {
  const RunRecord whole = dry_gpt(1, 0), part = dry_gpt(65536, 17);
  EXPECT_EQ(whole.flop, part.flop);
  EXPECT_GT(part.flop, 0);
  EXPECT_LT(part.end[MemoryKind::kParameters], whole.end[MemoryKind::kParameters] / 100);
  EXPECT_GE(part.peak[MemoryKind::kGathered], 4 * 60 * 240);
  // Three blocks and the root are units: gathered in forward and backward, reduced; the root stays gathered in between.
  int gathers = 0, reduces = 0;
  for (const RecordedCollective& collective : part.collectives) {
    if (collective.step != 2) continue;
    EXPECT_EQ(collective.ranks, 65536);
    gathers += collective.operation == "all-gather" && collective.what.find("unit") != std::string::npos ? 1 : 0;
    reduces += collective.operation == "reduce-scatter" ? 1 : 0;
  }
  EXPECT_GE(gathers, 4);
  EXPECT_EQ(reduces, 4);
  expect_contains(part.summary(), "reduce-scatter");
}

// In units that keep significant digits.
TEST(PlanScale, SummariesAreInTheUnitsOfTheirSize) {
  RunRecord record;
  record.operators.push_back({.name = "aten::mm", .step = 2});
  record.collectives.push_back({.operation = "all-gather", .bytes = 3 << 19, .step = 2});
  record.peak[MemoryKind::kParameters] = 5 << 20;
  record.flop = 25'000'000;
  const std::string small = record.summary();
  for (const char* part : {"peak 5.000 MiB, in ", " 5.000 MiB\n", "0.0250 GFLOP a step", "all-gather, 1.500 MiB\n"})
    expect_contains(small, part);
  record.peak[MemoryKind::kParameters] = int64_t{5} << 30;
  record.collectives[0].bytes = int64_t{3} << 29;
  record.flop = 2'500'000'000'000;
  const std::string large = record.summary();
  for (const char* part : {"peak 5.000 GiB, in ", " 5.000 GiB\n", "2.5000 TFLOP a step", "all-gather, 1.500 GiB\n"})
    expect_contains(large, part);
}

// Uses no memory beyond metadata; bench/plan_time --scale measures its time.
TEST(PlanScale, SeventyBillionParametersOn65536Ranks) {
  const auto model = planned_decoder(
      decoder_of("llama:layers=80,width=8192,heads=64,kv_heads=8,mlp=28672,vocab=128256,sequence=8192"));
  const auto most_kib = [] {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
  };
  [[maybe_unused]] const int64_t before = most_kib();
  const RunRecord record = model->run({.stage = 3, .bf16 = true, .checkpointed = true}, 65536, 17).record;
  EXPECT_GT(record.most[MemoryKind::kGathered], int64_t{3} << 30);
  EXPECT_LT(record.end[MemoryKind::kParameters], 5 << 20);
#ifndef __SANITIZE_ADDRESS__  // delays the reuse of freed memory
  EXPECT_LT(most_kib() - before, 256 << 10);
#endif
}

// Ranks that read each other's memory do not prefetch large units, and hold no full gradient in flight. They hold one
// gathered unit and two gradients, fewer than other ranks. This includes a group inside one of several shared memories.
TEST(PlanModels, KnowWhoSharesMemory) {
  const auto model = planned_decoder(decoder_of("gpt:layers=6,width=128,heads=2,vocab=50,sequence=16"));
  const auto in_flight = [&](int ranks_sharing_memory, const TrainingChoice& choice) {
    const RunRecord record = model->run(choice, 4, 0, ranks_sharing_memory).record;
    return std::pair(record.most[MemoryKind::kGathered], record.most[MemoryKind::kBuckets]);
  };
  const auto [gathered, buckets] = in_flight(4, {.stage = 3});
  EXPECT_EQ(in_flight(0, {.stage = 3}), std::pair(gathered, buckets));
  for (const int ranks_sharing_memory : {1, 2}) {
    const auto [more_gathered, more_buckets] = in_flight(ranks_sharing_memory, {.stage = 3});
    EXPECT_GT(4 * more_gathered, 5 * gathered);  // three units of blocks, not two, but others are smaller
    EXPECT_GT(more_buckets, 2 * buckets);
  }
  EXPECT_EQ(in_flight(2, {.stage = 3, .ranks_per_copy = 2}).first, gathered);
}

// An operator's submodule is that of the last used parameter; a gradient's, that of its forward operator.
TEST(PlanRecord, NamesTheModuleOfEachOperator) {
  for (const int stage : {0, 3}) {
    for (const bool bf16 : {false, true}) {
      FsdpOptions options{.auto_wrap = wrap_modules<BlockImpl>()};
      if (bf16) options.mixed_precision.param_dtype = at::kBFloat16;
      const RunRecord record = dry_run(
          [&](std::shared_ptr<Communicator> comm) {
            return zero(Gpt(), torch::optim::AdamWOptions(1e-3), std::move(comm), {.stage = stage, .fsdp = options});
          },
          [](auto& model) {
            model.optimizer().zero_grad();
            const auto tokens = torch::zeros({2, 24}, at::kLong);
            torch::cross_entropy_loss(model(tokens), tokens.flatten()).backward();
            model.step();
          },
          {.world_size = 2});
      const auto modules_of = [&](const std::string& name, bool in_backward) {
        std::vector<std::string> modules;
        for (const RecordedOperator& op : record.operators)
          if (op.step == 2 && op.in_backward == in_backward && op.name == name)
            modules.push_back(record.modules[static_cast<size_t>(op.module)]);
        return modules;
      };
      const std::vector<std::string> forward = {"blocks.0.up", "blocks.1.up", "blocks.2.up"};
      EXPECT_EQ(modules_of("aten::gelu", false), forward) << "stage " << stage;
      EXPECT_EQ(modules_of("aten::gelu_backward", true), std::vector<std::string>(forward.rbegin(), forward.rend()))
          << "stage " << stage;
      for (const std::string& module : modules_of("aten::native_layer_norm", false)) EXPECT_NE(module, "");
      const auto first = std::ranges::find_if(record.operators,
                                              [](const RecordedOperator& op) { return op.step == 2 && op.flop > 0; });
      ASSERT_NE(first, record.operators.end());
      EXPECT_EQ(record.modules[static_cast<size_t>(first->module)], "blocks.0.qkv") << "stage " << stage;
    }
  }
  const RunRecord record = dry_gpt(2, 0);
  ASSERT_NE(record.operators[record.peak_at].module, 0);
  expect_contains(record.peak_place(),
                  ", in " + record.modules[static_cast<size_t>(record.operators[record.peak_at].module)]);
}

// 2 for each multiply-add: 6 a parameter and token for the matrices, plus attention.
TEST(PlanFlop, OfAStepByFormula) {
  const RunRecord record = dry_gpt(1, 0);
  constexpr int64_t kTokens = 48, kMatrices = 3 * (60 * 180 + 60 * 60 + 2 * 60 * 240) + 301 * 60;
  constexpr int64_t kAttention =
      3 * 2 * (2 * 4 * 24 * 24 * 15) * 2;  // of forward, in 3 layers; backward takes 2.5 times that
  EXPECT_EQ(record.flop, 6 * kTokens * kMatrices + kAttention * 7 / 2);
}

TEST(PlanErrors, NameWhatCannotBeRun) {
  const auto run = [](auto step) {
    return error_of<std::invalid_argument>(
        [&] { dry_run([](std::shared_ptr<Communicator> comm) { return comm; }, step, {.world_size = 4, .rank = 1}); });
  };
  expect_contains(run([](auto&) { torch::randn({100, 100}).nonzero(); }), "aten::nonzero");
  expect_contains(run([](auto&) { torch::linalg_eig(torch::randn({3000, 3000})); }), "aten::linalg_eig");
  expect_contains(run([](auto& comm) { comm->split(0); }), "the colors of a split");
  const auto none = [](auto&&) { return 0; };
  expect_contains(error_of<std::invalid_argument>([&] { dry_run(none, none, {.world_size = 2, .rank = 2}); }),
                  "rank 2");
  expect_contains(error_of<std::invalid_argument>([&] { dry_run(none, none, {.steps = 1}); }), "1 steps");
  expect_contains(error_of<std::invalid_argument>([&] { dry_run(none, none, {.ranks_sharing_memory = -1}); }),
                  "ranks_sharing_memory is -1, expected 0 or more");
  expect_contains(error_of<std::logic_error>([&] { dry_run(none, [&](auto&) { dry_run(none, none); }); }),
                  "inside another");
}

// Also in a world of one, which could write a checkpoint of absent values.
TEST(PlanErrors, CopiesNeedRanks) {
  const auto refused = [](const TrainingChoice& choice, int ranks, int copies) {
    return error_of<std::invalid_argument>([&] { copies_bytes({}, choice, ranks, copies); });
  };
  expect_contains(refused({}, 0, 1), "1 copies on 0 ranks");
  expect_contains(refused({.stage = 3, .ranks_per_copy = 8}, 4, 1), "1 copies on 4 ranks");
  expect_contains(refused({.stage = 3}, 4, -1), "-1 copies on 4 ranks");
}

TEST(PlanErrors, NameCheckpoints) {
  const TemporaryFolder folder;
  using Model = FullyShardedDataParallel<torch::nn::Linear>;
  struct Trained {
    std::shared_ptr<Model> model;
    std::shared_ptr<torch::optim::Adam> optimizer;
  };
  const auto make = [](std::shared_ptr<Communicator> comm) {
    Trained trained;
    trained.model = std::make_shared<Model>(torch::nn::Linear(4, 4), comm);
    trained.optimizer = std::make_shared<torch::optim::Adam>(trained.model->parameters());
    return trained;
  };
  const std::filesystem::path path = folder / "c";
  using Use = std::function<void(Trained&)>;
  const std::vector<std::pair<std::string, Use>> uses{
      {"saving the checkpoint", [&](Trained& t) { save_checkpoint(path, *t.model, *t.optimizer); }},
      {"saving the checkpoint", [&](Trained& t) { save_checkpoint_async(path, *t.model).wait(); }},
      {"saving the file", [&](Trained& t) { save_full(path, *t.model); }},
      {"loading " + path.string(), [&](Trained& t) { load_full(path, *t.model); }},
      {"loading " + path.string(), [&](Trained& t) { load_checkpoint(path, *t.model, *t.optimizer); }},
      {"loading the newest", [&](Trained& t) { load_newest_checkpoint(folder.path(), *t.model, *t.optimizer); }}};
  for (const int world : {1, 4})
    for (const auto& [what, use] : uses)
      expect_contains(error_of<std::invalid_argument>([&] { dry_run(make, use, {.world_size = world}); }),
                      "rank 0 of a dry run has no values for " + what);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(PlanErrors, ValuesThatAreNotThereAreZeroAndListed) {
  double seen = 1;
  const RunRecord record =
      dry_run([](auto) { return 0; }, [&](auto&) { seen = torch::randn({100, 100}).sum().template item<double>(); });
  EXPECT_EQ(seen, 0);
  ASSERT_EQ(record.stand_ins.size(), 1U);
  expect_contains(record.stand_ins[0], "aten::_local_scalar_dense");
  torch::manual_seed(5);
  const auto expected = torch::rand({3});
  torch::manual_seed(5);
  dry_run([](auto) { return 0; }, [](auto&) { torch::rand({3}); });
  EXPECT_TRUE(torch::equal(torch::rand({3}), expected));  // the generator is unchanged
}

// Deterministic algorithms make libtorch fill new memory; a dry run has none to fill.
TEST(PlanErrors, NothingIsFilledUnderDeterministicAlgorithms) {
  constexpr int64_t kNumel = int64_t{1} << 40;
  auto& context = at::globalContext();
  const bool before = context.deterministicAlgorithms(), fills = context.deterministicFillUninitializedMemory();
  context.setDeterministicAlgorithms(true, /*warn_only=*/true);
  context.setDeterministicFillUninitializedMemory(true);
  const RunRecord record = dry_run([](auto) { return 0; }, [](auto&) { torch::empty({kNumel}).add_(1); });
  EXPECT_TRUE(context.deterministicFillUninitializedMemory());
  context.setDeterministicFillUninitializedMemory(fills);
  context.setDeterministicAlgorithms(before, /*warn_only=*/false);
  EXPECT_GE(record.peak_bytes(), 4 * kNumel);
}

// After a run that threw anywhere, training the same model is unaffected.
TEST(PlanErrors, ATrainingAfterARunThatThrewIsAsEver) {
  const auto trained = [] {
    torch::nn::Linear model = seeded(3, [] { return torch::nn::Linear(6, 6); });
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      model(torch::ones({2, 6})).square().sum().backward();
      optimizer.step();
    }
    return model->weight.detach().clone();
  };
  const at::Tensor before = trained();
  for (const bool in_backward : {false, true}) {
    const auto failing = [&](auto&) {
      at::Tensor x = torch::ones({2, 6}).set_requires_grad(true);
      if (in_backward) x.register_hook([](at::Tensor) -> at::Tensor { throw std::runtime_error("a user's hook"); });
      const at::Tensor loss = torch::linear(x, torch::rand({6, 6})).sum();
      if (!in_backward) throw std::runtime_error("a user's step");
      loss.backward();
    };
    expect_contains(error_of<std::runtime_error>([&] { dry_run([](auto) { return 0; }, failing); }), "a user's");
    EXPECT_TRUE(torch::equal(trained(), before));
  }
}

// Names may be any text; the peak is kept for any number of operators.
TEST(PlanPage, HoldsWhatTheRecordHasAsText) {
  RunRecord record;
  record.units = {"", "unit '</script><img src=x onerror=alert(1)>\xff'"};
  for (int i = 0; i < 9000; ++i) {
    record.operators.push_back({.name = "aten::mm", .unit = 1, .step = i < 4000 ? 0 : 1, .in_backward = i > 6000});
    record.operators.back().live[MemoryKind::kActivations] = i % 100;
  }
  record.peak_at = 6543;
  record.peak[MemoryKind::kActivations] = 700;
  record.peak[MemoryKind::kGradients] = 77;
  record.most = record.peak;
  record.collectives.push_back(
      {.operation = "all-gather", .what = record.units[1], .ranks = 4, .bytes = 12, .step = 1});
  const std::string page = timeline_page(record, {.title = "a < b & c", .options = "<i>", .notes = "</pre>"});
  EXPECT_EQ(page.find("<img"), std::string::npos);
  EXPECT_EQ(page.find("<i>"), std::string::npos);
  for (const char* attribute : {"src=\"", "href=", "@import", "url(", "fetch("})
    EXPECT_EQ(page.find(attribute), std::string::npos) << attribute;

  const auto data = data_of_page(page);
  EXPECT_EQ(data["title"], "a < b & c");
  EXPECT_EQ(data["peak"]["where"],
            "in step 1, in backward, at aten::mm of unit '</script><img src=x onerror=alert(1)>\uFFFD'");
  EXPECT_EQ(data["peak"]["total"], 777);
  EXPECT_EQ(data["kinds"], (std::vector<std::string>{"gradients", "activations"}));
  EXPECT_EQ(data["steps"][1]["begin"], 4000);
  EXPECT_LE(data["points"].size(), 2000U);
  const auto& points = data["points"];
  const auto peak = std::find_if(points.begin(), points.end(), [](const auto& one) { return one["at"] == 6543; });
  ASSERT_NE(peak, points.end());
  EXPECT_EQ((*peak)["bytes"], (std::vector<int>{77, 700}));
  EXPECT_NO_THROW(data_of_page(timeline_page({}, {})));
}

// A real run beside the prediction: its bytes over the same operators, differences in red.
TEST(PlanPage, MarksWhereAMeasuredRunDiffers) {
  const RunRecord predicted = dry_gpt(2, 0);
  const auto measured_of = [&](const RunRecord& real) {
    return data_of_page(timeline_page(predicted, {.measured = &real}))["measured"];
  };
  const auto same = measured_of(predicted);
  EXPECT_EQ(same["differences"].size(), 0U);
  EXPECT_EQ(same["other_at"], -1);
  EXPECT_EQ(same["peak"], predicted.peak_bytes());
  RunRecord real = predicted;
  for (size_t at = 100; at < 120; ++at) real.operators[at].live[MemoryKind::kActivations] += 12;
  const auto other = measured_of(real);
  ASSERT_EQ(other["differences"].size(), 1U);
  EXPECT_EQ(other["differences"][0]["begin"], 100);
  EXPECT_EQ(other["differences"][0]["end"], 119);
  expect_contains(other["differences"][0]["text"], "activations ");
  expect_contains(other["differences"][0]["text"], std::to_string(real.operators[100].live[MemoryKind::kActivations]));
  real.operators[150].name = "aten::another";
  EXPECT_EQ(measured_of(real)["other_at"], 150);
}

TEST(PlanModels, FromTextAndHuggingFace) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "config.json";
  const auto numel = [](const DecoderOptions& options) {
    int64_t sum = 0;
    static_cast<void>(dry_run([&](auto) { return Decoder(options); },
                              [&](Decoder& model) {
                                sum = 0;
                                for (const auto& parameter : model->parameters()) sum += parameter.numel();
                              }));
    return sum;
  };
  EXPECT_EQ(numel(decoder_of("gpt:")), 124439808);  // GPT-2, as Hugging Face counts it
  const auto of = [&](const std::string& fields, int64_t sequence = 64) {
    std::ofstream(file) << "{" << fields << "}";
    return decoder_of_config(file, sequence, 1);
  };
  // Parameter counts of transformers and of the models' pages.
  const std::string llama = R"("model_type": "llama", "num_attention_heads": 32, "max_position_embeddings": 8192, )";
  const std::string mistral =
      R"("model_type": "mistral", "num_attention_heads": 32, "max_position_embeddings": 32768, )";
  const std::string qwen2 =
      R"("model_type": "qwen2", "max_position_embeddings": 32768, "sliding_window": 4096, "use_sliding_window": false, )";
  const std::string qwen3 = R"("model_type": "qwen3", "max_position_embeddings": 40960, )";
  const std::pair<int64_t, std::string> published[] = {
      {124439808, R"("model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
                     "n_inner": null, "vocab_size": 50257)"},
      {1557611200, R"("model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024,
                      "vocab_size": 50257)"},
      {6738415616, llama + R"("hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                              "vocab_size": 32000)"},  // Llama 2 7B
      {8030261248, llama + R"("hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                              "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": false)"},
      {1235814400, llama + R"("hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
                              "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": true)"},
      {1100048384, llama + R"("hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
                              "num_key_value_heads": 4, "vocab_size": 32000)"},  // TinyLlama
      {7241732096, mistral + R"("hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                                "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 4096)"},
      {7241732096, mistral + R"("hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                                "vocab_size": 32000, "sliding_window": null, "attention_bias": true)"},
      {12247782400, mistral + R"("hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40,
                                 "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072)"},  // Nemo
      {494032768, qwen2 + R"("hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                             "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
                             "tie_word_embeddings": true)"},                                          // 2.5, 0.5B
      {7615616512, qwen2 + R"("hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                              "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064)"},
      {8190735360, qwen3 + R"("hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                              "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936)"},
      {596049920, qwen3 + R"("hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
                             "vocab_size": 151936, "tie_word_embeddings": true)"},
  };
  for (const auto& [parameters, fields] : published) EXPECT_EQ(numel(of(fields)), parameters) << fields;
  const std::string small = llama + R"("hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                                       "vocab_size": 10)";
  EXPECT_EQ(numel(of(small + R"(, "attention_bias": true)")) - numel(of(small)), 2 * 4 * 64);
  EXPECT_EQ(numel(of(small + R"(, "mlp_bias": true)")) - numel(of(small)), 2 * (96 + 96 + 64));
  EXPECT_EQ(numel(decoder_of("llama:layers=1,width=64,heads=2,head_dim=16,mlp=8,vocab=10,sequence=4")),
            2 * 640 + 4 * 64 * 32 + 3 * 8 * 64 + 3 * 64);
  const auto why_not = [&](const std::string& fields, int64_t sequence = 64) {
    const std::string error = error_of<std::invalid_argument>([&] { of(fields, sequence); });
    expect_contains(error, file.string());
    return error;
  };
  expect_contains(why_not(mistral + R"("hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                                       "vocab_size": 10, "sliding_window": 4096)",
                          8192),
                  "sliding_window is 4096, less than the sequence of 8192");
  const std::string small_qwen = R"("model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96,
                                    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 10)";
  expect_contains(why_not(small_qwen), "has no num_key_value_heads");
  expect_contains(
      why_not(small_qwen + R"(, "num_key_value_heads": 2, "use_sliding_window": true, "sliding_window": 32)"),
      "sliding_window is 32, less than the sequence of 64");
  expect_contains(why_not(small + R"(, "quantization_config": {"bits": 4})"), "quantization_config");
  expect_contains(why_not(small + R"(, "mlp_bias": 3)"), "mlp_bias is neither true nor false");
  EXPECT_EQ(of(published[0].second).left_out, "dropout (resid_pdrop, embd_pdrop, attn_pdrop)");
  expect_contains(planned_decoder(of(published[0].second))->description(), "without dropout (resid_pdrop");
  expect_contains(error_of<std::invalid_argument>([&] { of(published[0].second, 2000); }), "1024 positions");
  std::ofstream(file) << kLfsPointer;
  expect_contains(error_of<std::invalid_argument>([&] { decoder_of_config(file, 0, 1); }),
                  "config.json " + kLfsProblem);
  std::ofstream(file) << R"({"model_type": "t5"})";
  expect_contains(error_of<std::invalid_argument>([&] { decoder_of_config(file, 0, 1); }), "model_type is 't5'");
  const std::string a_folder = folder.path().string();
  expect_contains(error_of<std::invalid_argument>([&] { decoder_of_config(a_folder, 0, 1); }),
                  a_folder + " cannot be read");
  expect_contains(error_of<std::invalid_argument>([] { decoder_of("gpt:depth=3"); }), "depth=3");
  expect_contains(error_of<std::invalid_argument>([] { decoder_of("gpt:layers=2,"); }), "'', expected layers, width");
  expect_contains(error_of<std::invalid_argument>([] { decoder_of("gpt:width=10,heads=3"); }), "3 heads");
  expect_contains(error_of<std::invalid_argument>([] { decoder_of("gpt:layers=99999999"); }),
                  "model of layers 99999999, expected at most 1000");
  EXPECT_EQ(bytes_of_text("80GiB"), int64_t{80} << 30);
  expect_contains(error_of<std::invalid_argument>([] { bytes_of_text("80 apples"); }), "80 apples");
}

TEST(PlanModels, RecommendsWhatFits) {
  const auto model = planned_decoder(decoder_of("gpt:layers=4,width=256,heads=4,vocab=1000,sequence=64"));
  std::vector<PlannedTraining> plans;
  for (const TrainingChoice& choice : training_choices()) plans.push_back(plan_training(*model, choice, {8}));
  const int64_t least =
      std::ranges::min_element(plans, {}, [](const auto& plan) { return plan.peak.tensors(); })->peak.tensors();
  const auto of = [](int64_t bytes) { return Machines{.ranks = 8, .memory_bytes = bytes}; };
  EXPECT_EQ(recommended(plans, of(least)), -1);
  const int tight = recommended(plans, of(static_cast<int64_t>(static_cast<double>(least) / kUsable) + 1));
  ASSERT_GE(tight, 0);
  EXPECT_EQ(plans[static_cast<size_t>(tight)].peak.tensors(), least);
  const int easy = recommended(plans, of(int64_t{1} << 40));
  EXPECT_FALSE(plans[static_cast<size_t>(easy)].choice.checkpointed);
  expect_contains(plan_text(plans, {8, 8, int64_t{1} << 40}), plans[static_cast<size_t>(easy)].options);
}

TEST(PlanSearch, FindsWhatThePlanDoesNotHave) {
  const auto model = planned_decoder(decoder_of("gpt:layers=4,width=256,heads=4,vocab=1000,sequence=64"));
  std::vector<PlannedTraining> plans;
  for (const TrainingChoice& choice : training_choices()) plans.push_back(plan_training(*model, choice, {16}));
  const int64_t least =
      std::ranges::min_element(plans, {}, [](const auto& plan) { return plan.peak.tensors(); })->peak.tensors();
  const auto best_of = [&](int ranks_per_host, double bytes) {
    const Machines machines{16, ranks_per_host, static_cast<int64_t>(bytes)};
    const auto tried = search_plans(*model, machines);
    const int best = recommended(tried, machines);
    EXPECT_EQ(best < 0, !by_preference(tried, machines).empty() && best != by_preference(tried, machines).front());
    return best < 0 ? PlannedTraining{} : tried[static_cast<size_t>(best)];
  };
  // Less memory than any default choice takes: uses host memory, or smaller units.
  const PlannedTraining small = best_of(8, 0.99 * static_cast<double>(least) / kUsable);
  EXPECT_LT(small.peak.tensors(), least);
  EXPECT_TRUE(small.choice.offload || small.choice.units == UnitChoice::kLinears || small.choice.prefetch == 0);
  expect_contains(plan_text({small}, {16, 8, least}), small.choice.offload ? "offload" : "linears");
  if (small.choice.offload) {
    expect_contains(small.options, ".offload = {.params = true, .grads = true}");
    EXPECT_GT(small.host_bytes, 0);
  }
  // If a copy of the model fits in each host, fewer bytes cross hosts.
  const TrainingChoice hybrid{.stage = 3, .ranks_per_copy = 4};
  const PlannedTraining copies = plan_training(*model, hybrid, {16, 4}),
                        whole = plan_training(*model, {.stage = 3}, {16, 4});
  EXPECT_LT(copies.between_bytes, whole.between_bytes / 2);
  EXPECT_EQ(plan_training(*model, hybrid, {16, 16}).between_bytes, 0);
  expect_contains(copies.options, ".hybrid = {.ranks_per_copy = 4}");
  EXPECT_EQ(best_of(8, 1e12).choice.stage, 0);
}

// If a copy does not fit in each host, backward at least gathers within a host.
TEST(PlanSearch, FindsSecondaryCopies) {
  const auto model = planned_decoder(decoder_of("gpt:layers=24,width=128,heads=2,vocab=100,sequence=8"));
  const auto planned = [&](const TrainingChoice& choice) { return plan_training(*model, choice, {16, 4}); };
  const PlannedTraining whole = planned({.stage = 3}), copies = planned({.stage = 3, .ranks_per_copy = 4}),
                        near = planned({.stage = 3, .ranks_per_secondary_copy = 4});
  EXPECT_LT(near.between_bytes, whole.between_bytes);
  EXPECT_GT(near.between_bytes, copies.between_bytes);
  EXPECT_GT(near.peak.tensors(), whole.peak.tensors());
  EXPECT_LT(near.peak.tensors(), copies.peak.tensors());
  expect_contains(near.options, ".hybrid = {.ranks_per_secondary_copy = 4}");
  const auto room = static_cast<int64_t>(1.01 * static_cast<double>(whole.peak.tensors()) / kUsable);
  const auto tried = search_plans(*model, {16, 4, room});
  const auto found =
      std::ranges::find_if(tried, [](const auto& plan) { return plan.choice.ranks_per_secondary_copy == 4; });
  ASSERT_NE(found, tried.end());
  expect_contains(plan_text({*found}, {16, 4, room}), "secondary");
}

// A plan is for the rank that needs most memory, which need not be the first if parameters have owners.
TEST(PlanModels, JudgesByTheLargestRank) {
  const auto model = planned_decoder(decoder_of("gpt:layers=3,width=64,heads=2,vocab=100,sequence=16"));
  bool is_another = false;
  for (const int world : {2, 3, 5})
    for (const int stage : {1, 2}) {
      const PlannedTraining planned = plan_training(*model, {.stage = stage}, {world});
      is_another = is_another || planned.rank != 0;
      for (int rank = 0; rank < world; ++rank)
        EXPECT_LE(model->run({.stage = stage}, world, rank).record.peak_bytes(), planned.peak.tensors())
            << "stage " << stage << ", rank " << rank << " of " << world;
    }
  EXPECT_TRUE(is_another);
}

// Before stage 3 bf16 is libtorch's autocast: activations and operators in 16 bit, parameters and state unchanged.
TEST(PlanModels, AutocastIsPlannedBeforeStageThree) {
  const auto model = planned_decoder(decoder_of("gpt:layers=2,width=64,heads=2,vocab=100,sequence=128,batch=4"));
  for (const int stage : {0, 2}) {
    const RunRecord exact = model->run({.stage = stage}, 2, 0).record;
    const RunRecord half = model->run({.stage = stage, .bf16 = true}, 2, 0).record;
    EXPECT_LT(half.most[MemoryKind::kActivations], 0.8 * static_cast<double>(exact.most[MemoryKind::kActivations]));
    EXPECT_EQ(half.end[MemoryKind::kParameters], exact.end[MemoryKind::kParameters]);
    const auto is_half = [](const RecordedOperator& op) { return op.flop > 0 && op.dtype == at::kBFloat16; };
    EXPECT_TRUE(std::ranges::any_of(half.operators, is_half));
    EXPECT_FALSE(std::ranges::any_of(exact.operators, is_half));
  }
  expect_contains(plan_training(*model, {.stage = 2, .bf16 = true}, {2}).options, "at::autocast to bfloat16");
}

// The host's memory counts, and no time is invented.
TEST(PlanModels, OffloadIsHeldAgainstTheHost) {
  const auto model = planned_decoder(decoder_of("gpt:layers=4,width=256,heads=4,vocab=1000,sequence=64"));
  MachineSpeed speed;
  speed.work[static_cast<size_t>(WorkClass::kMatmul)] = SpeedCurve::of_speed(1e12);
  speed.work[static_cast<size_t>(WorkClass::kMemory)] = SpeedCurve::of_speed(1e11);
  speed.within_host = speed.between_hosts = {0, 1e9, 0};
  Machines machines{.ranks = 8, .ranks_per_host = 4, .speed = &speed};
  const std::vector<PlannedTraining> plans = {plan_training(*model, {.stage = 3}, machines),
                                              plan_training(*model, {.stage = 3, .offload = true}, machines)};
  EXPECT_TRUE(plans[0].time.has_value());
  EXPECT_FALSE(plans[1].time.has_value());
  machines.memory_bytes = static_cast<int64_t>(static_cast<double>(plans[1].peak.tensors()) / kUsable) + 1;
  EXPECT_EQ(recommended(plans, machines), 1);
  expect_contains(plan_text(plans, machines), " MiB (4 ranks) is not known: --host-memory");
  expect_contains(plan_text(plans, machines), "time that is not predicted");
  machines.host_memory_bytes = static_cast<int64_t>(4 * static_cast<double>(plans[1].host_bytes) / kUsable) + 1;
  EXPECT_EQ(recommended(plans, machines), 1);
  EXPECT_EQ(plan_text(plans, machines).find("--host-memory"), std::string::npos);
  machines.host_memory_bytes -= 100;
  EXPECT_EQ(recommended(plans, machines), -1);
  expect_contains(plan_text(plans, machines), "not the host");
}

// Plans offload to host memory without touching it.
TEST(PlanSearch, OffloadTakesNoMemory) {
  const auto model = planned_decoder(decoder_of("gpt:layers=2,width=8192,heads=64,vocab=1000,sequence=64"));
  const auto most_kib = [] {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
  };
  const int64_t before = most_kib();
  const PlannedTraining plan = plan_training(*model, {.stage = 3, .offload = true}, {2});
  EXPECT_GT(plan.host_bytes, int64_t{4} << 30);
  EXPECT_LT(most_kib() - before, 1 << 20);
}

// A dry run of an archive takes the memory of its training.
TEST(PlanModels, Archives) {
  const std::filesystem::path archive = std::filesystem::path(built(TESSERA_EXPORTED_DATA)) / "decoder.pt2";
  const auto model = planned_archive(archive, 0, 0);
  expect_contains(model->description(), "ids [4, 6], labels [4, 6]; trained: the output 'loss'");
  EXPECT_EQ(model->policy_text(UnitChoice::kLayers), "tessera::wrap_classes({\"__main__.Block\"})");
  for (const int stage : {0, 2, 3}) {
    const RunRecord dry = model->run({.stage = stage}, 2, 0).record;
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      const NamedInputs inputs = load_exported(archive)->example_inputs();
      const RunRecord real = record_run(
          [&](std::shared_ptr<Communicator> own) {
            const auto load = [&] { return load_exported(archive); };
            auto module = stage == 3 ? deferred(load) : load();
            if (stage < 3)
              for (auto& parameter : module->parameters()) parameter.set_data(parameter.detach().clone());
            return zero<AdamW>(module, torch::optim::AdamWOptions(1e-3), std::move(own),
                               {.stage = stage, .fsdp = {.auto_wrap = wrap_classes({"Block"})}});
          },
          [&](auto& training) {
            training.optimizer().zero_grad();
            const ExportedValue outputs = training(inputs);
            outputs["loss"].tensor().backward();
            training.clip_grad_norm_(1.0);
            training.step();
          },
          comm);
      if (comm->rank() != 0) return;
      for (const MemoryKind kind : {MemoryKind::kGathered, MemoryKind::kBuckets, MemoryKind::kOptimizer,
                                    MemoryKind::kActivations, MemoryKind::kGradients})
        EXPECT_EQ(dry.most[kind], real.most[kind]) << "stage " << stage << ", " << name_of(kind);
      EXPECT_EQ(dry.end[MemoryKind::kParameters], real.end[MemoryKind::kParameters]) << "stage " << stage;
    });
  }
  const auto resized = planned_archive(archive, 2, 5);
  expect_contains(resized->description(), "ids [2, 5], labels [2, 5]");
  expect_contains(error_of<std::invalid_argument>([&] { planned_archive(archive, 2, 5000); }), "5000");
}

}  // namespace
}  // namespace tessera::plan_tests
