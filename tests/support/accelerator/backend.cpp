#include "tests/support/accelerator/backend.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/StringUtil.h>
#include <torch/serialize.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>

#include "core/comm/rank_order_sum.h"
#include "tests/support/accelerator/accelerator.h"
#include "tests/support/accelerator/graphs.h"
#include "tests/support/accelerator/kernel_arguments.h"
#include "tests/support/accelerator/memory.h"
#include "tests/support/accelerator/races.h"

namespace tessera::accelerator {
using namespace internal;

class SimulatedGroup {
 public:
  using Inputs = std::vector<std::vector<at::Tensor>>;
  explicit SimulatedGroup(int size) : size_(size), aborted_(size, false), ended_(size, false) {}

  // Returns the group of all ranks that share this store.
  static std::shared_ptr<SimulatedGroup> join(const c10::intrusive_ptr<c10d::Store>& shared, int rank, int size) {
    if (groups_span_processes) {
      auto group = std::make_shared<SimulatedGroup>(size);
      group->store_ = shared;
      return group;
    }
    c10d::Store& store = *shared;
    static std::mutex mutex;
    static std::map<int64_t, std::weak_ptr<SimulatedGroup>> groups;
    static int64_t next = 0;
    const std::string key = "simulated nccl";
    if (rank > 0) {
      store.wait({key});
      std::lock_guard lock(mutex);
      if (auto group = groups.at(std::stoll(store.get_to_str(key))).lock()) return group;
      throw std::runtime_error("the group ended before all had joined");
    }
    auto group = std::make_shared<SimulatedGroup>(size);
    std::lock_guard lock(mutex);
    groups[next] = group;
    store.set(key, std::to_string(next++));
    return group;
  }

  // Blocks until all ranks have arrived. Returns the inputs of all ranks, or nullopt if this rank aborts.
  std::optional<Inputs> meet(uint64_t sequence, int rank, const std::string& what, std::vector<at::Tensor> inputs) {
    if (store_) return meet_by_store(sequence, rank, what, inputs);
    std::unique_lock lock(mutex_);
    Collective& collective = collectives_[sequence];
    collective.inputs.resize(size_);
    collective.inputs[rank] = std::move(inputs);
    if (collective.what.empty()) {
      collective.what = what;
      collective.first = rank;
    } else if (collective.what != what && !std::exchange(collective.differs, true)) {
      Races::get().found(c10::str("collective #", sequence, " of a group is ", collective.what, " on rank ",
                                  collective.first, " and ", what, " on rank ", rank, ": it hangs"));
    }
    ++collective.arrived;
    changed_.notify_all();
    changed_.wait(lock, [&] { return aborted_[rank] || (collective.arrived == size_ && !collective.differs); });
    return aborted_[rank] ? std::nullopt : std::optional(collective.inputs);
  }

  // Blocks until all ranks have read the inputs. Returns false if this rank aborts.
  bool all_have_read(uint64_t sequence, int rank) {
    if (store_) return !is_aborted(rank);  // each rank has its own copies of the inputs
    std::unique_lock lock(mutex_);
    Collective& collective = collectives_.at(sequence);
    ++collective.read;
    changed_.notify_all();
    changed_.wait(lock, [&] { return aborted_[rank] || collective.read >= size_; });
    if (aborted_[rank]) return false;
    if (++collective.left == size_) collectives_.erase(sequence);
    return true;
  }

