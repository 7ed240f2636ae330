#include "elastic/elastic_state.h"

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <future>
#include <stdexcept>
#include <thread>
#include <utility>

#include <tessera/checkpoint.h>
#include <tessera/distributed_sampler.h>
#include <tessera/errors.h>
#include <tessera/host_results.h>
#include "checkpoint/format/checksum.h"
#include "checkpoint/load/find_checkpoints.h"
#include "checkpoint/save/outcome.h"
#include "checkpoint/save/save_job.h"
#include "core/comm/agreement.h"
#include "core/comm/guest/text_exchange.h"
#include "core/comm/store_client.h"
#include "core/launch/guest_group.h"
#include "core/launch/local_address.h"
#include "core/runtime/call_with_timeout.h"
#include "core/runtime/host.h"
#include "core/runtime/require.h"
#include "core/runtime/warn.h"
#include "elastic/part_storage.h"

namespace tessera::internal {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;  // measures the times in reports
using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr milliseconds kEntryPause{5};
// The interval at which a rank that runs no operation of the group checks whether others have left the group.
constexpr milliseconds kMemberCheck{500};

// regroup() throws if a failure after the same step is repeated this many times, and no rank is lost.
constexpr int kMostFailuresAtStep = 2;

std::string first_line_of(const std::string& text) { return text.substr(0, text.find('\n')); }

// Returns a text such as "rank 2 of 4 was lost (...), rank 3 joined; 4 ranks go on from step 120 in memory".
std::string describe(const ElasticChange& change, const Decision& decision) {
  std::string text;
  if (!change.lost.empty() || change.joined.empty())
    text = c10::str(change.lost.empty() ? "no rank" : ranks_text(change.lost), " of ", change.world_before,
                    change.lost.size() > 1 ? " were lost (" : " was lost (", change.reason, ")");
  if (!change.joined.empty()) text += c10::str(text.empty() ? "" : ", ", ranks_text(change.joined), " joined");
  return c10::str(text, "; ", decision.members.size(),
                  decision.members.size() == 1 ? " rank goes on " : " ranks go on ",
                  decision.step.world > 0 ? c10::str("from step ", decision.step.step, " in memory")
                                          : std::string("without a step that is complete in memory"));
}

// Throws std::invalid_argument for a sampler of another group that shards the items: it would omit lost ranks' items.
void require_of_group(const DistributedSampler& sampler, const Communicator& comm) {
  require(sampler.world_size() == 1 || (sampler.world_size() == comm.size() && sampler.rank() == comm.rank()),
          "ElasticRun::restore(): a DistributedSampler is for rank ", sampler.rank(), " of ", sampler.world_size(),
          ", and this is rank ", comm.rank(), " of ", comm.size(),
          " of the current group; expected a sampler made in the body for run.comm()->rank() and run.comm()->size()");
}

// An error that every rank throws. It is never the consequence of a lost rank, so every rank must end the run.
class CommonError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Throws CommonError on every rank if the ranks list different objects for restore(). No rank leaves before all ranks
// know of the difference.
void require_equal_objects(Communicator& comm, const StateObjects& objects) {
  try {
    require_agreement(comm, "the objects of ElasticRun::restore()", describe_objects(objects));
  } catch (const std::invalid_argument& error) {
    try {
      comm.barrier("different objects of ElasticRun::restore()");
    } catch (const CommError&) {  // NOLINT(bugprone-empty-catch): a rank that knows of the difference has left
    }
    throw CommonError(error.what());
  }
}

// Returns a text of the options that must be equal on all ranks.
std::string describe(const ElasticOptions& options) {
  return c10::str("copy_every ", options.copy_every, ", copies ", options.copies, ", least_ranks ", options.least_ranks,
                  ", most_ranks ", options.most_ranks, ", batch ", static_cast<int>(options.batch), ", stopped_after ",
                  options.stopped_after.count(), " ms, regroup_timeout ", options.regroup_timeout.count(),
                  " ms, checkpoints ", options.checkpoints.string(), ", rendezvous ",
                  rendezvous_folder(options).empty() ? "none" : "a folder", ", group ",
                  internal::describe(options.group, options.group.device.value_or(at::kCPU)));
}

std::optional<RunFile> file_of(const ElasticOptions& options) {
  const auto folder = rendezvous_folder(options);
  return folder.empty() ? std::nullopt : std::optional<RunFile>(folder);
}

// Returns this host's address in the network of the run's members. If the run has no members, or if no route to them
// (other than by loopback) is known, returns public_address().
std::string address_towards_run(const RunFile& file) {
  const auto run = file.read();
  if (!run || run->members.empty()) return public_address();
  std::string address;
  try {
    address = address_towards(run->members[0].address, run->members[0].port);
  } catch (const std::runtime_error&) {  // NOLINT(bugprone-empty-catch): without a route, uses public_address()
  }
  return address.empty() || is_loopback_address(address) ? public_address() : address;
}

void check(const ElasticOptions& options, int size) {  // `size`: ranks of the first group; 0 in a process that joins
  require(options.copy_every >= 1, "ElasticOptions::copy_every is ", options.copy_every, "; expected at least 1");
  require(options.copies >= 0, "ElasticOptions::copies is ", options.copies, "; expected at least 0");
  require(options.least_ranks >= 1 && (size == 0 || options.least_ranks <= size), "ElasticOptions::least_ranks is ",
          options.least_ranks, "; expected 1 to the number of ranks, ", size);
  require(options.most_ranks == 0 || options.most_ranks >= std::max(size, options.least_ranks),
          "ElasticOptions::most_ranks is ", options.most_ranks, "; expected at least least_ranks and the number of ",
          "first ranks, or 0 for that number");
  for (const auto time : {options.stopped_after, options.regroup_timeout, options.group.timeout})
    require(time > milliseconds::zero() && time <= kLongestTimeout,
            "ElasticOptions::stopped_after, regroup_timeout or group.timeout is ", time.count(),
            " ms; expected more than 0 and at most a year");
}

// Must be called after the last read of the store. Rank 0's process may serve the store only until the constructor
// returns, so rank 0 blocks until all ranks have called, at most for `timeout`. (The group detects a dead rank.)
void await_readers(const StorePtr& store, int rank, int size, milliseconds timeout) {
  if (size == 1) return;
  call_with_timeout(timeout, [=] {
    const auto until = RunClock::now() + timeout;
    store->add("elastic/readers", 1);
    while (rank == 0 && store->add("elastic/readers", 0) < size && RunClock::now() < until)
      std::this_thread::sleep_for(milliseconds(1));
    return true;
  });
}

}  // namespace

