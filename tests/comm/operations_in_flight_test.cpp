// Operations of a gloo group that are interrupted, abandoned or closed, with messages that only the test completes.
#include "core/comm/gloo/operations_in_flight.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include <tessera/errors.h>

namespace tessera::operations_in_flight_test {
using namespace internal;
namespace {

class Message : public TransportMessage {
 public:
  explicit Message(bool is_complete = false, at::Tensor exposed = {})
      : TransportMessage(/*peer=*/1, /*is_send=*/true), is_complete_(is_complete), exposed_(std::move(exposed)) {}
  std::optional<MessageFailure> wait(Deadline) override { return failure(""); }
  void prepare_wait() override { is_interrupted = false; }
  void interrupt() noexcept override { is_interrupted = true; }
  std::string why_disconnected() override { return "gone"; }
  bool complete_without_waiting() noexcept override { return is_complete_; }
  at::Tensor exposed_tensor() const override { return exposed_; }

  bool is_interrupted = false;

 private:
  const bool is_complete_;
  const at::Tensor exposed_;
};

OperationResources with(std::shared_ptr<TransportMessage> message) {
  OperationResources resources;
  resources.messages.push_back(std::move(message));
  return resources;
}

TEST(OperationsInFlight, TheFirstReasonBreaksTheGroup) {
  OperationsInFlight in_flight;
  OperationResources operation;
  in_flight.require_whole("all-gather");
  in_flight.break_group("first");
  in_flight.break_group("second");
  EXPECT_EQ(in_flight.broken(), "first");
  EXPECT_THROW(in_flight.require_whole("all-gather"), CommError);
  EXPECT_THROW(in_flight.add(operation, "all-gather"), CommError);
}

TEST(OperationsInFlight, InterruptEndsTheCurrentWaitAlone) {
  OperationsInFlight in_flight;
  const auto first = std::make_shared<Message>(), second = std::make_shared<Message>();
  EXPECT_EQ(in_flight.why_disconnected(), "");
  EXPECT_TRUE(in_flight.begin_message_wait(first));
  EXPECT_TRUE(in_flight.begin_message_wait(second));
  EXPECT_EQ(in_flight.why_disconnected(), "gone");
  in_flight.interrupt();
  EXPECT_FALSE(first->is_interrupted);
  EXPECT_TRUE(second->is_interrupted);
  in_flight.end_wait();
  in_flight.interrupt();
  EXPECT_FALSE(first->is_interrupted);
}

TEST(OperationsInFlight, AWaitClearsAnEarlierInterruptUnlessTheGroupIsBroken) {
  OperationsInFlight in_flight;
  const auto message = std::make_shared<Message>();
  message->interrupt();
  EXPECT_TRUE(in_flight.begin_message_wait(message));
  EXPECT_FALSE(message->is_interrupted);
  in_flight.break_group("reason");
  message->interrupt();
  EXPECT_FALSE(in_flight.begin_message_wait(message));
  EXPECT_TRUE(message->is_interrupted);
}

TEST(OperationsInFlight, KeepsMessagesThatPeersNeedUntilItIsClosed) {
  OperationsInFlight in_flight;
  GlooTransports none;
  const auto needed = std::make_shared<Message>(), complete = std::make_shared<Message>(true);
  for (const auto& message : {needed, complete}) {
    OperationResources operation = with(message);
    in_flight.add(operation, "all-gather");
    in_flight.remove(operation, /*may_complete=*/true);
  }
  EXPECT_EQ(needed.use_count(), 2);
  EXPECT_EQ(complete.use_count(), 1);
  in_flight.close(none);
  EXPECT_TRUE(in_flight.is_closed());
  EXPECT_EQ(needed.use_count(), 1);
}

TEST(OperationsInFlight, CloseAbortsWhatIsIncomplete) {
  OperationsInFlight in_flight;
  GlooTransports none;
  OperationResources waiting = with(std::make_shared<Message>()), complete;
  in_flight.add(waiting, "all-gather");
  in_flight.add(complete, "all-gather");
  in_flight.close(none);
  EXPECT_TRUE(waiting.is_aborted);
  EXPECT_TRUE(waiting.messages.empty());
  EXPECT_FALSE(complete.is_aborted);
  in_flight.remove(waiting, true);
  in_flight.remove(complete, true);
}

TEST(OperationResources, KeepsTensorsThatAPeerMayStillAccess) {
  const at::Tensor exposed = at::zeros({1});
  std::vector<at::Tensor> keeper;
  with(std::make_shared<Message>(false, exposed)).drop(&keeper);
  with(std::make_shared<Message>()).drop(&keeper);
  with(std::make_shared<Message>(false, exposed)).drop(nullptr);
  ASSERT_EQ(keeper.size(), 1);
  EXPECT_TRUE(keeper[0].is_same(exposed));
}

}  // namespace
}  // namespace tessera::operations_in_flight_test
