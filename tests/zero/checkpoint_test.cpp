// A run saved in one stage continues in another, at any number of ranks.
#include "checkpoint/load/offline.h"
#include "tests/support/random_net.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::checkpoint_test {
using namespace internal;
namespace {

using namespace testing_support;

constexpr int kTrees = 6;
constexpr int kRows = 3;

struct Layout {
  int world;
  int stage;
  int ranks_per_copy = 0;
};

template <class Body>
void under(const Layout& layout, unsigned tree, uint64_t values, Body body) {
  on_ranks(layout.world, [&](std::shared_ptr<Communicator> comm) {
    auto net = seeded(values, [&] { return RandomNet(tree); });
    ZeroOptions options{.stage = layout.stage};
    options.ddp.find_unused_parameters = true;
    options.sdp.reduce_bucket_bytes = 280;
    options.oss.broadcast_bucket_bytes = 300;
    options.fsdp.auto_wrap = wrap_by_size(60);
    options.fsdp.hybrid.ranks_per_copy = layout.ranks_per_copy;
    // Not the fused optimizer: its vectors end where shards do, and round differently there.
    auto model = zero(net, torch::optim::AdamWOptions(1e-2).amsgrad(tree % 2 == 0), comm, options);
    body(model);
  });
}

template <class Model>
void train(Model& model, int begin, int end) {
  const int rank = model.comm()->rank(), world = model.comm()->size();
  for (int step = begin; step < end; ++step) {
    model.zero_grad();
    const at::Tensor x = seeded(500 + step, [&] { return torch::randn({world * kRows, kWidth}); });
    const at::Tensor loss = model(x.narrow(0, rank * kRows, kRows)).square().mean();
    if (loss.requires_grad()) loss.backward();
    model.step();
  }
}

std::string differences(const std::filesystem::path& a, const std::filesystem::path& b) {
  std::string text;
  for (const auto& difference : diff_checkpoints(a, b)) text += difference.name + " " + difference.reason + "; ";
  return text;
}

TEST(StageCheckpoints, TheStateIsTheSameInAnyStageOnAnyNumberOfRanks) {
  const std::vector<Layout> chain = {{4, 1}, {3, 3}, {4, 3, 2}, {1, 0}, {2, 2}, {5, 3}, {3, 1}, {5, 2}, {1, 3}, {4, 2}};
  for (unsigned tree = 0; tree < kTrees; ++tree) {
    const TemporaryFolder folder;
    auto name = [&](size_t link) { return folder / ("at-" + std::to_string(link)); };
    for (size_t link = 0; link < chain.size(); ++link) {
      under(chain[link], tree, 10 + link, [&](auto& model) {
        if (link == 0) {
          train(model, 0, 3);
        } else {
          EXPECT_EQ(load_checkpoint(name(link - 1), model, model.optimizer())["step"], 3);
        }
        save_checkpoint(name(link), model, model.optimizer(), {{"step", 3}});
      });
      if (link == 0) continue;
      EXPECT_EQ(differences(name(0), name(link)), "") << "tree " << tree << ", link " << link;
    }
  }
}

// Stages are bit-equal at one world size, so any may continue another's run.
TEST(StageCheckpoints, TrainingGoesOnBitByBitInAnotherStage) {
  for (unsigned tree = 0; tree < kTrees; ++tree) {
    const TemporaryFolder folder;
    const int world = 1 + static_cast<int>(tree) % 4, last = static_cast<int>(tree) % 4;
    under({world, last}, tree, 1, [&](auto& model) {
      train(model, 0, 6);
      save_checkpoint(folder / "whole", model, model.optimizer());
    });
    const int first = (last + 1 + static_cast<int>(tree) / 4) % 4;
    under({world, first}, tree, 1, [&](auto& model) {
      train(model, 0, 3);
      auto pending = save_checkpoint_async(folder / "half", model, model.optimizer());
      train(model, 3, 4);  // must not change the saved values
      pending.wait();
    });
    under({world, last}, tree, 2, [&](auto& model) {
      load_checkpoint(folder / "half", model, model.optimizer());
      train(model, 3, 6);
      save_checkpoint(folder / "parts", model, model.optimizer());
    });
    EXPECT_EQ(differences(folder / "whole", folder / "parts"), "")
        << "tree " << tree << " world " << world << " stages " << first << " then " << last;
  }
}

}  // namespace
}  // namespace tessera::checkpoint_test