ElasticState::ElasticState(ElasticOptions options, const StorePtr& store, int rank, int size,
                           const std::string& address)
    : options_(std::move(options)),
      first_world_(size),
      effects_(std::in_place, options_.process),
      file_(file_of(options_)),
      rank_(rank) {
  const std::string who = "tessera::Elastic";
  const auto timeout = time_to_meet(options_.group.timeout);
  const auto exchange = [&](const char* what, const std::function<std::string()>& own) {
    const TextExchange texts = size == 1 ? [](const std::string& text) { return std::vector{text}; }
                                         : exchange_through(c10::make_intrusive<c10d::PrefixStore>(what, store),
                                                            "elastic/", rank, size, timeout);
    return exchange_or_fail(texts, who, own);
  };
  const auto hosts = exchange("hosts", [&] {
    check(options_, size);
    return describe(options_) + "\n" + host_and_boot();
  });
  for (size_t i = 0; i < hosts.size(); ++i)
    require(first_line_of(hosts[i]) == first_line_of(hosts[0]), who, ": rank ", i, " passes ", first_line_of(hosts[i]),
            ", rank 0 ", first_line_of(hosts[0]), "; expected equal ElasticOptions on all ranks");
  const bool one_host = std::ranges::all_of(hosts, [&](const auto& host) { return host == hosts[0]; });
  // If the program gives a folder, processes of other hosts may join.
  const bool stays_on_host = one_host && options_.rendezvous.empty();
  // Uses loopback only without `address`: containers of one machine may look like one host, but not share loopback.
  self_.address = !address.empty() ? address : stays_on_host ? "127.0.0.1" : public_address();
  group_.generation = 0;
  group_.step = {};
  const auto members = exchange("members", [&] {
    start_server();
    if (rank == 0) serve_store(group_);
    return json(self_).dump();
  });
  for (const std::string& text : members) group_.members.push_back(json::parse(text).get<Member>());
  group_.store = group_.members[0];
  await_readers(store, rank, size, timeout);
  run_id_ = group_.members[0].id;
  enter_group();
}

