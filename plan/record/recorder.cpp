#include "plan/record/recorder.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "core/memory/memory_cache.h"
#include "core/memory/memory_kind_scope.h"
#include "core/paging/residency.h"

namespace tessera::internal {
namespace {

thread_local std::shared_ptr<Recorder> current_recorder;

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// A table of all recorded blocks by address. Never destroyed, because tensors may outlive all other objects.
struct Table {
  struct Entry {
    size_t bytes = 0;
    size_t mapped_bytes = 0;  // size of the mapping, or 0 for memory of the inner allocator
    bool is_void = false;
    int64_t block = 0;
    std::shared_ptr<Recorder> recorder;
  };
  std::mutex mutex;
  std::map<uintptr_t, Entry> entries;

  Entry* find(const void* data) {  // the caller must hold `mutex`
    const auto address = reinterpret_cast<uintptr_t>(data);
    auto after = entries.upper_bound(address);
    if (after == entries.begin()) return nullptr;
    --after;
    return address < after->first + after->second.bytes ? &after->second : nullptr;
  }
};
Table& table() {
  static auto* const table = new Table;
  return *table;
}

c10::Allocator* inner = nullptr;

void* map_addresses(size_t bytes) {
  void* const memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    throw std::runtime_error("dry_run: the system refuses " + std::to_string(bytes) + " bytes of address space (" +
                             std::strerror(errno) + "); see vm.overcommit_memory and ulimit -v");
  return memory;
}

void free_block(void* memory) {
  Table::Entry entry;
  {
    std::lock_guard lock(table().mutex);
    const auto found = table().entries.extract(reinterpret_cast<uintptr_t>(memory));
    if (!found.empty()) entry = std::move(found.mapped());
  }
  if (entry.recorder) entry.recorder->freed(entry.block);
  if (entry.mapped_bytes > 0) {
    ::munmap(memory, entry.mapped_bytes);
  } else {
    inner->raw_deleter()(memory);
  }
}

class RecordingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto& recorder = current_recorder;
    const bool maps = recorder && !recorder->has_data() && bytes >= Recorder::kMappedBytes;
    void* const memory = maps ? map_addresses(bytes) : inner->raw_allocate(bytes);
    if (recorder && bytes > 0) {
      if (!maps && !recorder->has_data()) std::memset(memory, 0, bytes);
      const int64_t block = recorder->allocated(static_cast<int64_t>(bytes));
      // Marks host memory for offload as void here, because only results of operators are marked elsewhere.
      const bool is_void = !recorder->has_data() && MemoryKindScope::current() == MemoryKind::kHost;
      std::lock_guard lock(table().mutex);
      table().entries[reinterpret_cast<uintptr_t>(memory)] = {bytes, maps ? bytes : 0, is_void, block, recorder};
    }
    return {memory, memory, &free_block, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { inner->copy_data(to, from, bytes); }
};

std::shared_ptr<void> count_on_disk(int64_t bytes) {
  if (!current_recorder) return nullptr;
  const MemoryKindScope kind(MemoryKind::kDisk);
  const auto free = [recorder = current_recorder, block = current_recorder->allocated(bytes)](void*) {
    recorder->freed(block);
  };
  return {nullptr, free};
}

void install_allocator() {
  static std::once_flag is_installed;
  std::call_once(is_installed, [] {
    constexpr uint8_t kAnyPriority = 255;
    inner = c10::GetCPUAllocator();
    if (inner == c10::GetDefaultCPUAllocator()) inner = memory_cache_allocator();  // init() may enable the cache later
    c10::SetCPUAllocator(new RecordingAllocator, kAnyPriority);  // never freed, because libtorch keeps a raw pointer
    set_disk_bytes_counter(&count_on_disk);
  });
}

// Returns the address of a CPU tensor's memory. Null on other devices, and without memory (in a resharded unit).
const void* memory_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || !tensor.device().is_cpu()) return nullptr;
  return tensor.unsafeGetTensorImpl()->unsafe_storage().data_ptr().get();
}

}  // namespace

std::shared_ptr<Recorder> Recorder::make(bool with_data) {
  install_allocator();
  require_residency();  // called before recording, because the first call in a process creates a tensor
  std::shared_ptr<Recorder> recorder(new Recorder(with_data));
  recorder->set_unit("");
  recorder->record_.modules.emplace_back();
  return recorder;
}

Recorder* Recorder::current() { return current_recorder.get(); }

