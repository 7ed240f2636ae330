#include "elastic/regroup.h"

#include <algorithm>
#include <future>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

#include <tessera/errors.h>
#include "core/runtime/require.h"

namespace tessera::internal {

using nlohmann::json;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kSilentPause{500};  // pause between two requests to a silent member
constexpr milliseconds kPause{5};

}  // namespace

json look_at(const Member& member, int64_t generation, milliseconds patience) {
  return ask_member(member, {{{"op", "look"}, {"generation", generation}}, {}}, patience).fields;
}

bool has_left(const json& looked) {
  return looked.at("arrived").get<bool>() || looked.contains("retired") || looked.contains("decision");
}

bool is_quorum(int group_size, const std::set<int>& agreeing, const std::set<int>& proven_dead) {
  if (2 * static_cast<int>(agreeing.size()) > group_size) return true;
  std::set<int> all = agreeing;
  all.insert(proven_dead.begin(), proven_dead.end());
  return !agreeing.empty() && static_cast<int>(all.size()) == group_size;
}

void Acceptor::begin(int64_t generation) {
  const std::lock_guard lock(mutex_);
  generation_ = generation;
  has_arrived_ = false;
  held_ = json::array();
  promised_ = accepted_ballot_ = 0;
  accepted_ = json();
}

void Acceptor::arrive(int64_t generation, const std::vector<HeldStep>& held) {
  const std::lock_guard lock(mutex_);
  if (generation != generation_) return;
  has_arrived_ = true;
  held_ = held;
}

void Acceptor::retire() {
  const std::lock_guard lock(mutex_);
  is_retired_ = true;
}

json Acceptor::answer(const json& request) {
  const std::string op = request.at("op").get<std::string>();
  const auto generation = request.at("generation").get<int64_t>();
  const std::lock_guard lock(mutex_);
  json answer{{"promised", promised_},
              {"takes_part", generation == generation_},
              {"arrived", has_arrived_ && generation == generation_},
              {"held", held_}};
  if (op == "decided") decisions_.emplace(generation, request.at("value"));
  if (const auto known = decisions_.find(generation); known != decisions_.end()) answer["decision"] = known->second;
  if (is_retired_) answer["retired"] = true;
  if (op == "look" || op == "decided" || generation != generation_ || is_retired_) return answer;
  const auto ballot = request.at("ballot").get<int64_t>();
  // As in Paxos, "prepare" needs a higher ballot than any promised one. For "accept", an equal one suffices.
  const bool agrees = op == "prepare" ? ballot > promised_ : ballot >= promised_;
  answer["agrees"] = agrees;
  if (!agrees) return answer;
  answer["promised"] = promised_ = ballot;
  if (op == "prepare") {
    answer["accepted_ballot"] = accepted_ballot_;
    answer["accepted"] = accepted_;
  } else if (op == "accept") {
    accepted_ballot_ = ballot;
    accepted_ = request.at("value");
  }
  return answer;
}

std::optional<json> Acceptor::decision(int64_t generation) const {
  const std::lock_guard lock(mutex_);
  const auto found = decisions_.find(generation);
  return found == decisions_.end() ? std::nullopt : std::optional(found->second);
}

int64_t Acceptor::highest_ballot() const {
  const std::lock_guard lock(mutex_);
  return promised_;
}

Regroup::Regroup(const Decision& old_group, int rank, Acceptor& acceptor, Ask ask, ServeStore serve_store,
                 const RegroupOptions& options)
    : group_(old_group),
      rank_(rank),
      acceptor_(acceptor),
      ask_(std::move(ask)),
      serve_store_(std::move(serve_store)),
      options_(options),
      seen_(old_group.members.size()) {}