ElasticState::ElasticState(ElasticOptions options, const RunFile& file, const std::string& address)
    : options_(std::move(options)), effects_(std::in_place, options_.process), file_(file), is_joining_(true) {
  check(options_, 0);
  self_.address = !address.empty() ? address : options_.rendezvous.empty() ? "127.0.0.1" : address_towards_run(file);
  start_server();
}

ElasticState::~ElasticState() = default;

void ElasticState::start_server() {
  self_.id = to_hex(random_bits()) + to_hex(random_bits());
  self_.host = host_and_boot();
  server_ = internal::make_group<PeerServer>(self_.address, self_.id, [this]() -> PeerServer::Session {
    auto receiver = std::make_shared<PartReceiver>(copies_);
    return [this, receiver](PeerMessage&& request) { return answer(*receiver, std::move(request)); };
  });
  self_.port = server_->port();
}

RunFacts ElasticState::facts() const { return {run_id_, first_world_, group_.generation, group_.members, false}; }

void ElasticState::publish(bool has_ended) {
  if (!file_ || rank_ != 0) return;
  try {
    RunFacts written = facts();
    written.has_ended = has_ended;
    file_->write(written, self_.id);
    if (has_ended) file_->forget(run_id_);
  } catch (const std::exception& error) {  // the group can continue, but cannot grow
    warn(c10::str(error.what(), "; no other process can join the run"));
  }
}

void ElasticState::enter_group() {
  acceptor_.begin(group_.generation);
  if (record_joined())
    join_requests_.enter(facts(), group_, describe(options_));
  else
    join_requests_.leave();
  publish(/*has_ended=*/false);
}

bool ElasticState::record_joined() {
  if (!file_ || group_.joined.empty()) return true;
  try {
    file_->record(run_id_, group_, self_.id);
    return true;
  } catch (const std::exception& error) {  // another member may let the process in
    warn(c10::str("rank ", rank_, " lets no process in: ", error.what()));
    return false;
  }
}

void ElasticState::leave_run() {
  acceptor_.retire();
  join_requests_.leave();
}

bool ElasticState::may_grow() const {
  return static_cast<int>(group_.members.size()) < most_ranks() && !join_requests_.waiting().empty();
}

bool ElasticState::join() {
  auto place =
      Joiner(*file_, self_, describe(options_), options_.stopped_after, options_.regroup_timeout).await_place();
  if (!place) return false;
  lost_at_ = Clock::now();
  is_joining_ = false;
  run_id_ = place->facts.run_id;
  first_world_ = place->facts.first_world;
  group_ = std::move(place->group);
  rank_ = static_cast<int>(std::ranges::find(group_.members, self_) - group_.members.begin());
  change_ = ElasticChange{.lost = group_.lost,
                          .joined = group_.joined,
                          .reason = "this process has joined",
                          .world_before = group_.world_before};
  enter_group();
  return true;
}

