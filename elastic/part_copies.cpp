#include "elastic/part_copies.h"

#include <ATen/core/grad_mode.h>

#include <stdexcept>
#include <utility>

#include <tessera/errors.h>
#include "checkpoint/format/checked_json.h"
#include "checkpoint/format/checksum.h"
#include "checkpoint/format/shard_writer.h"
#include "checkpoint/save/saved_part.h"
#include "core/runtime/sigpipe_block.h"
#include "elastic/part_storage.h"

namespace tessera::internal {

using nlohmann::json;

namespace {

constexpr int64_t kBlockBytes = SaveOptions{}.block_bytes;

json to_json(const PartName& name) {
  return {{"generation", name.generation}, {"step", name.step}, {"owner", name.owner}};
}

// Returns the entries of the manifest for this rank's part. Rank 0's has also the values that belong to no rank, in a
// manifest of its own tensors alone.
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
  PeerMessage begin{to_json(name), {}};
  begin.fields["op"] = "begin_part";
  begin.fields["world"] = part.world;
  begin.fields["description"] = part.description;
  json& files = begin.fields["files"] = json::object();
  for (const auto& [file, content] : part.files)
    files[file] = {{"bytes", content.bytes}, {"sums", checksums_to_hex(content.sums)}};
  const PeerMessage answer = to.ask(std::move(begin), patience);
  for (const auto& [file, indices] : answer.fields.at("needed").items())
    for (const json& index : indices)
      to.ask({{{"op", "block"}, {"file", file}, {"index", index}}, *part.files.at(file).blocks.at(index.get<size_t>())},
             patience);
  to.ask({{{"op", "end_part"}}, {}}, patience);
}

PeerMessage PartReceiver::answer(PeerMessage&& request) {
  const json& fields = request.fields;
  const std::string op = fields.at("op").get<std::string>();
  PeerMessage answer;
  if (op == "begin_part") {
    name_ = {fields.at("generation").get<int64_t>(), fields.at("step").get<int64_t>(), fields.at("owner").get<int>()};
    part_ = std::make_shared<CopiedPart>();
    part_->world = fields.at("world").get<int>();
    part_->description = fields.at("description").get<std::string>();
    const auto before = store_.newest(name_.generation, name_.owner);
    json& needed = answer.fields["needed"] = json::object();
    for (const auto& [file, content] : fields.at("files").items()) {
      CopiedFile& copied = part_->files[file];
      copied.bytes = content.at("bytes").get<int64_t>();
      copied.sums = checksums_from_hex(content.at("sums").get<std::string>(), file);
      if (static_cast<int64_t>(copied.sums.size()) != block_count(copied.bytes))
        throw std::runtime_error(file + " has another number of blocks than checksums");
      copied.blocks.resize(copied.sums.size());
      const CopiedFile* old = nullptr;
      if (before)
        if (const auto found = before->files.find(file); found != before->files.end()) old = &found->second;
      for (size_t i = 0; i < copied.sums.size(); ++i)
        if (old != nullptr && i < old->sums.size() && old->sums[i] == copied.sums[i])
          copied.blocks[i] = old->blocks[i];
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
    file.blocks[index] = std::make_shared<const std::string>(std::move(request.bytes));
    return answer;
  }
  for (const auto& [name, file] : part_->files)
    for (const auto& block : file.blocks)
      if (!block) throw std::runtime_error(name + " has not arrived whole");
  store_.put(name_, std::move(part_));
  return answer;
}

PartCopy::PartCopy(CopyStore& store, const PartName& name, int world, uint64_t id, const StateObjects& state,
                   const json& extra, std::vector<Member> partners, std::chrono::milliseconds patience,
                   at::Tensor memory)
    : store_(store),
      name_(name),
      world_(world),
      id_(id),
      device_(state.model.comm()->device()),
      partners_(std::move(partners)),
      patience_(patience),
      plan_(plan_save(state, extra, {})),
      copies_(std::move(memory)) {
  check_extra(plan_.extra);
  copies_.begin(plan_, device_);
  const SigpipeBlock no_sigpipe;  // in the thread, which inherits this
  thread_ = std::thread([this] { run(); });
}

PartCopy::~PartCopy() {
  is_cancelled_ = true;
  wait();
}

bool PartCopy::wait_for(std::chrono::milliseconds time) {
  return has_ended_.wait_for(time) == std::future_status::ready;
}

std::string PartCopy::wait() {
  if (thread_.joinable()) thread_.join();
  return error_;
}

void PartCopy::run() {
  const at::NoGradGuard no_grad;
  try {
    copies_.end(plan_, device_, [] {});
    auto part = std::make_shared<CopiedPart>();
    part->world = world_;
    PartFolder folder(store_.newest(name_.generation, name_.owner));
    SavedTensors saved = write_rank_files(folder.path(), {name_.owner, id_, kBlockBytes, plan_.rng}, plan_.pieces);
    part->files = folder.take_files();
    part->description = describe_part(std::move(saved), plan_, name_.owner, world_, id_);
    plan_.pieces.clear();
    store_.put(name_, part);
    for (const Member& partner : partners_) {
      PeerConnection connection(partner, patience_, &is_cancelled_);
      send_part(connection, name_, *part, patience_);
    }
  } catch (const std::exception& error) {
    error_ = error.what();
    if (error_.empty()) error_ = "an error without a text";
  }
  ended_.set_value();
}

}  // namespace tessera::internal