std::map<int, json> Regroup::request(const std::vector<int>& members, json fields) {
  fields["generation"] = group_.generation;
  // If no thread is free, this thread asks the member.
  constexpr auto kOnThread = std::launch::async | std::launch::deferred;
  std::map<int, std::future<json>> asked;
  for (const int member : members) {
    const Seen& seen = seen_[static_cast<size_t>(member)];
    if (seen.is_gone || RunClock::now() < seen.ask_again) continue;
    if (member == rank_)
      asked[member] = std::async(std::launch::deferred, [&] { return acceptor_.answer(fields); });
    else
      asked[member] = std::async(
          kOnThread, [&, member] { return ask_(group_.members[static_cast<size_t>(member)], fields, kPromptAnswer); });
  }
  for (const auto& [member, answer] : asked) answer.wait();
  const auto ask_again = RunClock::now() + kSilentPause;  // one time for all silent members
  std::map<int, json> answers;
  for (auto& [member, pending] : asked) {
    Seen& seen = seen_[static_cast<size_t>(member)];
    try {
      json answer = pending.get();
      seen.is_gone = answer.contains("retired");
      // A process that has joined, but does not know this group yet, must not be taken for the leader.
      seen.has_answered = !seen.is_gone && answer.at("takes_part").get<bool>();
      seen.has_arrived = answer.at("arrived").get<bool>();
      if (seen.has_arrived) answer.at("held").get_to(seen.held);
      if (answer.contains("decision")) found_ = answer.at("decision");
      answers[member] = std::move(answer);
    } catch (const PeerError& error) {
      seen.is_gone = error.is_gone();
      seen.has_answered = seen.has_arrived = false;
      if (!seen.is_gone) seen.ask_again = ask_again;
    }
  }
  return answers;
}

std::vector<int> Regroup::first_members(int count) const {
  std::vector<int> members(static_cast<size_t>(count));
  std::iota(members.begin(), members.end(), 0);
  return members;
}

int Regroup::first_that_answers() const {
  return static_cast<int>(std::ranges::find(seen_, true, &Seen::has_answered) - seen_.begin());
}

std::set<int> Regroup::gone() const {
  std::set<int> gone;
  if (was_stopped()) return gone;
  for (size_t i = 0; i < seen_.size(); ++i)
    if (seen_[i].is_gone) gone.insert(static_cast<int>(i));
  return gone;
}

void Regroup::fail() const {
  std::string silent, dead;
  for (size_t i = 0; i < seen_.size(); ++i) {
    std::string& names = seen_[i].is_gone ? dead : silent;
    if (!seen_[i].has_arrived) names += (names.empty() ? "" : ", ") + std::to_string(i);
  }
  throw CommError("rank " + std::to_string(rank_) + " of " + std::to_string(seen_.size()) +
                  " could not regroup within " + std::to_string(options_.timeout.count()) +
                  " ms: ended ranks: " + (dead.empty() ? "none" : dead) +
                  "; ranks that do not answer or did not leave the group: " + (silent.empty() ? "none" : silent) +
                  "; expected more than half of the ranks, or all that are not " + "proven dead, and at least " +
                  std::to_string(options_.least_ranks) + " ranks; restart the job from a checkpoint");
}

Decision Regroup::run() {
  const int size = static_cast<int>(seen_.size());
  const auto start = RunClock::now();
  std::minstd_rand random(static_cast<unsigned>(rank_) + 1);
  bool has_waited = false;  // whether this rank has waited long enough for members that have not arrived
  int leader = rank_;       // the first rank that answers
  while (!found_) {
    const auto waited = RunClock::now() - start;
    if (waited > options_.timeout) fail();
    found_ = acceptor_.decision(group_.generation);
    if (found_) break;
    // The leader asks all members. Other ranks ask members up to the leader. At first each rank assumes that it leads.
    const bool leads = leader == rank_;
    request(first_members(leads ? size : leader + 1), {{"op", "look"}});
    leader = first_that_answers();
    if (found_) break;
    const auto ended = std::ranges::count_if(seen_, [](const Seen& seen) { return seen.is_gone; });
    require<CommError>(2 * ended < size || !was_stopped(), "rank ", rank_, " of ", size, " was stopped, and ", ended,
                       " of the other ranks have ended meanwhile; expected more than half of the ranks to live, "
                       "because the others may have gone on without this one");
    if (leads && leader == rank_) {
      const bool all_are_here =
          std::ranges::all_of(seen_, [](const Seen& seen) { return seen.is_gone || seen.has_arrived; });
      has_waited = has_waited || waited > options_.stopped_after;
      if (all_are_here || has_waited) {
        if (auto decided = propose()) found_ = std::move(decided);
        if (!found_) std::this_thread::sleep_for(kPause * (1 + random() % 8));
      }
    }
    if (!found_) std::this_thread::sleep_for(kPause);
  }
  auto decision = found_->get<Decision>();
  std::vector<int> answering;
  for (const int member : first_members(size))
    if (member != rank_ && seen_[static_cast<size_t>(member)].has_answered) answering.push_back(member);
  request(answering, {{"op", "decided"}, {"value", *found_}});
  acceptor_.answer({{"op", "decided"}, {"generation", group_.generation}, {"value", *found_}});
  return decision;
}