PeerMessage ElasticState::answer(PartReceiver& receiver, PeerMessage&& request) {
  const std::string op = request.fields.at("op").get<std::string>();
  if (op == "look" || op == "prepare" || op == "accept" || op == "decided")
    return {acceptor_.answer(request.fields), {}};
  if (op == "join") return {join_requests_.answer(request.fields), {}};
  if (op == "store") return stores_.answer(request);
  if (op == "share_part" || op == "begin_part" || op == "block" || op == "end_part")
    return receiver.answer(std::move(request));
  const json& fields = request.fields;
  const auto part = copies_.find(fields.get<PartName>());
  if (!part) throw std::runtime_error("this process does not hold the part");
  PeerMessage answer;
  if (op == "describe") {
    answer.fields["description"] = part->description;
    return answer;
  }
  const auto file = part->files.find(fields.at("file").get<std::string>());
  if (file == part->files.end()) throw std::runtime_error("the part has no such file");
  if (op == "size") {
    answer.fields["bytes"] = file->second.bytes;
  } else if (op == "read") {
    const auto bytes = fields.at("bytes").get<int64_t>(), position = fields.at("position").get<int64_t>();
    if (bytes < 0 || bytes > file->second.bytes) throw std::runtime_error("the file has fewer bytes");
    answer.bytes.resize(static_cast<size_t>(bytes));
    file->second.read(answer.bytes.data(), bytes, position);
  } else {
    throw std::runtime_error("the request '" + op + "' is not known");
  }
  return answer;
}

void ElasticState::serve_store(Decision& decision) {
  stores_.serve(decision.generation);
  decision.store = self_;
}

void ElasticState::await_members() {
  const auto until = RunClock::now() + options_.group.timeout;
  for (int other = 0; other < static_cast<int>(group_.members.size()); ++other) {
    for (bool is_here = other == rank_; !is_here;) {
      std::string state = "has not entered the new group in time";
      try {
        const json answer = look_at(group_.members[static_cast<size_t>(other)], group_.generation, kPromptAnswer);
        if (has_left(answer)) throw CommError(c10::str("rank ", other, " has left the new group"));
        is_here = answer.at("takes_part").get<bool>();
      } catch (const PeerError& error) {
        if (error.is_gone()) throw CommError(c10::str("rank ", other, " has ended before it entered the new group"));
        state = error.what();
      }
      if (is_here) break;
      if (RunClock::now() >= until) throw CommError(c10::str("rank ", other, ": ", state));
      std::this_thread::sleep_for(kEntryPause);
    }
  }
}

std::shared_ptr<Communicator> ElasticState::make_group() {
  const int size = static_cast<int>(group_.members.size());
  if (size == 1) return communicator_from(c10::make_intrusive<c10d::HashStore>(), 0, 1, options_.group);
  if (group_.generation > 0) await_members();
  // The process that serves the store also uses a client, because a group that serves its own store waits for all ranks
  // when it ends. `patience` is at most stopped_after: other ranks leave out a rank that waits longer for the store.
  const auto patience = std::min(options_.stopped_after, options_.group.timeout);
  const auto wrapped = c10::make_intrusive<StoreClient>(
      c10::make_intrusive<GroupStore>(group_.store, group_.generation, patience), patience);
  wrapped->setTimeout(options_.group.timeout);  // limits waits for other ranks
  // Each rank first waits in the store for the other ranks, until the timeout. If a member is lost, this rank must stop
  // the wait earlier, because the other ranks form the next group without ranks that still wait.
  std::promise<void> is_made;
  auto watch = std::async(std::launch::async, [&, made = is_made.get_future()]() -> std::string {
    while (made.wait_for(kMemberCheck) != std::future_status::ready) {
      try {
        require_members();
      } catch (const CommError& error) {
        StoreClient::limit_patience(*wrapped, milliseconds(0));
        return error.what();
      } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): an invalid answer proves no loss
      }
    }
    return "";
  });
  const auto end_watch = [&] {
    is_made.set_value();
    const std::string loss = watch.get();
    require<CommError>(loss.empty(), loss);
  };
  std::shared_ptr<Communicator> comm;
  try {
    comm = communicator_at(self_.address, wrapped, rank_, size, options_.group);
  } catch (...) {
    end_watch();
    throw;
  }
  end_watch();
  return comm;
}

void ElasticState::require_members() const {
  for (size_t other = 0; other < group_.members.size(); ++other) {
    if (static_cast<int>(other) == rank_) continue;
    try {
      if (has_left(look_at(group_.members[other], group_.generation, kPromptAnswer)))
        throw CommError(c10::str("rank ", other, " has left the group"));
    } catch (const PeerError& error) {
      if (error.is_gone()) throw CommError(c10::str("rank ", other, " has ended"));
    }
  }
}

