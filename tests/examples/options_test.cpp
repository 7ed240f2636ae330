#include "options.h"

#include <gtest/gtest.h>

#include <sstream>
#include <vector>

namespace train_gpt {
namespace {

std::optional<TrainOptions> parse(std::vector<const char*> arguments, std::string* help = nullptr) {
  arguments.insert(arguments.begin(), "train_gpt");
  std::ostringstream text;
  auto options = parse_options(static_cast<int>(arguments.size()), arguments.data(), text);
  if (help != nullptr) *help = text.str();
  return options;
}

std::string error_of(const std::vector<const char*>& arguments) {
  try {
    parse(arguments);
  } catch (const OptionsError& error) {
    return error.what();
  }
  return "";
}

TEST(Options, DefaultsNeedNothing) {
  const auto options = parse({});
  ASSERT_TRUE(options);
  EXPECT_EQ(options->wrapper, Wrapper::kFsdp);
  EXPECT_FALSE(options->ranks);
  EXPECT_EQ(options->warmup_steps(), options->steps / 20);
  EXPECT_TRUE(std::filesystem::exists(options->data)) << options->data;
}

TEST(Options, EveryValueArrives) {
  const auto options = parse({"--data",
                              "a b",
                              "--out",
                              "o",
                              "--ranks",
                              "3",
                              "--layers",
                              "5",
                              "--width",
                              "48",
                              "--heads",
                              "6",
                              "--context",
                              "77",
                              "--batch",
                              "2",
                              "--steps",
                              "9",
                              "--seed",
                              "11",
                              "--clip",
                              "0",
                              "--lr",
                              "0.5",
                              "--warmup",
                              "4",
                              "--accumulate",
                              "8",
                              "--weight-decay",
                              "0.2",
                              "--tie",
                              "--prefetch",
                              "0",
                              "--reshard-after-forward",
                              "false",
                              "--val-every",
                              "0",
                              "--val-batches",
                              "13",
                              "--sample",
                              "21",
                              "--prompt",
                              "Hi ",
                              "--temperature",
                              "0.1",
                              "--top-k",
                              "3",
                              "--threads",
                              "2"});
  ASSERT_TRUE(options);
  EXPECT_EQ(options->data, "a b");
  EXPECT_EQ(options->out, "o");
  EXPECT_EQ(options->ranks, 3);
  EXPECT_EQ(options->model.layers, 5);
  EXPECT_EQ(options->model.width, 48);
  EXPECT_EQ(options->model.heads, 6);
  EXPECT_EQ(options->model.context, 77);
  EXPECT_TRUE(options->model.tie);
  EXPECT_EQ(options->batch, 2);
  EXPECT_EQ(options->steps, 9);
  EXPECT_EQ(options->seed, 11);
  EXPECT_EQ(options->clip, 0.0);
  EXPECT_EQ(options->lr, 0.5);
  EXPECT_EQ(options->warmup, 4);
  EXPECT_EQ(options->accumulate, 8);
  EXPECT_EQ(options->weight_decay, 0.2);
  EXPECT_EQ(options->prefetch, 0);
  EXPECT_FALSE(options->reshard_after_forward);
  EXPECT_EQ(options->val_every, 0);
  EXPECT_EQ(options->val_batches, 13);
  EXPECT_EQ(options->sample, 21);
  EXPECT_EQ(options->prompt, "Hi ");
  EXPECT_EQ(options->temperature, 0.1);
  EXPECT_EQ(options->top_k, 3);
  EXPECT_EQ(options->threads, 2);
}

TEST(Options, WhatIsGivenWinsOverTheDemo) {
  EXPECT_EQ(parse({"--demo"})->steps, demo_options().steps);
  const auto options = parse({"--steps", "7", "--demo", "--wrapper", "ddp"});
  EXPECT_EQ(options->steps, 7);
  EXPECT_EQ(options->model.width, demo_options().model.width);
  EXPECT_EQ(options->wrapper, Wrapper::kDdp);
}

TEST(Options, HelpShowsTheDefaults) {
  std::string help;
  EXPECT_FALSE(parse({"--help"}, &help));
  EXPECT_NE(help.find("--batch N (=8)"), std::string::npos) << help;
  EXPECT_NE(help.find("--clip X (=1)"), std::string::npos);
  EXPECT_FALSE(parse({"--demo", "--help"}, &help));
  EXPECT_NE(help.find("--steps N (=" + std::to_string(demo_options().steps) + ")"), std::string::npos) << help;
}

TEST(Options, MistakesAreNamed) {
  const std::vector<std::pair<std::vector<const char*>, const char*>> cases = {
      {{"--bogus"}, "bogus"},
      {{"--step", "3"}, "step"},  // no guessing
      {{"stray"}, "positional"},
      {{"--steps", "x"}, "steps"},
      {{"--steps", "0"}, "--steps must be at least 1"},
      {{"--batch=-1"}, "--batch must be at least 1"},
      {{"--seed=-1"}, "--seed"},
      {{"--clip=-1"}, "--clip"},
      {{"--lr", "nan"}, "--lr"},
      {{"--wrapper", "zero"}, "--wrapper must be local, ddp, oss, sdp or fsdp"},
      {{"--width", "10", "--heads", "3"}, "does not divide"},
      {{"--steps", "10", "--warmup", "11"}, "--warmup 11"},
      {{"--wrapper", "local", "--ranks", "2"}, "--wrapper local is one process"},
      {{"--wrapper", "ddp", "--prefetch", "2"}, "--prefetch is for --wrapper fsdp"},
      {{"--wrapper", "oss", "--wire", "int8"}, "--wire int8 is for --wrapper sdp and fsdp"},
      {{"--wrapper", "local", "--reshard-after-forward", "true"}, "--reshard-after-forward is for"},
      {{"--offload", "gpu"}, "--offload must be none, cpu or disk"},
      {{"--optimizer", "adma"}, "--optimizer must be adamw, adamw8bit, muon"},
      {{"--ema", "1"}, "--ema must be 0 or more and below 1"},
      {{"--wrapper", "ddp", "--offload", "cpu"}, "--offload cpu is for --wrapper oss, sdp and fsdp"},
      {{"--wrapper", "sdp", "--offload", "disk"}, "--offload disk is for --wrapper fsdp"},
      {{"--offload", "cpu", "--offload-directory", "x"}, "--offload-directory has no effect"},
      {{"--device-fraction", "0.5"}, "--device-fraction has no effect without --wrapper fsdp and --offload"},
      {{"--offload", "cpu", "--device-fraction", "1.5"}, "--device-fraction must be 0 to 1, got 1.5"},
      {{"--offload", "cpu", "--wrapper", "sdp", "--step-in-backward"}, "--step-in-backward has no effect without"},
      {{"--offload", "cpu", "--optimizer", "lion", "--step-in-backward"}, "is for --optimizer adamw, not lion"},
      {{"--capture", "--offload", "cpu"}, "--capture does not work with --offload"},
      {{"--capture", "--accumulate", "2"}, "--capture does not work with --accumulate"},
      {{"--capture", "--wrapper", "local"}, "--capture does not work with --wrapper local"},
      {{"--capture", "--elastic"}, "--capture does not work with --elastic"},
      {{"--capture", "--plan"}, "--capture does not work with --plan"},
      {{"--sample", "0", "--prompt", "x"}, "--prompt has no effect"},
      {{"--temperature", "0", "--top-k", "4"}, "--top-k has no effect"},
      {{"--quantize", "fp4", "--lora", "2"}, "--quantize must be none, nf4 or int8"},
      {{"--dtype", "fp8"}, "--dtype must be fp32, bf16 or fp16, got 'fp8'"},
      {{"--device", "tpu"}, "--device must be auto, cpu or cuda, got 'tpu'"},
      {{"--quantize", "nf4"}, "--quantize nf4 is for the frozen base of adapters: it needs --lora"},
      {{"--lora", "4"}, "name them with --import-gpt2"},
      {{"--steps", "3", "--steps", "4"}, "steps"},
      {{"--data", ""}, "--data is empty"},
      {{"--out", ""}, "--out is empty"},
      {{"--resume", ""}, "--resume is empty"},
      {{"--import-gpt2", ""}, "--import-gpt2 is empty"},
      {{"--export-gpt2", ""}, "--export-gpt2 is empty"},
      {{"--offload", "disk", "--offload-directory", ""}, "--offload-directory is empty"},
      {{"--layers", "9000000000000000000"}, "--layers must be at most 100000"},
      {{"--width", "4611686018427387904"}, "--width must be at most 1000000"},
      {{"--ranks", "100000000"}, "--ranks must be at most 1000000"},
      {{"--val-batches", "9000000000000000000"}, "--val-batches must be at most"},
      {{"--batch", "100000", "--accumulate", "100000"}, "--ranks * --batch * --accumulate must be at most"},
  };
  for (const auto& [arguments, expected] : cases) {
    EXPECT_NE(error_of(arguments).find(expected), std::string::npos) << expected << ": " << error_of(arguments);
  }
}

}  // namespace
}  // namespace train_gpt
