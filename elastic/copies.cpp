#include "elastic/copies.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <stdexcept>

namespace tessera::internal {

int64_t block_count(int64_t bytes) { return (bytes + kCopyBlockBytes - 1) / kCopyBlockBytes; }

std::string read_block(const CopiedFile& file, size_t index) {
  const int64_t begin = static_cast<int64_t>(index) * kCopyBlockBytes;
  std::string block(static_cast<size_t>(std::min(kCopyBlockBytes, file.bytes - begin)), '\0');
  file.read(block.data(), static_cast<int64_t>(block.size()), begin);
  return block;
}

void CopiedFile::add(std::shared_ptr<const void> owner, const char* data, int64_t count) {
  if (count == 0) return;
  if (!pieces.empty() && pieces.back().owner == owner && pieces.back().data + pieces.back().bytes == data)
    pieces.back().bytes += count;
  else
    pieces.push_back({std::move(owner), data, bytes, count});
  bytes += count;
}

void CopiedFile::read(void* data, int64_t count, int64_t position) const {
  if (position < 0 || count < 0 || position > bytes || count > bytes - position)
    throw std::out_of_range("a read of " + std::to_string(count) + " bytes at " + std::to_string(position) +
                            " of a file of " + std::to_string(bytes));
  char* to = static_cast<char*>(data);
  for (auto piece = std::ranges::upper_bound(pieces, position, {}, &Piece::begin); count > 0; ++piece) {
    const Piece& from = *std::prev(piece);
    const int64_t at = position - from.begin, part = std::min(count, from.bytes - at);
    std::memcpy(to, from.data + at, static_cast<size_t>(part));
    to += part;
    position += part;
    count -= part;
  }
}

CompleteStep newest_complete_step(const std::vector<std::vector<HeldStep>>& held) {
  std::map<std::pair<int64_t, int64_t>, CompleteStep> steps;
  for (size_t member = 0; member < held.size(); ++member)
    for (const HeldStep& own : held[member]) {
      CompleteStep& step = steps[{own.generation, own.step}];
      step.generation = own.generation;
      step.step = own.step;
      step.world = std::max(step.world, own.world);
      step.holders.resize(static_cast<size_t>(step.world));
      for (const int owner : own.owners)
        if (owner >= 0 && owner < step.world)
          step.holders[static_cast<size_t>(owner)].push_back(static_cast<int>(member));
    }
  for (auto step = steps.rbegin(); step != steps.rend(); ++step)
    if (std::ranges::none_of(step->second.holders, [](const auto& holders) { return holders.empty(); }))
      return step->second;
  return {};
}

std::vector<int> partners_of(int rank, const std::vector<std::string>& hosts, int copies) {
  std::vector<std::string> names;  // names of hosts, in the order of their first ranks
  std::map<std::string, std::vector<int>> ranks_of;
  for (size_t i = 0; i < hosts.size(); ++i) {
    if (!ranks_of.contains(hosts[i])) names.push_back(hosts[i]);
    ranks_of[hosts[i]].push_back(static_cast<int>(i));
  }
  const auto& own_host = ranks_of[hosts[static_cast<size_t>(rank)]];
  const auto index = static_cast<size_t>(std::ranges::find(own_host, rank) - own_host.begin());
  const auto host = static_cast<size_t>(std::ranges::find(names, hosts[static_cast<size_t>(rank)]) - names.begin());
  std::vector<int> partners;
  // The first round selects one rank of each other host. Later rounds select further ranks of all hosts.
  for (size_t round = 0; round < hosts.size(); ++round)
    for (size_t other = 1; other <= names.size(); ++other) {
      const auto& ranks = ranks_of[names[(host + other) % names.size()]];
      if (other == names.size() && names.size() > 1 && round == 0) continue;  // round 0 skips this rank's host
      const int partner = ranks[(index + round + (other == names.size() ? 1 : 0)) % ranks.size()];
      if (static_cast<int>(partners.size()) == copies) return partners;
      if (partner != rank && std::ranges::find(partners, partner) == partners.end()) partners.push_back(partner);
    }
  return partners;
}

void CopyStore::put(const PartName& name, std::shared_ptr<const CopiedPart> part) {
  const std::lock_guard lock(mutex_);
  parts_[name] = std::move(part);
}

std::shared_ptr<const CopiedPart> CopyStore::find(const PartName& name) const {
  const std::lock_guard lock(mutex_);
  const auto found = parts_.find(name);
  return found == parts_.end() ? nullptr : found->second;
}

std::shared_ptr<const CopiedPart> CopyStore::newest(int64_t generation, int owner) const {
  const std::lock_guard lock(mutex_);
  for (auto entry = parts_.rbegin(); entry != parts_.rend(); ++entry)
    if (entry->first.generation == generation && entry->first.owner == owner) return entry->second;
  return nullptr;
}

std::vector<HeldStep> CopyStore::held() const {
  const std::lock_guard lock(mutex_);
  std::vector<HeldStep> held;
  for (const auto& [name, part] : parts_) {
    if (held.empty() || held.back().generation != name.generation || held.back().step != name.step)
      held.push_back({name.generation, name.step, part->world, {}});
    held.back().owners.push_back(name.owner);
  }
  return held;
}

void CopyStore::free_before(int64_t generation, int64_t step) {
  const std::lock_guard lock(mutex_);
  std::erase_if(parts_, [&](const auto& entry) {
    return std::pair(entry.first.generation, entry.first.step) < std::pair(generation, step);
  });
}

void CopyStore::free_after(int64_t generation, int64_t step) {
  const std::lock_guard lock(mutex_);
  std::erase_if(parts_, [&](const auto& entry) {
    return std::pair(entry.first.generation, entry.first.step) > std::pair(generation, step);
  });
}

int64_t CopyStore::bytes() const {
  const std::lock_guard lock(mutex_);
  std::set<std::pair<const char*, const char*>> ranges;  // parts may share some of their memory
  for (const auto& [name, part] : parts_)
    for (const auto& [file, content] : part->files)
      for (const auto& piece : content.pieces) ranges.emplace(piece.data, piece.data + piece.bytes);
  int64_t bytes = 0;
  const char* counted = nullptr;
  for (const auto& [begin, end] : ranges) {
    bytes += std::max<int64_t>(end - std::max(begin, counted), 0);
    counted = std::max(counted, end);
  }
  return bytes;
}

void CopiedFileWriter::append(const void* data, int64_t count) {
  const char* from = static_cast<const char*>(data);
  if (shared_ && shared_->contains(from, count)) return rest_.add(shared_, from, count);
  if (!memory_->contains(from, count)) {
    char* const to = memory_->reserve(count);
    std::memcpy(to, from, static_cast<size_t>(count));
    from = to;
  }
  rest_.add(memory_, from, count);
}

CopiedFile CopiedFileWriter::finish(std::string_view start) {
  const auto head = std::make_shared<const std::string>(start);
  CopiedFile file;
  file.add(head, head->data(), static_cast<int64_t>(head->size()));
  for (CopiedFile::Piece& piece : rest_.pieces) file.add(std::move(piece.owner), piece.data, piece.bytes);
  return file;
}

}  // namespace tessera::internal