bool ElasticState::has_lost_member() const {
  for (size_t i = 0; i < group_.members.size(); ++i) {
    if (static_cast<int>(i) == rank_) continue;
    try {
      if (has_left(look_at(group_.members[i], group_.generation, options_.stopped_after))) return true;
    } catch (const PeerError&) {
      return true;
    }
  }
  return false;
}

ElasticState::Outcome ElasticState::attempt(const std::function<void(ElasticRun& run)>& body,
                                            const std::function<ElasticRun(ElasticRunState&)>& make) {
  std::shared_ptr<Communicator> comm;
  std::string reason;
  try {
    comm = make_group();
    ElasticRunState own(*this, comm, change_, lost_at_);
    ElasticRun run = make(own);
    body(run);
    process_.require_this("tessera::Elastic");
    own.finish();
    return Outcome::kFinished;
  } catch (const CommError& error) {
    reason = error.what();
  } catch (const std::exception& error) {
    // An error of a checkpoint, for example, may be the consequence of a loss.
    reason = error.what();
    if (!comm || dynamic_cast<const CommonError*>(&error) != nullptr || !has_lost_member()) {
      leave_run();
      if (comm) comm->abort(reason);
      throw;
    }
  } catch (...) {
    leave_run();
    if (comm) comm->abort("an exception that is no std::exception");
    throw;
  }
  lost_at_ = Clock::now();
  // Ends the operations of members that have not noticed the loss yet.
  if (comm) comm->abort(c10::str("rank ", rank_, " leaves the group: ", reason));
  if (comm) SaveJob::hurry_save_of(comm);
  change_ = ElasticChange{.reason = first_line_of(reason), .world_before = static_cast<int>(group_.members.size())};
  return Outcome::kLost;
}

void ElasticState::regroup() {
  process_.require_this("tessera::Elastic");
  acceptor_.arrive(group_.generation, copies_.held());
  Regroup next(
      group_, rank_, acceptor_,
      [](const Member& member, const json& request, milliseconds patience) {
        return ask_member(member, {request, {}}, patience).fields;
      },
      [this](Decision& decision) { serve_store(decision); },
      {.stopped_after = options_.stopped_after,
       .timeout = options_.regroup_timeout,
       .least_ranks = options_.least_ranks,
       .most_ranks = most_ranks(),
       .joiners = [this] { return join_requests_.waiting(); },
       .recorded = [this] { return file_ ? file_->recorded(run_id_, group_.generation + 1) : std::nullopt; },
       .has_gone_on = [this] { return file_ && file_->has_later_group(run_id_, group_.generation); },
       .was_stopped =
           [this] {
             return server_->was_stopped(options_.stopped_after, 2 * (options_.group.timeout + options_.stopped_after));
           }});
  Decision decision = next.run();
  change_->lost = decision.lost;
  change_->joined = decision.joined;
  const bool is_as_before = decision.members == group_.members && decision.step.step == group_.step.step;
  failures_at_step_ = is_as_before ? failures_at_step_ + 1 : 0;
  require<CommError>(failures_at_step_ != kMostFailuresAtStep, "all ", group_.members.size(), " ranks failed ",
                     kMostFailuresAtStep + 1, " times after step ", group_.step.step,
                     ", and none was lost: ", change_->reason, "; expected ranks with equal loops");
  const auto own = std::ranges::find(decision.members, self_);
  if (own == decision.members.end()) {
    leave_run();
    throw CommError(c10::str("rank ", rank_, " of ", group_.members.size(),
                             " was stopped, or did not leave the broken group within ", options_.stopped_after.count(),
                             " ms (ElasticOptions::stopped_after): the other ranks have gone on without it; expected "
                             "this process to end"));
  }
  rank_ = static_cast<int>(own - decision.members.begin());
  if (rank_ == 0) warn(describe(*change_, decision));
  group_ = std::move(decision);
  if (group_.step.world > 0) copies_.free_after(group_.step.generation, group_.step.step);
  enter_group();
}

