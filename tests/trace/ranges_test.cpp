// The ranges of a profiler (TESSERA_NVTX), in a sink that checks how they nest.
#include "core/trace/ranges.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include <tessera/tessera.h>
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::ranges_test {
using namespace internal;
namespace {

// Active from construction to destruction.
class FakeSink final : public RangeSink {
 public:
  FakeSink() : former_(exchange(this)) {}
  ~FakeSink() override { exchange(former_); }

  void push(const std::string& name) override {
    std::lock_guard lock(mutex_);
    open_[std::this_thread::get_id()].push_back(name);
    names_.push_back(name);
  }
  void pop() override {
    std::lock_guard lock(mutex_);
    auto& open = open_[std::this_thread::get_id()];
    if (open.empty()) {
      ++unmatched_;
    } else {
      open.pop_back();
    }
  }
  uint64_t start(const std::string& name) override {
    std::lock_guard lock(mutex_);
    names_.push_back(name);
    started_.insert(++last_id_);
    return last_id_;
  }
  void end(uint64_t id) override {
    std::lock_guard lock(mutex_);
    unmatched_ += 1 - static_cast<int>(started_.erase(id));
  }

  bool is_balanced() {
    std::lock_guard lock(mutex_);
    return unmatched_ == 0 && started_.empty() &&
           std::ranges::all_of(open_, [](const auto& entry) { return entry.second.empty(); });
  }
  size_t count(const std::string& name) {
    std::lock_guard lock(mutex_);
    return static_cast<size_t>(std::ranges::count(names_, name));
  }

 private:
  RangeSink* const former_;
  std::mutex mutex_;
  std::map<std::thread::id, std::vector<std::string>> open_;
  std::set<uint64_t> started_;
  std::vector<std::string> names_;
  uint64_t last_id_ = 0;
  int unmatched_ = 0;
};

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("a", a);
    register_module("b", b);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = a(x);
    if (fails) throw std::runtime_error("a bad batch");
    return b(y);
  }
  bool fails = false;
  torch::nn::Linear a{4, 4}, b{4, 4};
};
TORCH_MODULE(Net);

template <class Wrapper>
void train(Net net, Wrapper& wrapper, torch::optim::Optimizer& optimizer, FakeSink& sink) {
  const at::Tensor x = torch::ones({2, 4});
  for (int step = 0; step < 2; ++step) {
    wrapper(x).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  net->fails = true;
  EXPECT_THROW(wrapper(x), std::runtime_error);
  EXPECT_TRUE(sink.is_balanced()) << "after an exception in forward";
  net->fails = false;
  wrapper(x).sum().backward();
}

TEST(Ranges, ShowUnitsCollectivesStepsAndSavesAndAreBalanced) {
  const testing_support::TemporaryFolder folder;
  FakeSink sink;
  run_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    Net net;
    FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
    AdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(0.1));
    train(net, fsdp, optimizer, sink);
    save_checkpoint(folder.path() / "saved", fsdp, optimizer);
    save_checkpoint_async(folder.path() / "async", fsdp, optimizer).wait();
  });
  EXPECT_TRUE(sink.is_balanced());
  EXPECT_EQ(sink.count("forward of unit 'a'"), 4u);
  EXPECT_EQ(sink.count("forward of unit 'b'"), 3u);
  EXPECT_GE(sink.count("backward of unit 'b'"), 3u);
  EXPECT_EQ(sink.count("a fused step"), 2u);
  EXPECT_EQ(sink.count("saving " + (folder.path() / "saved").string()), 1u);
  EXPECT_EQ(sink.count("start of saving " + (folder.path() / "async").string()), 1u);
}

TEST(Ranges, ShowReplicatedPassesAndEachOperationAndItsWait) {
  FakeSink sink;
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    at::Tensor x = torch::ones({4});
    auto pending = comm->all_reduce(x, ReduceOp::kSum, "x");
    pending.wait();
    Net net;
    DistributedDataParallel ddp(net, comm);
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    const at::Tensor batch = torch::ones({2, 4});
    const at::Tensor loss = ddp(batch).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    optimizer.step();
    net->fails = true;
    EXPECT_THROW(ddp(batch), std::runtime_error);
    net->fails = false;
    const at::Tensor y = ddp(batch);
    y.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a bad gradient"); });
    EXPECT_THROW(y.sum().backward(), std::runtime_error);
  });
  EXPECT_TRUE(sink.is_balanced());
  EXPECT_EQ(sink.count("all-reduce of x"), 2u);
  EXPECT_EQ(sink.count("wait for all-reduce of x"), 2u);
  EXPECT_EQ(sink.count("forward"), 6u);
  EXPECT_EQ(sink.count("backward"), 6u);
}

}  // namespace
}  // namespace tessera::ranges_test