Recorder::Current::Current(std::shared_ptr<Recorder> recorder) : recorder_(std::move(recorder)) {
  if (current_recorder) throw std::logic_error("a dry_run() or record_run() inside another one on the same thread");
  current_recorder = recorder_;
}

Recorder::Current::~Current() { current_recorder = nullptr; }

void Recorder::set_unit(const std::string& name) {
  const auto [entry, is_new] = unit_numbers_.try_emplace(name, static_cast<int>(record_.units.size()));
  if (is_new) record_.units.push_back(name);
  unit_ = entry->second;
}

void Recorder::name_parameters(const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  named_.clear();
  std::map<std::string, int> numbers = {{"", 0}};
  for (const auto& [fqn, tensor] : parameters) {
    if (!tensor.defined() || !tensor.has_storage()) continue;
    const size_t dot = fqn.rfind('.');
    const std::string module = dot == std::string::npos ? "" : fqn.substr(0, dot);
    const auto [entry, is_new] = numbers.try_emplace(module, static_cast<int>(record_.modules.size()));
    if (is_new) record_.modules.push_back(module);
    const auto element_bytes = static_cast<int64_t>(tensor.element_size());
    const int64_t begin = tensor.storage_offset() * element_bytes;
    named_[tensor.storage().unsafeGetStorageImpl()].push_back(
        {begin, begin + tensor.numel() * element_bytes, entry->second});
  }
  for (auto& [storage, all] : named_) std::ranges::sort(all, {}, &NamedParameter::begin);
}

