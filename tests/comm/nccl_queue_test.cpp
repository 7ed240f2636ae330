// The queue of an NCCL group's operations, with operations that the test completes.
#include "core/comm/nccl/nccl_queue.h"

#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <stdexcept>
#include <stop_token>
#include <thread>

namespace tessera::nccl_queue_test {
using namespace internal;
namespace {

using namespace std::chrono_literals;

class FakeWork : public c10d::Work {
 public:
  bool isCompleted() override { return completed; }
  std::exception_ptr exception() const override { return error; }
  bool completed = false;
  std::exception_ptr error;
};

TEST(NcclQueue, RemovesCompletedOperationsInOrder) {
  NcclQueue queue;
  const auto first = c10::make_intrusive<FakeWork>(), second = c10::make_intrusive<FakeWork>();
  queue.push(first, "first");
  queue.push(second, "second");
  second->completed = true;  // the first is not
  auto look = queue.look();
  EXPECT_EQ(look.ended_count, 0);
  EXPECT_EQ(look.oldest->description, "first");
  first->completed = true;
  look = queue.look();
  EXPECT_EQ(look.ended_count, 2);
  EXPECT_EQ(look.ended.size(), 2);
  EXPECT_FALSE(look.oldest);
  queue.wait_until_empty();
}

// A host that runs ahead enqueues operations long before the device begins them.
TEST(NcclQueue, TheTimeOfAnOperationBeginsWhenItIsTheOldest) {
  NcclQueue queue;
  const auto first = c10::make_intrusive<FakeWork>(), second = c10::make_intrusive<FakeWork>();
  queue.push(first, "first");
  queue.push(second, "second");
  const auto enqueued = queue.look().oldest->began;
  std::this_thread::sleep_for(20ms);
  first->completed = true;
  EXPECT_GE(queue.look().oldest->began - enqueued, 20ms);
}

TEST(NcclQueue, AnOperationWithAnErrorStays) {
  NcclQueue queue;
  const auto work = c10::make_intrusive<FakeWork>();
  work->completed = true;
  work->error = std::make_exception_ptr(std::runtime_error("no network"));
  queue.push(work, "all-reduce");
  EXPECT_EQ(queue.look().error, "no network");
  EXPECT_EQ(queue.look().oldest->description, "all-reduce");
}

TEST(NcclQueue, TheEndBeginsOnceAndHasAReasonWhenItIsComplete) {
  NcclQueue queue;
  EXPECT_FALSE(queue.wait_for_end());
  EXPECT_EQ(queue.begin_end(), "an operation");
  EXPECT_FALSE(queue.begin_end());
  EXPECT_TRUE(queue.look().ends);
  EXPECT_FALSE(queue.reason_to_tell());
  std::thread ends([&] { queue.complete_end("rank 1 failed", /*is_told=*/false); });
  EXPECT_EQ(queue.wait_for_end()->reason, "rank 1 failed");
  ends.join();
  EXPECT_FALSE(queue.wait_for_end()->is_told);
  EXPECT_EQ(queue.reason_to_tell(), "rank 1 failed");
  EXPECT_TRUE(queue.wait_for_end()->is_told);
}

TEST(NcclQueue, ACompleteEndStopsTheWaitForOperations) {
  NcclQueue queue;
  queue.push(c10::make_intrusive<FakeWork>(), "all-reduce");
  EXPECT_EQ(queue.begin_end(), "all-reduce");
  std::thread ends([&] { queue.complete_end("reason", true); });
  queue.wait_until_empty();
  ends.join();
}

TEST(NcclQueue, AStopEndsASleep) {
  NcclQueue queue;
  std::stop_source source;
  EXPECT_TRUE(queue.sleep(source.get_token(), 1ms));
  source.request_stop();
  EXPECT_FALSE(queue.sleep(source.get_token(), 60s));
}

}  // namespace
}  // namespace tessera::nccl_queue_test
