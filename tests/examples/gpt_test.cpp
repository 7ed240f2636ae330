#include "gpt.h"

#include <gtest/gtest.h>

#include <cmath>

#include "model.h"

namespace train_gpt {
namespace {

constexpr GptOptions kSmall{.vocabulary = 11, .layers = 2, .width = 12, .heads = 3, .context = 8};

at::Tensor random_tokens(int64_t batch, int64_t length) {
  return torch::randint(kSmall.vocabulary, {batch, length}, torch::kInt64);
}

TEST(Gpt, LogitsForEveryPlaceOfAnyLengthUpToTheContext) {
  Gpt model(kSmall);
  for (const int64_t length : {1, 5, 8}) {
    EXPECT_EQ(model->forward(random_tokens(3, length)).sizes(), (std::vector<int64_t>{3, length, 11}));
  }
  EXPECT_THROW(model->forward(random_tokens(1, 9)), c10::Error);
}

TEST(Gpt, ALaterTokenDoesNotChangeEarlierLogits) {
  torch::manual_seed(1);
  const torch::NoGradGuard no_grad;
  Gpt model(kSmall);
  const auto tokens = random_tokens(2, 8);
  const auto before = model->forward(tokens);
  for (int64_t place = 0; place < 8; ++place) {
    auto changed = tokens.clone();
    changed.select(1, place).add_(1).remainder_(kSmall.vocabulary);
    const auto after = model->forward(changed);
    EXPECT_TRUE(at::allclose(after.narrow(1, 0, place), before.narrow(1, 0, place), 1e-6, 1e-7));
    EXPECT_FALSE(at::allclose(after.select(1, place), before.select(1, place)));
    EXPECT_FALSE(at::allclose(after.select(1, 7), before.select(1, 7))) << "the last place sees all before it";
  }
}

TEST(Gpt, TiedWeightsAreOneTensor) {
  auto options = kSmall;
  options.tie = true;
  Gpt tied(options), untied(kSmall);
  const auto names = tied->named_parameters();
  EXPECT_FALSE(names.contains("head.weight"));
  EXPECT_EQ(names.size() + 1, untied->named_parameters().size());

  // The row of a token that is not in the input affects only that token's logits.
  const torch::NoGradGuard no_grad;
  const int64_t absent = 10;
  const auto tokens = random_tokens(1, 4).remainder(absent);
  const auto before = tied->forward(tokens);
  tied->named_parameters()["token_embedding.weight"][absent].mul_(2);
  const auto after = tied->forward(tokens);
  EXPECT_TRUE(at::allclose(after.select(2, absent), 2 * before.select(2, absent), 1e-4, 1e-6));
  EXPECT_TRUE(at::equal(after.narrow(2, 0, absent), before.narrow(2, 0, absent)));
}

TEST(Gpt, InitialLossIsNearThatOfGuessing) {
  torch::manual_seed(1);
  Gpt model(GptOptions{.vocabulary = 64, .layers = 4, .width = 64, .heads = 4, .context = 32});
  const auto tokens = torch::randint(64, {8, 32}, torch::kInt64);
  const auto loss = at::cross_entropy_loss(model->forward(tokens).flatten(0, 1), tokens.roll(1, 1).flatten());
  EXPECT_NEAR(loss.item<double>(), std::log(64.0), 1.0);
}

TEST(Gpt, RefusesWhatCannotBeMeant) {
  auto options = kSmall;
  options.heads = 5;
  EXPECT_THROW(Gpt{options}, std::invalid_argument);
  options = kSmall;
  options.layers = 0;
  EXPECT_THROW(Gpt{options}, std::invalid_argument);
}

TEST(MatrixNames, AreWeightsNotBiasesOrNorms) {
  const auto names = matrix_names(*Gpt(kSmall));
  EXPECT_TRUE(names.contains("blocks.1.attention.qkv.weight"));
  EXPECT_TRUE(names.contains("token_embedding.weight"));
  EXPECT_FALSE(names.contains("blocks.1.attention.qkv.bias"));
  EXPECT_FALSE(names.contains("norm.weight"));
}

}  // namespace
}  // namespace train_gpt