Decision Regroup::compose(const std::set<int>& agreeing) {
  Decision decision{.generation = group_.generation + 1, .world_before = static_cast<int>(seen_.size())};
  std::vector<std::vector<HeldStep>> held;
  for (int member = 0; member < decision.world_before; ++member) {
    const Seen& seen = seen_[static_cast<size_t>(member)];
    if (!agreeing.contains(member) || !seen.has_arrived) {
      decision.lost.push_back(member);
      continue;
    }
    decision.members.push_back(group_.members[static_cast<size_t>(member)]);
    held.push_back(seen.held);
  }
  decision.sources = decision.members;
  decision.step = newest_complete_step(held);
  for (const Member& joiner : options_.joiners ? options_.joiners() : std::vector<Member>()) {
    const auto size = static_cast<int>(decision.members.size());
    if (options_.most_ranks != 0 && size >= options_.most_ranks) break;
    try {
      ask_(joiner, {{"op", "look"}, {"generation", group_.generation}}, kPromptAnswer);
    } catch (const std::runtime_error&) {  // the process has ended or is silent: the group must not wait for it
      continue;
    }
    decision.joined.push_back(size);
    decision.members.push_back(joiner);
  }
  return decision;
}

bool Regroup::may_decide(const std::set<int>& agreeing) {
  const int size = static_cast<int>(seen_.size());
  if (!is_quorum(size, agreeing, gone())) return false;
  if (is_quorum(size, agreeing, {})) return true;
  if (const auto recorded = options_.recorded ? options_.recorded() : std::nullopt) found_ = *recorded;
  require<CommError>(found_ || !options_.has_gone_on || !options_.has_gone_on(), "rank ", rank_, " of ", size,
                     " could not reach the others for some time: the other ranks have gone on without it, and have "
                     "ended; expected this process to end");
  return true;
}

std::optional<json> Regroup::propose() {
  const int size = static_cast<int>(seen_.size());
  const int64_t ballot = (acceptor_.highest_ballot() / size + 1) * size + rank_;
  std::set<int> agreeing;
  int64_t best = 0;
  json value;
  const auto promises = request(first_members(size), {{"op", "prepare"}, {"ballot", ballot}});
  if (found_) return found_;
  for (const auto& [member, answer] : promises) {
    if (!answer.value("agrees", false)) {
      // Makes the next ballot higher than the ballot that this member has promised.
      acceptor_.answer({{"op", "prepare"}, {"generation", group_.generation}, {"ballot", answer.at("promised")}});
      continue;
    }
    agreeing.insert(member);
    if (const auto accepted = answer.at("accepted_ballot").get<int64_t>(); accepted > best) {
      best = accepted;
      value = answer.at("accepted");
    }
  }
  if (!may_decide(agreeing)) return std::nullopt;
  if (found_) return found_;
  if (best == 0) {
    Decision decision = compose(agreeing);
    if (static_cast<int>(decision.members.size()) < options_.least_ranks) return std::nullopt;
    serve_store_(decision);
    value = decision;
  }
  agreeing.clear();
  for (const auto& [member, answer] :
       request(first_members(size), {{"op", "accept"}, {"ballot", ballot}, {"value", value}}))
    if (answer.value("agrees", false)) agreeing.insert(member);
  if (found_) return found_;
  if (!may_decide(agreeing)) return std::nullopt;
  return found_ ? found_ : std::optional(value);
}

}  // namespace tessera::internal
