// Tests that the simulation finds planted faults: it drops a request of the library for an order, wait or lifetime.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>

#include "tests/accelerator/simulated_training.h"

namespace tessera::accelerator_faults_test {
using namespace internal;
namespace {

using namespace accelerator_training;
using accelerator::Request;
using accelerator::Simulation;

struct Fault {
  const char* name;
  const char* training;  // name of the training case in which the fault is planted
  Request request;
  const char* place;   // drops requests with this function in their call stack
  int delay_us = 200;  // longest delay with the first seed; larger if the host takes long between the two accesses
};
void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.name; }

constexpr Fault kFaults[] = {
    {"a_gather_begins_too_soon", "fsdp_bf16", Request::kCollectiveBegins, "Unit::unshard"},
    {"a_reduction_begins_too_soon", "fsdp", Request::kCollectiveBegins, "Communicator::reduce_scatter"},
    {"a_unit_is_used_before_its_gather_ends", "fsdp", Request::kCollectiveEnds, "Unit::wait_for_unshard"},
    {"a_gradient_is_used_before_its_reduction_ends", "fsdp", Request::kCollectiveEnds, "ReductionQueue::"},
    {"a_copy_crosses_before_its_reduction_ends", "fsdp_hybrid", Request::kCollectiveEnds, "ReductionQueue::"},
    {"a_fetch_begins_too_soon", "fsdp_offload", Request::kBlock, "CopyEngine::checked_start"},
    {"a_gather_does_not_wait_for_the_fetch", "fsdp_offload", Request::kBlock, "Unit::unshard"},
    {"the_host_steps_before_gradients_are_there", "fsdp_offload_host_adam", Request::kSynchronize, "ReductionQueue::"},
    {"a_second_stream_does_not_wait_for_the_gather", "fsdp_branches", Request::kBlock, "StreamUses::use"},
    {"a_unit_is_freed_under_a_second_stream", "fsdp_branches", Request::kBlock, "StreamUses::join"},
    {"memory_goes_back_before_its_users_are_through", "fsdp_two_streams", Request::kBlock, "Unit::reshard"},
    {"an_event_is_never_recorded", "fsdp_branches", Request::kRecord, "order_streams"},
    {"an_input_is_fetched_before_it_is_there", "fsdp_activations", Request::kBlock, "Pipeline::fetch"},
    {"an_input_goes_back_before_it_is_used", "fsdp_activations_branches", Request::kRecordStream, "Pipeline::fetch"},
    {"an_input_goes_back_before_it_has_left", "fsdp_activations_towers", Request::kRecordStream, "Pipeline::keep",
     6000},
    {"a_gradient_goes_back_before_it_is_copied", "fsdp_one_unit_towers", Request::kRecordStream,
     "BucketContent::copy_waiting"},
    {"a_gradient_goes_back_before_it_is_reduced", "sdp_towers", Request::kRecordStream, "ReductionQueue::"},
    {"a_step_begins_before_parameters_are_published", "sdp", Request::kCollectiveEnds, "ShardedOptimizer::publish"},
};

class PlantedFaults : public testing::TestWithParam<Fault> {};
INSTANTIATE_TEST_SUITE_P(Faults, PlantedFaults, testing::ValuesIn(kFaults),
                         [](const auto& instance) { return instance.param.name; });

// Returns whether a training with the planted fault reports an error: of the simulation or of the library's own checks.
bool is_found(const Fault& fault, uint64_t seed) {
  std::atomic<int> left_out = 0;
  const Simulation simulation({.seed = seed,
                               .longest_delay_us = fault.delay_us * static_cast<int>(seed),
                               .leave_out = [&](Request request, std::string_view place) {
                                 const bool here =
                                     request == fault.request && place.find(fault.place) != std::string_view::npos;
                                 left_out += here ? 1 : 0;
                                 return here;
                               }});
  const std::string error =
      testing_support::error_of<std::exception>([&] { train_on_devices(case_named(fault.training)); });
  EXPECT_GT(left_out, 0) << "nothing asks for it there";
  return !Simulation::findings().empty() || !error.empty();
}

// A run has no race if the host is late and finds the device's work completed, for example because an allocator queries
// events. So tries growing delays of the device until the fault is found.
TEST_P(PlantedFaults, AreFound) {
  bool found = false;
  for (const uint64_t seed : accelerator::seeds(6)) found = found || is_found(GetParam(), seed);
  EXPECT_TRUE(found);
}

// The planted fault: one rank once starts two collectives of a group in swapped order.
TEST(PlantedOrder, OfIssueIsFound) {
  std::atomic<int> times = 0;
  const Simulation simulation({.leave_out = [&](Request request, std::string_view place) {
    return request == Request::kCollectiveInTurn &&
           place.find("Communicator::reduce_scatter") != std::string_view::npos && times++ == 1;
  }});
  const std::string error = testing_support::error_of<CommError>(
      [&] { train_on_devices(case_named("fsdp"), {.timeout = std::chrono::seconds(2)}); });
  EXPECT_GT(times, 1);
  testing_support::expect_contains(error, "timed out after 2 s");
  ASSERT_FALSE(Simulation::findings().empty());
  testing_support::expect_contains(Simulation::findings()[0], "of a group is ");
}

}  // namespace
}  // namespace tessera::accelerator_faults_test