  void abort(int rank) {
    std::lock_guard lock(mutex_);
    aborted_[rank] = ended_[rank] = true;
    changed_.notify_all();
  }
  void end_with_others(int rank) {
    std::unique_lock lock(mutex_);
    ended_[rank] = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return std::ranges::find(ended_, false) == ended_.end(); });
  }
  bool is_aborted(int rank) {
    std::lock_guard lock(mutex_);
    return aborted_[rank];
  }
  void wait_for_abort(int rank) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return aborted_[rank]; });
  }

 private:
  struct Collective {
    std::string what;
    int first = 0, arrived = 0, read = 0, left = 0;
    bool differs = false;
    Inputs inputs;
  };

  // Exchanges inputs with the other processes as bytes. If a rank does not answer, blocks until abort().
  std::optional<Inputs> meet_by_store(uint64_t sequence, int rank, const std::string& what,
                                      const std::vector<at::Tensor>& inputs) {
    const auto key = [](uint64_t of, int from) { return c10::str("simulated nccl ", of, " of rank ", from); };
    try {
      std::vector<at::Tensor> copies;  // cloned, because pickle_save() would save whole storages
      for (const at::Tensor& input : inputs) copies.push_back(input.clone());
      const std::vector<char> bytes = torch::pickle_save(c10::IValue(std::make_tuple(what, copies)));
      store_->set(key(sequence, rank), std::vector<uint8_t>(bytes.begin(), bytes.end()));
      Inputs all;
      for (int other = 0; other < size_; ++other) {
        while (!store_->check({key(sequence, other)})) {
          if (is_aborted(rank)) return std::nullopt;
          std::this_thread::sleep_for(std::chrono::microseconds(300));
        }
        const std::vector<uint8_t> theirs = store_->get(key(sequence, other));
        const auto elements = torch::pickle_load(std::vector<char>(theirs.begin(), theirs.end())).toTuple();
        if (elements->elements()[0].toStringRef() != what)
          throw std::runtime_error(c10::str(what, " meets ", elements->elements()[0].toStringRef()));
        all.push_back(elements->elements()[1].toTensorVector());
      }
      if (sequence > 0) store_->deleteKey(key(sequence - 1, rank));  // all ranks have read it
      return all;
    } catch (const std::exception&) {  // the store has ended, or the collectives differ; hangs, as NCCL would
      wait_for_abort(rank);
      return std::nullopt;
    }
  }

  const int size_;
  c10::intrusive_ptr<c10d::Store> store_;  // null: the ranks are threads of this process
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Collective> collectives_;
  std::vector<bool> aborted_, ended_;
};

namespace {

// Owns the tensors of collectives without a wait() until the collectives complete, like c10d.
struct Shelf {
  std::mutex mutex;
  std::vector<std::pair<Point, std::vector<at::Tensor>>> kept;

  void clear(int device) {
    std::vector<std::vector<at::Tensor>> over;  // destroyed after the lock is released
    std::lock_guard lock(mutex);
    std::erase_if(kept, [&](auto& entry) {
      if (!query(entry.first, device)) return false;
      over.push_back(std::move(entry.second));
      return true;
    });
  }
};
Shelf& shelf() {
  static auto* shelf = new Shelf;
  return *shelf;
}

class SimulatedWork final : public c10d::Work {
 public:
  SimulatedWork(Point end, int device, std::shared_ptr<SimulatedGroup> group, int rank, std::vector<at::Tensor> tensors,
                std::vector<at::Tensor> outputs, const std::string& failure)
      : end_(std::move(end)),
        device_(device),
        group_(std::move(group)),
        rank_of_group_(rank),
        tensors_(std::move(tensors)),
        outputs_(std::move(outputs)) {
    if (!failure.empty()) exception_ = std::make_exception_ptr(std::runtime_error(failure));
  }
  // Does not copy the tensors, like WorkNCCL's copy constructor.
  SimulatedWork(const SimulatedWork& other)
      : c10d::Work(),
        end_(other.end_),
        device_(other.device_),
        group_(other.group_),
        rank_of_group_(other.rank_of_group_) {
    exception_ = other.exception();
  }
  ~SimulatedWork() override {
    if (tensors_.empty()) return;
    std::lock_guard lock(shelf().mutex);
    shelf().kept.emplace_back(std::move(end_), std::move(tensors_));
  }
  bool isCompleted() override { return exception() != nullptr || end_.reached->is_past(); }
  bool isSuccess() const override { throw std::logic_error("WorkNCCL::isSuccess() is deprecated"); }
  bool wait(std::chrono::milliseconds) override {
    if (group_->is_aborted(rank_of_group_)) throw std::runtime_error("NCCL communicator was aborted");
    if (!is_left_out(Request::kCollectiveEnds)) block(current_stream(device_), end_);
    tensors_.clear();
    return true;
  }
  void synchronize() override { wait({}); }

