#include "tessera/sdp/ddp_reducer.h"

#include <ATen/core/jit_type.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <cmath>
#include <deque>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "tessera/comm/process_group.h"

namespace tessera {
namespace {

// All-reduces under way while the next bucket fills up. Each holds room for what the peers send.
constexpr size_t kBucketsInFlight = 1;

int64_t bytes_of_mb(double mb) { return static_cast<int64_t>(std::llround(mb * 1024 * 1024)); }

}  // namespace

struct DdpReducer::Transport : std::enable_shared_from_this<DdpReducer::Transport> {
  struct Flight {
    at::Tensor bucket;
    at::Tensor wire;  // the bucket, or its values in another dtype
    c10::intrusive_ptr<c10::ivalue::Future> done;
    Pending pending;
  };

  std::shared_ptr<Communicator> comm;
  GradientCompression compression;
  bool backend_all_reduce;
  std::deque<Flight> flights;
  bool callback_queued = false;
  bool is_last_moment = false;  // the Reducer waits right after it has given its buckets

  c10::intrusive_ptr<c10::ivalue::Future> send(const at::Tensor& bucket, size_t index) {
    at::NoGradGuard no_grad;
    Flight flight{bucket, bucket, nullptr, {}};
    if (compression != GradientCompression::kNone)
      flight.wire = bucket.to(compression == GradientCompression::kFp16 ? at::kHalf : at::kBFloat16);
    std::vector<c10::Device> devices;
    if (!comm->device().is_cpu()) devices.push_back(comm->device());
    flight.done = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), devices);
    const std::string what = "gradient bucket " + std::to_string(index);
    flight.pending = backend_all_reduce ? tessera::backend_all_reduce(*comm, flight.wire, what)
                                        : comm->all_reduce(flight.wire, ReduceOp::kAverage, what);
    auto done = flight.done;
    flights.push_back(std::move(flight));
    while (flights.size() > (is_last_moment ? 0 : kBucketsInFlight)) finish_oldest();
    if (!flights.empty() && !std::exchange(callback_queued, true))
      torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] {
        self->callback_queued = false;
        while (!self->flights.empty()) self->finish_oldest();
      });
    return done;
  }

  void finish_oldest() {
    at::NoGradGuard no_grad;
    Flight flight = std::move(flights.front());
    flights.pop_front();
    flight.pending.wait();
    if (!flight.wire.is_same(flight.bucket)) flight.bucket.copy_(flight.wire);
    if (backend_all_reduce) flight.bucket.div_(comm->size());
    flight.done->markCompleted(flight.bucket);
  }
};

namespace {

class TransportHook : public c10d::CppCommHookInterface<std::shared_ptr<DdpReducer::Transport>> {
 public:
  using CppCommHookInterface::CppCommHookInterface;
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    return state_->send(bucket.getBufferRef(), bucket.getIndex());
  }
};

}  // namespace

DdpReducer::DdpReducer(std::vector<PlannedParameter> parameters, std::shared_ptr<Communicator> comm,
                       const DdpOptions& options)
    : options_(options), transport_(std::make_shared<Transport>()) {
  transport_->comm = comm;
  transport_->compression = options.compression;
  transport_->backend_all_reduce = options.backend_all_reduce;
  std::vector<at::Tensor> trainable;
  std::unordered_map<size_t, std::string> names;
  for (const PlannedParameter& parameter : parameters) {
    if (!parameter.tensor.requires_grad()) continue;
    names[trainable.size()] = parameter.fqn;
    trainable.push_back(parameter.tensor);
  }
  const int64_t first_bytes = bytes_of_mb(options.first_bucket_mb), cap_bytes = bytes_of_mb(options.bucket_cap_mb);
  // Backward meets the last parameters first.
  std::vector<at::Tensor> last_first(trainable.rbegin(), trainable.rend());
  std::vector<int64_t> indices(trainable.size());
  for (size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<int64_t>(indices.size() - 1 - i);
  auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(
      last_first, {static_cast<size_t>(first_bytes), static_cast<size_t>(cap_bytes)}, {}, indices);
  reducer_ = std::make_shared<c10d::Reducer>(
      trainable, std::move(buckets), process_group_over(std::move(comm)), std::vector<bool>(trainable.size(), false),
      cap_bytes, options.find_unused_parameters, options.gradient_as_bucket_view, std::move(names), first_bytes,
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
      std::vector<int64_t>{first_bytes, cap_bytes});
  logger_ = std::make_shared<c10d::Logger>(reducer_);
  reducer_->set_logger(logger_);
  reducer_->register_comm_hook(std::make_unique<TransportHook>(transport_));
  if (options.static_graph) reducer_->set_static_graph();
}

DdpReducer::~DdpReducer() { reducer_->remove_autograd_hooks(); }

void DdpReducer::begin_forward() {
  reducer_->prepare_for_forward();
  reducer_->rebuild_buckets();
}

void DdpReducer::expect_backward(const std::vector<at::Tensor>& outputs) {
  transport_->flights.clear();  // of a backward that an exception has cut short
  transport_->callback_queued = false;
  if (options_.static_graph && std::exchange(is_first_, false)) watch_first_backward(outputs);
  reducer_->prepare_for_backward(options_.find_unused_parameters && !options_.static_graph ? outputs
                                                                                           : std::vector<at::Tensor>());
}

// With a static graph the Reducer only counts in the first backward, and wants to be told when that
// is over, to reduce everything then (in Python, _DDPSink does it).
void DdpReducer::watch_first_backward(const std::vector<at::Tensor>& outputs) {
  auto queued = std::make_shared<bool>(false);
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    output.register_hook([queued, reducer = reducer_, transport = transport_](const at::Tensor&) {
      if (std::exchange(*queued, true)) return;
      torch::autograd::Engine::get_default_engine().queue_callback([reducer, transport] {
        transport->is_last_moment = true;
        reducer->delay_all_reduce();
        transport->is_last_moment = false;
      });
    });
  }
}

}  // namespace tessera