void Recorder::set_module_of(const at::Tensor& tensor) {
  if (named_.empty() || !tensor.has_storage()) return;
  const auto storage = named_.find(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  if (storage == named_.end()) return;
  const int64_t at = tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  auto after = std::ranges::upper_bound(storage->second, at, {}, &NamedParameter::begin);
  if (after == storage->second.begin()) return;
  --after;
  if (at < after->end) module_ = after->module;
}

int Recorder::module_now() {
  const auto node = torch::autograd::get_current_node();
  // In forward, autograd has just created the operator's node, so this node has the latest sequence number.
  // Recomputation in backward also creates nodes, so it counts as forward although it runs inside a node.
  if (!node || c10::GradMode::is_enabled()) {
    const uint64_t next = at::sequence_number::peek();
    if (c10::GradMode::is_enabled() && next > 0) module_of_node_.try_emplace(next - 1, module_);
    return module_;
  }
  const auto found = module_of_node_.find(node->sequence_nr());
  return found == module_of_node_.end() ? module_ : found->second;
}

void Recorder::begin_operator(std::string name) {
  const int module = module_now();
  std::lock_guard lock(mutex_);
  const bool now = in_backward();
  if (now && !was_in_backward_) backwards_.push_back(static_cast<int64_t>(events_.size()));
  was_in_backward_ = now;
  record_.operators.push_back({std::move(name), unit_, module, step_, now});
  inside_operator_ = true;
}

void Recorder::end_operator(int64_t flop, int64_t bytes, c10::ScalarType dtype, double seconds, double processor_s) {
  std::lock_guard lock(mutex_);
  inside_operator_ = false;
  RecordedOperator& op = record_.operators.back();
  op.flop = flop;
  op.bytes = bytes;
  op.dtype = dtype;
  op.seconds = seconds;
  op.processor_s = processor_s;
}

void Recorder::read_value(const std::string& operation) {
  const std::string& unit = record_.units[static_cast<size_t>(unit_)];
  std::string text = operation + (unit.empty() ? "" : " in " + unit);
  if (std::ranges::find(record_.stand_ins, text) == record_.stand_ins.end()) record_.stand_ins.push_back(text);
}

size_t Recorder::add_collective(RecordedCollective collective) {
  std::lock_guard lock(mutex_);
  collective.step = step_;
  collective.operators = record_.operators.size();
  record_.collectives.push_back(std::move(collective));
  return record_.collectives.size() - 1;
}

void Recorder::add_wait(size_t collective) {
  std::lock_guard lock(mutex_);
  if (is_finished_) return;
  record_.collectives[collective].wait = {step_, record_.operators.size(), record_.collectives.size()};
}

void Recorder::end_step() {
  std::lock_guard lock(mutex_);
  steps_ends_.push_back(static_cast<int64_t>(events_.size()));
  was_in_backward_ = false;
  module_ = 0;
  module_of_node_.clear();
  ++step_;
}

bool Recorder::is_void(const at::Tensor& tensor) {
  const void* const memory = memory_of(tensor);
  if (memory == nullptr) return false;
  {
    std::lock_guard lock(table().mutex);
    if (const Table::Entry* entry = table().find(memory)) return entry->is_void;
  }
  return current_recorder && current_recorder->void_outside_.contains(memory);
}

void Recorder::make_void(const at::Tensor& tensor) {
  const void* const memory = memory_of(tensor);
  if (memory == nullptr) return;
  std::lock_guard lock(table().mutex);
  if (Table::Entry* entry = table().find(memory)) {
    entry->is_void = true;
  } else {
    void_outside_.insert(memory);
  }
}

int64_t Recorder::allocated(int64_t bytes) {
  std::lock_guard lock(mutex_);
  const auto number = static_cast<int64_t>(blocks_.size());
  Block block{.bytes = bytes, .kind = MemoryKindScope::current(), .step = step_, .in_backward = in_backward()};
  block.made_at = static_cast<int64_t>(events_.size());
  if (inside_operator_) block.operator_made = static_cast<int64_t>(record_.operators.size());
  blocks_.push_back(block);
  events_.push_back({number, true, record_.operators.size()});
  return number;
}

void Recorder::freed(int64_t number) {
  std::lock_guard lock(mutex_);
  if (is_finished_) return;
  Block& block = blocks_[static_cast<size_t>(number)];
  block.freed_at = static_cast<int64_t>(events_.size());
  block.is_scratch = inside_operator_ && block.operator_made == static_cast<int64_t>(record_.operators.size());
  events_.push_back({number, false, record_.operators.size()});
}

void Recorder::decide_kinds() {
  const int64_t end = static_cast<int64_t>(events_.size());
  for (Block& block : blocks_) {
    const bool stays = block.freed_at < 0;
    const int64_t freed_at = stays ? end + 1 : block.freed_at;
    if (block.is_scratch) block.kind = MemoryKind::kScratch;
    if (block.kind != MemoryKind::kUnknown) continue;
    const auto step = static_cast<size_t>(block.step);
    const bool outlives_step = step < steps_ends_.size() ? freed_at >= steps_ends_[step] : stays;
    const auto backward = std::ranges::lower_bound(backwards_, block.made_at + 1);
    const bool sees_backward = backward != backwards_.end() && *backward <= freed_at &&
                               (step >= steps_ends_.size() || *backward < steps_ends_[step]);
    if (block.step == 0) {
      block.kind = outlives_step ? MemoryKind::kParameters : MemoryKind::kTemporaries;
    } else if (block.in_backward && outlives_step) {
      block.kind = MemoryKind::kGradients;
    } else if (stays && block.step == 1 && steps_ends_.size() > 2) {
      block.kind = MemoryKind::kOptimizer;
    } else {
      block.kind = !block.in_backward && sees_backward ? MemoryKind::kActivations : MemoryKind::kTemporaries;
    }
  }
}

RunRecord Recorder::finish() {
  std::lock_guard lock(mutex_);
  is_finished_ = true;
  decide_kinds();
  BytesByKind live;
  size_t called = 0;
  auto advance_to = [&](size_t operators) {
    for (; called < operators; ++called)
      if (called > 0) record_.operators[called - 1].live = live;
  };
  for (const Event& event : events_) {
    advance_to(event.operators);
    const Block& block = blocks_[static_cast<size_t>(event.block)];
    live[block.kind] += event.is_made ? block.bytes : -block.bytes;
    if (!event.is_made) continue;
    if (block.kind == MemoryKind::kScratch) record_.scratch = std::max(record_.scratch, live[MemoryKind::kScratch]);
    for (size_t kind = 0; kind < kMemoryKinds; ++kind)
      record_.most.bytes[kind] = std::max(record_.most.bytes[kind], live.bytes[kind]);
    if (live.tensors() > record_.peak.tensors()) {
      record_.peak = live;
      record_.peak[MemoryKind::kScratch] = record_.peak[MemoryKind::kTransport] = 0;
      record_.peak_at = event.operators == 0 ? 0 : event.operators - 1;
    }
  }
  advance_to(record_.operators.size());
  if (called > 0) record_.operators[called - 1].live = live;
  record_.end = live;
  record_.flop_by_unit.assign(record_.units.size(), 0);
  const int last = step_ - 1;
  for (const RecordedOperator& op : record_.operators) {
    if (op.step != last) continue;
    record_.flop += op.flop;
    record_.flop_by_unit[static_cast<size_t>(op.unit)] += op.flop;
  }
  return std::move(record_);
}

}  // namespace tessera::internal