 private:
  Point end_;
  const int device_;
  const std::shared_ptr<SimulatedGroup> group_;
  const int rank_of_group_;
  std::vector<at::Tensor> tensors_;
  const std::vector<at::Tensor> outputs_;  // owned until destruction, as WorkNCCL does for result()
};

void copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  if (to.const_data_ptr() != from.const_data_ptr() && to.numel() > 0)
    std::memmove(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
}

ReduceOp reduce_op(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAverage;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    default:
      throw std::invalid_argument("simulated nccl: this reduction is not one of Tessera's");
  }
}

// Adds in the order of a ring, rounding each sum. Splits tensors into one chunk per rank; chunk r starts with rank r.
at::Tensor reduced_by_ring(const std::vector<at::Tensor>& parts, ReduceOp op) {
  const auto size = static_cast<int64_t>(parts.size());
  std::vector<std::vector<at::Tensor>> chunks;
  for (const at::Tensor& part : parts) chunks.push_back(part.tensor_split(size));
  at::Tensor all = at::empty_like(parts[0]);
  std::vector<at::Tensor> sums = all.tensor_split(size);
  const ReduceOp step = op == ReduceOp::kAverage ? ReduceOp::kSum : op;
  for (int64_t chunk = 0; chunk < size; ++chunk) {
    at::Tensor sum = chunks[chunk][chunk].clone();
    for (int64_t hop = 1; hop < size && sum.numel() > 0; ++hop)
      reduce_in_rank_order(sum, {sum, chunks[(chunk + hop) % size][chunk]}, step);
    sums[chunk].copy_(op == ReduceOp::kAverage ? sum / static_cast<double>(size) : sum);
  }
  return all;
}

// Returns the reduction of elements [begin, begin + numel) of each rank's first input.
at::Tensor reduced(const std::vector<std::vector<at::Tensor>>& inputs, int64_t begin, int64_t numel, ReduceOp op) {
  std::vector<at::Tensor> parts;
  for (const auto& input : inputs) parts.push_back(input[0].view({-1}).narrow(0, begin, numel));
  if (settings().sums_by_ring) return reduced_by_ring(parts, op);
  at::Tensor sum = parts[0].clone();
  if (numel > 0) reduce_in_rank_order(sum, parts, op);
  return sum;
}

}  // namespace

Backend::Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, at::Device device)
    : c10d::Backend(rank, size),
      device_(device),
      owns_stream_(!settings().collectives_in_order),
      stream_(owns_stream_ ? take_stream(device.index()) : stream_of(device.index(), kOrderedStream)),
      group_(SimulatedGroup::join(store, rank, size)) {
  setBoundDeviceId(device);
}

Backend::~Backend() {
  if (!std::exchange(ended_, true)) {
    if (!record(stream_).reached->is_past())
      Races::get().found("a group was destroyed without shutdown(), which aborts the kernels in flight");
    group_->abort(rank_);
  }
  if (!owns_stream_) return;
  wait_in_secret(stream_);
  give_stream(stream_);
}

void Backend::abort() {
  ended_ = true;
  group_->abort(rank_);
}

void Backend::shutdown() {
  synchronize(stream_, "shut a group down");
  if (settings().groups_end_together) group_->end_with_others(rank_);
  ended_ = true;
}

