#include "tests/support/accelerator/races.h"

#include <c10/util/Type.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <sys/mman.h>

#include <algorithm>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "tests/support/accelerator/graphs.h"
#include "tests/support/accelerator/memory.h"

namespace tessera::accelerator {
namespace {

constexpr int kMaxFrames = 48;

// Shortens a name like "tessera::(anonymous namespace)::Unit::release() const". Returns "" for other libraries' names.
std::string short_name(const char* mangled) {
  std::string name = c10::demangle(mangled);
  const std::string ours = "tessera::", anonymous = "(anonymous namespace)::";
  if (name.rfind(ours, 0) != 0 || name.rfind("tessera::accelerator::", 0) == 0) return "";
  for (size_t at = 0; (at = name.find(anonymous)) != std::string::npos;) name.erase(at, anonymous.size());
  return name.substr(ours.size(), name.find('(') - ours.size());
}

// Returns short_name() of the function at an address. Caches it, because a lookup among libtorch's symbols takes longer
// than an operator.
const std::string& function_at(void* address) {
  static std::mutex guards_names;
  static auto* const names = new std::unordered_map<void*, std::string>;
  const std::lock_guard lock(guards_names);
  const auto [entry, is_new] = names->try_emplace(address);
  Dl_info info;
  if (is_new && dladdr(address, &info) != 0 && info.dli_sname != nullptr) entry->second = short_name(info.dli_sname);
  return entry->second;
}

uintptr_t page_up(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

}  // namespace

CallStack CallStack::here() {
  CallStack stack;
  stack.frames_.resize(kMaxFrames);
  stack.frames_.resize(::backtrace(stack.frames_.data(), kMaxFrames));
  return stack;
}

std::string CallStack::text() const {
  std::string text;
  int shown = 0;
  for (void* frame : frames_) {
    if (shown == 5) break;
    const std::string& name = function_at(frame);
    if (name.empty() || name.find("testing_support") != std::string::npos) continue;
    text += (shown++ > 0 ? " < " : "") + name;
  }
  return text;
}

Races& Races::get() {
  static auto* races = new Races;
  return *races;
}

// ---- blocks ---------------------------------------------------------------------------------------

Races::Blocks::iterator Races::find(uintptr_t address) {
  auto block = blocks_.upper_bound(address);
  if (block == blocks_.begin()) return blocks_.end();
  --block;
  return address < block->first + block->second.info.bytes ? block : blocks_.end();
}

void Races::add_block(void* begin, const BlockInfo& info) {
  std::lock_guard lock(mutex_);
  blocks_[reinterpret_cast<uintptr_t>(begin)] = {info, {}, {}};
}

void Races::remove_blocks(const void* begin, size_t bytes) {
  std::lock_guard lock(mutex_);
  const auto from = reinterpret_cast<uintptr_t>(begin);
  for (auto block = blocks_.lower_bound(from); block != blocks_.end() && block->first < from + bytes;) {
    block->second.entries.clear();
    protect(block);
    block = blocks_.erase(block);
  }
}

std::optional<Races::BlockInfo> Races::block_at(const void* address) {
  std::lock_guard lock(mutex_);
  const auto block = find(reinterpret_cast<uintptr_t>(address));
  if (block == blocks_.end()) return std::nullopt;
  BlockInfo info = block->second.info;
  info.alias = static_cast<std::byte*>(info.alias) + (reinterpret_cast<uintptr_t>(address) - block->first);
  return info;
}

void Races::forget(const void* begin) {
  std::lock_guard lock(mutex_);
  const auto block = find(reinterpret_cast<uintptr_t>(begin));
  if (block == blocks_.end()) return;
  block->second.entries.clear();
  protect(block);
}

void Races::record_stream(const void* address, int stream) {
  std::lock_guard lock(mutex_);
  const auto block = find(reinterpret_cast<uintptr_t>(address));
  if (block != blocks_.end() && stream != block->second.info.stream) block->second.recorded.insert(stream);
}

std::set<int> Races::take_recorded(const void* address) {
  std::lock_guard lock(mutex_);
  const auto block = find(reinterpret_cast<uintptr_t>(address));
  return block == blocks_.end() ? std::set<int>() : std::exchange(block->second.recorded, {});
}

// ---- order ----------------------------------------------------------------------------------------

namespace {
void join(Clock& clock, const Clock& other) {
  for (int i = 0; i < kStreams; ++i) clock[i] = std::max(clock[i], other[i]);
}
}  // namespace

void Races::launched(int stream, std::string what, const std::vector<Access>& accesses, const Clock* also) {
  const auto by = std::make_shared<const std::pair<std::string, CallStack>>(std::move(what), CallStack::here());
  std::lock_guard lock(mutex_);
  if (by->first != kGivenBack && !is_replaying()) {
    ++counts_[device_of(stream)].launches;
    ++counts_[device_of(stream)].launch_names[by->first];
  }
  Clock& clock = clocks_[stream];
  join(clock, host_[device_of(stream)]);
  const uint64_t time = ++clock[stream];
  for (const Access& access : accesses) {
    const auto block = find(access.begin);
    if (block == blocks_.end() || access.begin == access.end) continue;
    check(block->second, {access, stream, time, by}, also);
    if (block->second.info.is_pinned) protect(block);
  }
}

std::string Races::Entry::text() const {
  std::ostringstream text;
  text << (access.writes ? "write by " : "read by ") << by->first << " on stream " << stream % kStreamsPerDevice
       << " of device " << device_of(stream);
  if (const std::string place = by->second.text(); !place.empty()) text << " [" << place << "]";
  return text.str();
}

void Races::check(Block& block, Entry entry, const Clock* also) {
  const Clock& known = clocks_[entry.stream];
  std::vector<Entry> kept;
  for (Entry& other : block.entries) {
    const bool overlaps = other.access.begin < entry.access.end && entry.access.begin < other.access.end;
    const bool is_over = other.stream == entry.stream || known[other.stream] >= other.time ||
                         (also != nullptr && (*also)[other.stream] >= other.time);
    if (overlaps && !is_over && (entry.access.writes || other.access.writes))
      ++findings_["no order between a " + other.text() + " and a " + entry.text()];
    const bool covers = entry.access.begin <= other.access.begin && other.access.end <= entry.access.end;
    if (!(covers && is_over && (entry.access.writes || !other.access.writes))) kept.push_back(std::move(other));
  }
  kept.push_back(std::move(entry));
  block.entries = std::move(kept);
}

Clock Races::clock_of(int stream) {
  std::lock_guard lock(mutex_);
  join(clocks_[stream], host_[device_of(stream)]);
  return clocks_[stream];
}

void Races::ordered(int stream, const Clock& clock) {
  std::lock_guard lock(mutex_);
  join(clocks_[stream], clock);
}

// ---- the host -------------------------------------------------------------------------------------

// Protects a page-locked block until the host knows that devices have completed their accesses. No page has two blocks,
// so protection does not affect other blocks.
void Races::protect(Blocks::iterator position) {
  Block& block = position->second;
  int protection = PROT_READ | PROT_WRITE;
  for (const Entry& entry : block.entries) {
    if (host_[device_of(entry.stream)][entry.stream] >= entry.time) continue;
    protection &= entry.access.writes ? PROT_NONE : PROT_READ;
  }
  if (protection == (PROT_READ | PROT_WRITE)) {
    protected_.erase(position->first);
  } else {
    protected_.insert(position->first);
  }
  if (std::exchange(block.protection, protection) == protection) return;
  ::mprotect(reinterpret_cast<void*>(position->first), page_up(block.info.bytes), protection);
}

void Races::host_knows_locked(int device, const Clock& clock) {
  join(host_[device], clock);
  const std::set<uintptr_t> before = protected_;
  for (const uintptr_t begin : before) protect(blocks_.find(begin));
}

void Races::host_knows(int device, const Clock& clock) {
  std::lock_guard lock(mutex_);
  host_knows_locked(device, clock);
}

void Races::host_waited(int device, const Clock& clock, const char* what) {
  const std::string place = CallStack::here().text();
  std::lock_guard lock(mutex_);
  ++counts_[device].host_waits;
  ++counts_[device].wait_places[std::string(what) + " [" + place + "]"];
  host_knows_locked(device, clock);
}

// Forgets the block's accesses, so that the host continues with the current contents, and reports each access once.
bool Races::host_touched(const void* address) {
  const std::string place = CallStack::here().text();
  std::lock_guard lock(mutex_);
  const auto position = find(reinterpret_cast<uintptr_t>(address));
  if (position == blocks_.end() || !position->second.info.is_pinned) return false;
  Block& block = position->second;
  for (const Entry& entry : block.entries)
    if (host_[device_of(entry.stream)][entry.stream] < entry.time)
      ++findings_["the host touches page-locked memory [" + place + "], not knowing the end of a " + entry.text()];
  block.entries.clear();
  protect(position);
  return true;
}

void Races::count_registered(int device) {
  std::lock_guard lock(mutex_);
  ++counts_[device].registered_collectives;
}

void Races::count_event_elsewhere(int device) {
  std::lock_guard lock(mutex_);
  ++counts_[device].events_elsewhere;
}

// ---- reports --------------------------------------------------------------------------------------

void Races::found(const std::string& text) {
  std::lock_guard lock(mutex_);
  ++findings_[text];
}

std::vector<std::string> Races::findings() {
  std::lock_guard lock(mutex_);
  std::vector<std::string> texts;
  for (const auto& [text, times] : findings_) texts.push_back(text + " (" + std::to_string(times) + " times)");
  return texts;
}

Counts Races::counts(int device) {
  std::lock_guard lock(mutex_);
  return counts_.at(device);
}

void Races::reset_counts() {
  std::lock_guard lock(mutex_);
  counts_ = {};
}

// All streams must be idle. Forgets all accesses, findings and counts.
void Races::reset() {
  std::lock_guard lock(mutex_);
  findings_.clear();
  counts_ = {};
  for (auto& [begin, block] : blocks_) block.entries.clear();
  const std::set<uintptr_t> before = protected_;
  for (const uintptr_t begin : before) protect(blocks_.find(begin));
}

}  // namespace tessera::accelerator
