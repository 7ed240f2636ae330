#include "elastic/part_copies.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

#include <tessera/errors.h>
#include "checkpoint/format/checked_json.h"
#include "checkpoint/format/checksum.h"
#include "checkpoint/format/shard_writer.h"
#include "checkpoint/save/saved_part.h"
#include "core/launch/local_address.h"
#include "core/runtime/sigpipe_block.h"
#include "elastic/part_storage.h"

namespace tessera::internal {

using nlohmann::json;

namespace {

constexpr int64_t kBlockBytes = SaveOptions{}.block_bytes;
constexpr int64_t kSent = -1;  // instead of the index of a memory: the bytes are in the request itself

std::shared_ptr<CopiedPart> part_from_json(const json& fields) {
  auto part = std::make_shared<CopiedPart>();
  part->world = fields.at("world").get<int>();
  part->description = fields.at("description").get<std::string>();
  return part;
}

PeerMessage request_of(const char* op, const PartName& name, const CopiedPart& part) {
  PeerMessage request{name, {}};
  request.fields["op"] = op;
  request.fields["world"] = part.world;
  request.fields["description"] = part.description;
  request.fields["files"] = json::object();
  return request;
}

// Returns the memory of this notice: an existing mapping in an older part, or a new one. Throws like CopyMemory().
std::shared_ptr<const CopyMemory> mapped(const json& notice, const CopiedPart* before) {
  if (before != nullptr)
    for (const auto& memory : before->memories)
      if (memory->is_of(notice)) return memory;
  return std::make_shared<const CopyMemory>(notice);
}

std::set<std::string> frozen_parameters(const ModelShards& model) {
  std::set<std::string> names;
  for (const NamedShard& shard : model.named_shards())
    if (!shard.tensor.requires_grad()) names.insert(shard.fqn);
  return names;
}

// Returns the manifest's entries for this rank's part. On rank 0, also returns the values that belong to no rank, in a
// manifest that lists only rank 0's tensors.
std::string describe_part(SavedTensors saved, const SavePlan& plan, int rank, int world, uint64_t id) {
  SavedPart part(world);
  part.set(std::move(saved), plan.optimizers);
  json description{{"part", part.text()}};
  if (rank == 0) {
    Manifest manifest = std::move(part).manifest(plan.optimizers);
    manifest.id = manifest.saved.id = id;
    manifest.models = plan.models;
    manifest.saved.block_bytes = kBlockBytes;
    manifest.saved.has_rng = true;
    manifest.extra = plan.extra;
    manifest.beside = plan.beside;
    description["manifest"] = format_manifest(manifest);
  }
  return description.dump();
}

}  // namespace

uint64_t id_of_step(const std::string& run, int64_t generation, int64_t step) {
  return checksum(run + "/" + std::to_string(generation) + "/" + std::to_string(step));
}

Manifest assemble_manifest(const std::vector<std::string>& descriptions, uint64_t id) {
  const std::string where = "a step in memory";
  SavedPart all(static_cast<int64_t>(descriptions.size()));
  Manifest first;
  for (size_t rank = 0; rank < descriptions.size(); ++rank) {
    const json description = parse_json(descriptions[rank], where);
    if (rank == 0) first = parse_manifest(description.at("manifest").get<std::string>(), where, /*is_part=*/true);
    all.add(description.at("part").get<std::string>(), "rank " + std::to_string(rank));
  }
  Manifest manifest = std::move(all).manifest(first.optimizers);
  manifest.id = manifest.saved.id = id;
  manifest.sequence = 1;
  manifest.models = std::move(first.models);
  manifest.saved.block_bytes = first.saved.block_bytes;
  manifest.saved.has_rng = first.saved.has_rng;
  manifest.extra = std::move(first.extra);
  manifest.beside = std::move(first.beside);
  return manifest;
}

void send_part(PeerConnection& to, const PartName& name, const CopiedPart& part, std::chrono::milliseconds patience) {
  PeerMessage begin = request_of("begin_part", name, part);
  for (const auto& [file, content] : part.files) {
    std::vector<uint64_t> sums;
    for (int64_t i = 0; i < block_count(content.bytes); ++i) sums.push_back(checksum(read_block(content, i)));
    begin.fields["files"][file] = {{"bytes", content.bytes}, {"sums", checksums_to_hex(sums)}};
  }
  const PeerMessage answer = to.ask(std::move(begin), patience);
  for (const auto& [file, indices] : answer.fields.at("needed").items())
    for (const json& index : indices)
      to.ask(
          {{{"op", "block"}, {"file", file}, {"index", index}}, read_block(part.files.at(file), index.get<size_t>())},
          patience);
  to.ask({{{"op", "end_part"}}, {}}, patience);
}

bool share_part(PeerConnection& to, const PartName& name, const CopiedPart& part, std::chrono::milliseconds patience) {
  PeerMessage request = request_of("share_part", name, part);
  json& notices = request.fields["memories"] = json::array();
  for (const auto& memory : part.memories) {
    notices.push_back(memory->notice());
    if (notices.back().is_null()) return false;
  }
  for (const auto& [file, content] : part.files) {
    json& pieces = request.fields["files"][file] = json::array();
    for (const auto& piece : content.pieces) {
      const auto memory =
          std::ranges::find_if(part.memories, [&](const auto& one) { return one->contains(piece.data, piece.bytes); });
      if (memory != part.memories.end()) {
        pieces.push_back({memory - part.memories.begin(), piece.data - (*memory)->data(), piece.bytes});
      } else {
        pieces.push_back({kSent, request.bytes.size(), piece.bytes});
        request.bytes.append(piece.data, static_cast<size_t>(piece.bytes));
      }
    }
  }
  return to.ask(std::move(request), patience).fields.at("held").get<bool>();
}

PeerMessage PartReceiver::map_part(const json& fields, std::string bytes) {
  const PartName part_name = fields.get<PartName>();
  const auto before = store_.newest(part_name.generation, part_name.owner);
  auto part = part_from_json(fields);
  try {
    for (const json& notice : fields.at("memories")) part->memories.push_back(mapped(notice, before.get()));
  } catch (const std::runtime_error&) {  // the memory is in another container, or access is not permitted
    return {{{"held", false}}, {}};
  }
  const auto sent = std::make_shared<const std::string>(std::move(bytes));
  for (const auto& [name, pieces] : fields.at("files").items())
    for (const json& piece : pieces) {
      const auto index = piece.at(0).get<int64_t>(), begin = piece.at(1).get<int64_t>();
      const auto count = piece.at(2).get<int64_t>();
      const auto memory = index == kSent ? nullptr : part->memories.at(static_cast<size_t>(index));
      const int64_t end = memory ? memory->bytes() : static_cast<int64_t>(sent->size());
      if (begin < 0 || count < 0 || begin > end || count > end - begin)
        throw std::runtime_error(name + " is not within its part's memory");
      if (memory)
        part->files[name].add(memory, memory->data() + begin, count);
      else
        part->files[name].add(sent, sent->data() + begin, count);
    }
  store_.put(part_name, std::move(part));
  return {{{"held", true}}, {}};
}

PeerMessage PartReceiver::answer(PeerMessage&& request) {
  const json& fields = request.fields;
  const std::string op = fields.at("op").get<std::string>();
  if (op == "share_part") return map_part(fields, std::move(request.bytes));
  PeerMessage answer;
  if (op == "begin_part") {
    name_ = fields.get<PartName>();
    part_ = part_from_json(fields);
    const auto before = store_.newest(name_.generation, name_.owner);
    json& needed = answer.fields["needed"] = json::object();
    for (const auto& [file, content] : fields.at("files").items()) {
      CopiedFile& copied = part_->files[file];
      copied.bytes = content.at("bytes").get<int64_t>();
      copied.sums = checksums_from_hex(content.at("sums").get<std::string>(), file);
      if (static_cast<int64_t>(copied.sums.size()) != block_count(copied.bytes))
        throw std::runtime_error(file + " has another number of blocks than checksums");
      copied.pieces.resize(copied.sums.size());
      const CopiedFile* old = nullptr;
      if (before)
        if (const auto found = before->files.find(file); found != before->files.end()) old = &found->second;
      for (size_t i = 0; i < copied.sums.size(); ++i)
        if (old != nullptr && i < old->sums.size() && old->sums[i] == copied.sums[i])
          copied.pieces[i] = old->pieces[i];
        else
          needed[file].push_back(i);
    }
    return answer;
  }
  if (!part_) throw std::runtime_error("no part is being sent");
  if (op == "block") {
    CopiedFile& file = part_->files.at(fields.at("file").get<std::string>());
    const auto index = fields.at("index").get<size_t>();
    if (index >= file.sums.size() || checksum(request.bytes) != file.sums[index])
      throw std::runtime_error("block " + std::to_string(index) + " of " + fields.at("file").get<std::string>() +
                               " has another checksum than its sender has computed");
    const auto block = std::make_shared<const std::string>(std::move(request.bytes));
    file.pieces[index] = {block, block->data(), static_cast<int64_t>(index) * kCopyBlockBytes,
                          static_cast<int64_t>(block->size())};
    return answer;
  }
  for (const auto& [name, file] : part_->files)
    for (const auto& piece : file.pieces)
      if (!piece.owner) throw std::runtime_error(name + " has not arrived whole");
  store_.put(name_, std::move(part_));
  return answer;
}

PartCopy::PartCopy(CopyStore& store, CopyMemories& memories, UnchangedPieces& unchanged, const PartName& name,
                   int world, uint64_t id, const StateObjects& state, const json& extra, std::vector<Member> partners,
                   std::chrono::milliseconds patience, at::Tensor staging)
    : store_(store),
      unchanged_(unchanged),
      name_(name),
      world_(world),
      id_(id),
      device_(state.model.comm()->device()),
      partners_(std::move(partners)),
      patience_(patience),
      frozen_(frozen_parameters(state.model)),
      plan_(plan_save(state, extra, {})),
      memory_(memories.take(HostCopies::bytes_for(plan_.pieces))),
      copies_(device_.is_cpu() ? tensor_of(memory_) : std::move(staging)) {
  if (device_.is_cpu()) shared_ = unchanged_.take(name_.generation, frozen_, plan_.pieces, kBlockBytes);
  copies_.begin(plan_, device_, kBlockBytes);
  const SigpipeBlock no_sigpipe;  // the new thread inherits the blocked signal
  error_ = std::async(std::launch::async, [this] { return run(); });
}

std::string PartCopy::run() try {
  const at::NoGradGuard no_grad;
  copies_.end(plan_, device_, [] {});
  if (!device_.is_cpu()) shared_ = unchanged_.take(name_.generation, frozen_, plan_.pieces, kBlockBytes);
  plan_.pieces.insert(plan_.pieces.begin(), std::make_move_iterator(shared_.begin()),
                      std::make_move_iterator(shared_.end()));
  shared_.clear();
  auto part = std::make_shared<CopiedPart>();
  part->world = world_;
  part->memories.push_back(memory_);
  if (unchanged_.memory()) part->memories.push_back(unchanged_.memory());
  PartFolder folder(memory_, unchanged_.memory());
  SavedTensors saved = write_rank_files(folder.path(), {name_.owner, id_, kBlockBytes, plan_.rng}, plan_.pieces);
  part->files = folder.take_files();
  part->description = describe_part(std::move(saved), plan_, name_.owner, world_, id_);
  plan_.pieces.clear();
  store_.put(name_, part);
  const std::string host = host_and_boot();
  for (const Member& partner : partners_) {
    PeerConnection connection(partner, patience_, &is_cancelled_);
    if (partner.host != host || !share_part(connection, name_, *part, patience_))
      send_part(connection, name_, *part, patience_);
  }
  return "";
} catch (const std::exception& error) {
  const std::string text = error.what();
  return text.empty() ? "an error without a text" : text;
}

}  // namespace tessera::internal