c10::intrusive_ptr<c10d::Work> Backend::start(const std::string& name, int64_t numel,
                                              const std::vector<at::Tensor>& inputs,
                                              const std::vector<at::Tensor>& outputs, Kernel kernel) {
  // Throws for types that nccl.h does not have, like ProcessGroupNCCL.
  for (const at::Tensor& tensor : inputs)
    if (tensor.scalar_type() == at::kShort || tensor.is_complex())
      throw std::runtime_error(c10::str("Unconvertible NCCL type ", tensor.scalar_type()));
  if (group_->is_aborted(rank_)) throw std::runtime_error("NCCL communicator was aborted");
  if (recording_of(current_stream(device_.index())) == 0) shelf().clear(device_.index());
  if (!outputs.empty() && std::ranges::all_of(outputs, [&](const at::Tensor& tensor) {
        return is_registered_with(tensor.const_data_ptr(), registration_);
      }))
    Races::get().count_registered(device_.index());
  c10::DeviceGuard guard(device_);
  if (!is_left_out(Request::kCollectiveBegins)) block(stream_, record(current_stream(device_.index())));

  std::vector<Access> accesses;
  std::vector<at::Tensor> tensors, host_inputs, host_outputs;
  for (const at::Tensor& tensor : inputs) {
    accesses.push_back(access_of(tensor, false));
    host_inputs.push_back(tensor.is_cuda() ? for_kernels(tensor) : tensor);
  }
  for (const at::Tensor& tensor : outputs) {
    accesses.push_back(access_of(tensor, true));
    host_outputs.push_back(for_kernels(tensor));
  }
  tensors.insert(tensors.end(), inputs.begin(), inputs.end());
  tensors.insert(tensors.end(), outputs.begin(), outputs.end());
  const std::string what = c10::str(name, " of ", numel, " elements");
  const std::string failure = settings().fails ? settings().fails(device_.index(), what) : "";
  const bool fails = !failure.empty();
  // Takes a sequence number at each replay, not at the recording: a recorded collective that never runs has none.
  launch_prepared(stream_, what, accesses, [=, this, group = group_, rank = rank_](int) {
    return [=, sequence = next_sequence()] {
      if (fails) return group->wait_for_abort(rank);
      const auto met = group->meet(sequence, rank, what, host_inputs);
      bool is_read = false, is_aborted = !met;
      if (met) {
        kernel(*met, [&] {
          is_read = true;
          is_aborted = !group->all_have_read(sequence, rank);
          return !is_aborted;
        });
        if (!is_read) group->all_have_read(sequence, rank);
      }
      if (!is_aborted) return;
      for (const at::Tensor& output : host_outputs)
        if (output.numel() > 0) std::memset(output.mutable_data_ptr(), 0xff, output.nbytes());
    };
  });
  return c10::make_intrusive<SimulatedWork>(record(stream_), device_.index(), group_, rank_, std::move(tensors),
                                            outputs, failure);
}

c10::intrusive_ptr<c10d::Work> without_tensors(const c10::intrusive_ptr<c10d::Work>& work) {
  const auto* const own = dynamic_cast<const SimulatedWork*>(work.get());
  if (own == nullptr) return work;
  return c10::make_intrusive<SimulatedWork>(*own);
}

uint64_t Backend::next_sequence() {
  if (late_) return *std::exchange(late_, std::nullopt);
  if (is_left_out(Request::kCollectiveInTurn)) late_ = sequence_++;
  return sequence_++;
}

void release_collectives_tensors() {
  for (int device = 0; device < kDevices; ++device) shelf().clear(device);
}

int64_t Backend::next_registration() {
  static std::atomic<int64_t> last = 0;
  return ++last;
}

at::Tensor Backend::allocateTensor(long numel, at::TensorOptions options) {
  c10::DeviceGuard guard(device_);
  const RegisteredScope registered(registration_);
  return at::empty({numel}, options.device(device_));
}

Backend::Work Backend::_allgather_base(at::Tensor& full, at::Tensor& own, const c10d::AllgatherOptions&) {
  return start("all-gather", full.numel(), {own}, {full},
               [to = for_kernels(full).view({-1})](const Inputs& inputs, const auto&) {
                 int64_t begin = 0;
                 for (const auto& input : inputs) {
                   copy_bytes(to.narrow(0, begin, input[0].numel()), input[0]);
                   begin += input[0].numel();
                 }
               });
}

Backend::Work Backend::allgather(std::vector<std::vector<at::Tensor>>& parts, std::vector<at::Tensor>& own,
                                 const c10d::AllgatherOptions&) {
  std::vector<at::Tensor> to;
  int64_t numel = 0;
  for (const at::Tensor& part : parts.at(0)) {
    to.push_back(for_kernels(part));
    numel += part.numel();
  }
  return start("all-gather", numel, own, parts[0], [to](const Inputs& inputs, const auto&) {
    for (size_t rank = 0; rank < inputs.size(); ++rank) copy_bytes(to[rank], inputs[rank][0]);
  });
}