void ElasticState::run(const std::function<void(ElasticRun& run)>& body,
                       const std::function<ElasticRun(ElasticRunState&)>& make) {
  try {
    if (is_joining_ && !join()) return;
    while (attempt(body, make) == Outcome::kLost) regroup();
  } catch (...) {
    leave_run();
    throw;
  }
  publish(/*has_ended=*/true);
  leave_run();
}

ElasticRunState::ElasticRunState(ElasticState& all, std::shared_ptr<Communicator> comm,
                                 std::optional<ElasticChange> change, Clock::time_point lost_at)
    : all_(all), comm_(std::move(comm)), change_(std::move(change)), lost_at_(lost_at) {
  std::vector<std::string> hosts;
  for (const Member& member : all_.group().members) hosts.push_back(member.host);
  for (const int partner : partners_of(comm_->rank(), hosts, all_.options().copies))
    partners_.push_back(all_.group().members[static_cast<size_t>(partner)]);
}

int ElasticRunState::accumulation() const {
  if (all_.options().batch == ElasticBatch::kFollow) return 1;
  return std::max(1, (all_.first_world() + comm_->size() - 1) / comm_->size());
}

json ElasticRunState::restore_from_memory() {
  const Decision& group = all_.group();
  const CompleteStep& step = group.step;
  std::vector<std::vector<Member>> holders;
  for (const auto& own : step.holders) {
    auto& members = holders.emplace_back();
    for (const int member : own) members.push_back(group.sources[static_cast<size_t>(member)]);
  }
  const auto patience = all_.options().group.timeout;
  const PartFolder folder(all_.copies(), all_.own_id(), step.generation, step.step, holders, patience);
  const std::string what = c10::str("restoring step ", step.step, " from memory");
  // Rank 0 reads the descriptions of all parts, for all ranks.
  std::string text;
  on_all_ranks(*comm_, what, [&] {
    if (comm_->rank() != 0) return;
    std::vector<std::string> descriptions;
    for (int owner = 0; owner < step.world; ++owner) {
      const PartName name{step.generation, step.step, owner};
      if (const auto own = all_.copies().find(name)) {
        descriptions.push_back(own->description);
        continue;
      }
      json request = name;
      request["op"] = "describe";
      const Member& holder = holders[static_cast<size_t>(owner)].front();
      descriptions.push_back(ask_member(holder, {request, {}}, patience).fields.at("description").get<std::string>());
    }
    text = format_manifest(assemble_manifest(descriptions, id_of_step(all_.run_id(), step.generation, step.step)));
  });
  text = gather_texts(*comm_, text, what)[0];
  Manifest manifest;
  on_all_ranks(*comm_, what, [&] { manifest = manifest_of(text, folder.path()); });
  load_state(manifest, state_objects_of(*state_), {}, what);
  step_ = step.step;
  if (step_ > 0) all_.note_complete_copy();
  return manifest.extra.is_null() ? json::object() : manifest.extra;
}

std::optional<json> ElasticRunState::restore_from_disk() {
  if (all_.options().checkpoints.empty()) return std::nullopt;
  const auto loaded = load_newest_checkpoint(all_.options().checkpoints, *state_);
  if (!loaded) return std::nullopt;
  const auto step = loaded->extra.find("step");
  require<CheckpointError>(step != loaded->extra.end() && step->is_number_integer(), loaded->path.string(),
                           ": its extra has no integer \"step\", which restore() needs; save it with {\"step\", n}");
  step_ = step->get<int64_t>();
  if (change_ && comm_->rank() == 0)
    warn(c10::str("no step is complete in memory; continuing from ", loaded->path.string(), ", step ", step_));
  return loaded->extra;
}