Backend::Work Backend::_reduce_scatter_base(at::Tensor& own, at::Tensor& full,
                                            const c10d::ReduceScatterOptions& options) {
  return start("reduce-scatter", full.numel(), {full}, {own},
               [to = for_kernels(own), rank = rank_, op = reduce_op(options.reduceOp)](const Inputs& inputs,
                                                                                       const auto& all_have_read) {
                 const at::Tensor sum = reduced(inputs, rank * to.numel(), to.numel(), op);
                 if (all_have_read()) copy_bytes(to, sum);
               });
}

Backend::Work Backend::reduce_scatter(std::vector<at::Tensor>& own, std::vector<std::vector<at::Tensor>>& parts,
                                      const c10d::ReduceScatterOptions& options) {
  int64_t numel = 0;
  for (const at::Tensor& part : parts.at(0)) numel += part.numel();
  return start("reduce-scatter", numel, parts[0], own,
               [to = for_kernels(own.at(0)), rank = rank_, op = reduce_op(options.reduceOp)](
                   const Inputs& inputs, const auto& all_have_read) {
                 Inputs of_mine;
                 for (const auto& input : inputs) of_mine.push_back({input[rank]});
                 const at::Tensor sum = reduced(of_mine, 0, to.numel(), op);
                 if (all_have_read()) copy_bytes(to, sum);
               });
}

Backend::Work Backend::allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  return start("all-reduce", tensors.at(0).numel(), tensors, tensors,
               [to = for_kernels(tensors[0]).view({-1}), op = reduce_op(options.reduceOp)](const Inputs& inputs,
                                                                                           const auto& all_have_read) {
                 const at::Tensor sum = reduced(inputs, 0, to.numel(), op);
                 if (all_have_read()) copy_bytes(to, sum);
               });
}

Backend::Work Backend::broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) {
  const auto root = static_cast<size_t>(options.rootRank);
  const bool is_root = rank_ == options.rootRank;
  return start(
      c10::str("broadcast from ", root), tensors.at(0).numel(), tensors, is_root ? std::vector<at::Tensor>() : tensors,
      [to = for_kernels(tensors[0]), root](const Inputs& inputs, const auto&) { copy_bytes(to, inputs[root][0]); });
}

Backend::Work Backend::reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) {
  const bool is_root = rank_ == options.rootRank;
  return start(c10::str("reduce to ", options.rootRank), tensors.at(0).numel(), tensors,
               is_root ? tensors : std::vector<at::Tensor>(),
               [to = for_kernels(tensors[0]).view({-1}), is_root, op = reduce_op(options.reduceOp)](
                   const Inputs& inputs, const auto& all_have_read) {
                 if (!is_root) return;
                 const at::Tensor sum = reduced(inputs, 0, to.numel(), op);
                 if (all_have_read()) copy_bytes(to, sum);
               });
}

Backend::Work Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_counts,
                                     std::vector<int64_t>& input_counts, const c10d::AllToAllOptions&) {
  at::Tensor counts = at::tensor(input_counts, at::kLong);  // an input, because the other ranks need the counts
  return start("all-to-all", 0, {input, counts}, {output},
               [to = for_kernels(output), own = output_counts, rank = rank_](const Inputs& inputs, const auto&) {
                 int64_t begin = 0;
                 for (size_t from = 0; from < inputs.size(); ++from) {
                   const auto* theirs = inputs[from][1].template const_data_ptr<int64_t>();
                   int64_t offset = 0;
                   for (int other = 0; other < rank; ++other) offset += theirs[other];
                   copy_bytes(to.narrow(0, begin, own[from]), inputs[from][0].narrow(0, offset, own[from]));
                   begin += own[from];
                 }
               });
}

Backend::Work Backend::alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                const c10d::AllToAllOptions&) {
  std::vector<at::Tensor> to;
  for (const at::Tensor& output : outputs) to.push_back(for_kernels(output));
  return start("all-to-all", 0, inputs, outputs, [to, rank = rank_](const Inputs& all, const auto&) {
    for (size_t from = 0; from < all.size(); ++from) copy_bytes(to[from], all[from][rank]);
  });
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks, const c10::intrusive_ptr<Options>&) {
  const auto own = std::ranges::find(ranks, rank_);
  if (own == ranks.end()) return nullptr;
  return c10::make_intrusive<Backend>(store, static_cast<int>(own - ranks.begin()), static_cast<int>(ranks.size()),
                                      device_);
}

}  // namespace tessera::accelerator