json ElasticRunState::restore(const TrainingState& state) {
  if (state_) throw std::logic_error("ElasticRun::restore() was called twice; expected one list of all objects");
  for (const auto& one : state.beside())
    if (const auto* sampler = dynamic_cast<const DistributedSampler*>(one.get())) require_of_group(*sampler, *comm_);
  require_equal_objects(*comm_, state_objects_of(state));
  state_.emplace(state);
  std::optional<json> extra;
  if (all_.group().step.world > 0) extra = restore_from_memory();
  if (!extra) extra = restore_from_disk();
  if (extra) {
    // Lost ranks held parts and copies of the restored step. Copies the step again, so that it survives another loss.
    start_copy(*extra);
    return *extra;
  }
  // If a step was complete before, training must not silently start again from step 0.
  const at::Tensor are_lost =
      at::scalar_tensor(change_ && all_.has_had_copies() ? 1 : 0, at::device(at::kCPU).dtype(at::kInt));
  if (reduce_to_host(*comm_, are_lost, ReduceOp::kMax, "whether copies are lost").item<int>() == 1) {
    all_.note_complete_copy();  // so that after this error, a process that has joined does not start from step 0
    throw CheckpointError(
        "a rank and all processes with copies of its part are lost, so no step is complete in memory, and "
        "ElasticOptions::checkpoints has no checkpoint; restart the job from one of your own, and use more copies");
  }
  if (change_ && comm_->rank() == 0) warn("no step has been copied yet; training begins again");
  // Copies the initial values, so that the next group restores them: objects that outlive the body may have changed by
  // then, and new objects may be initialized differently. No rank may change objects until all ranks have copied.
  start_copy(json::object());
  end_copy();
  return json::object();
}

ElasticRunState::Agreed ElasticRunState::end_copy() {
  std::string error;
  std::optional<PartName> name;
  if (copy_) {
    // If a partner is stopped or cut off, this rank must still notice that the other ranks leave the group.
    while (!copy_->wait_for(kMemberCheck)) all_.require_members();
    error = copy_->wait();
    all_.staging_memory() = copy_->take_staging();
    name = copy_->name();
    copy_.reset();
  }
  // The ranks agree on the minimum of each value. Only rank 0 decides on growth: it leads a regroup without a loss.
  const bool may_grow = comm_->rank() != 0 || all_.may_grow();
  const at::Tensor own =
      at::tensor({error.empty() ? 1 : 0, may_grow ? 1 : 0}, at::TensorOptions(at::kCPU).dtype(at::kInt));
  const at::Tensor values = reduce_to_host(*comm_, own, ReduceOp::kMin, "whether a step is copied");
  const Agreed result{values[0].item<int>() == 1, values[1].item<int>() == 1};
  if (name && result.is_copied) {
    all_.copies().free_before(name->generation, name->step);
    if (name->step > 0) all_.note_complete_copy();
  } else if (!error.empty() && !std::exchange(has_warned_, true)) {
    warn(c10::str("rank ", comm_->rank(), " could not copy its part of step ", name->step, ": ", error,
                  "; the step before stays in memory"));
  }
  return result;
}

void ElasticRunState::report_resumed() {
  if (std::exchange(has_resumed_, true) || !change_) return;
  change_->seconds = std::chrono::duration<double>(Clock::now() - lost_at_).count();
  if (comm_->rank() == 0)
    warn(c10::str("training goes on with ", comm_->size(), comm_->size() == 1 ? " rank: step " : " ranks: step ", step_,
                  " ended ", change_->seconds, " s after the ", change_->lost.empty() ? "change" : "loss"));
}

void ElasticRunState::commit(const json& extra) {
  if (!state_) throw std::logic_error("ElasticRun::commit() needs the state; expected restore() to be called before");
  ++step_;
  report_resumed();
  if (step_ % all_.options().copy_every != 0) return;
  const bool may_grow = end_copy().may_grow;
  start_copy(extra);
  // The joining process starts from the copy of this step, so no step is lost.
  if (may_grow && end_copy().is_copied) throw CommError("a process joins the group");
}

void ElasticRunState::start_copy(const json& extra) {
  copy_ = std::make_unique<PartCopy>(all_.copies(), all_.memories(), all_.unchanged(),
                                     PartName{generation(), step_, comm_->rank()}, comm_->size(),
                                     id_of_step(all_.run_id(), generation(), step_), state_objects_of(*state_), extra,
                                     partners_, all_.options().group.timeout, std::exchange(all_.staging_memory(), {}));
}

void ElasticRunState::finish() {
  end_copy();
  comm_->barrier("end of the elastic run");
}

}  // namespace tessera::internal
