#include "plan/simulate/shared_cores.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <utility>

#include "core/comm/shared_memory/peer_memory.h"
#include "core/runtime/require.h"
#include "plan/simulate/collective_flow.h"
#include "plan/simulate/core_turns.h"
#include "plan/simulate/step_actions.h"

namespace tessera::internal {
namespace {

constexpr double kNever = CoreTurns::kNever;
constexpr int kMostRanks = 256;  // maximum number of simulated ranks
// Target number of operators in all repeats. The step is repeated, because ranks drift apart during the first steps.
constexpr size_t kMostOperators = 2'000'000;
constexpr size_t kLeastRepeats = 2, kMostRepeats = 8;
// Messages to other hosts are split into pieces, so that the link sends one piece while a core prepares the next.
constexpr double kPieceBytes = 1 << 20;
constexpr int kMostPieces = 64;

// An action of a simulated rank: the start or end of an operator, or a part of a collective.
struct Move {
  enum class Kind : uint8_t {
    kCompute,
    kComputed,
    kSend,      // the rank announces its messages, and copies those that other ranks are ready to receive
    kReceive,   // the rank announces that it receives, and copies messages that other ranks have announced
    kReceived,  // the rank has copied all messages that it must copy
    kAwait,     // the rank sleeps until all messages of the exchange have arrived
    kSum,
    kWaited
  } kind;
  size_t index;
  int exchange = 0;  // index of the exchange in its collective (0 or 1)
};

struct Moves {
  std::vector<Move> before, of_step;  // the moves of earlier steps, and the moves of the step to repeat
};

Moves moves_of(const RunRecord& record, int step) {
  using Kind = Move::Kind;
  Moves all;
  for (const StepAction& action : actions_of(record)) {
    if (action.step < 1 || action.step > step) continue;
    std::vector<Move>& moves = action.step < step ? all.before : all.of_step;
    const auto exchange = [&](int which) {
      for (const Kind kind : {Kind::kSend, Kind::kReceive, Kind::kReceived})
        moves.push_back({kind, action.index, which});
    };
    if (action.kind == StepAction::Kind::kCompute) {
      moves.push_back({Kind::kCompute, action.index});
      moves.push_back({Kind::kComputed, action.index});
      continue;
    }
    const RecordedCollective& collective = record.collectives[action.index];
    if (collective.ranks < 2) continue;
    if (action.kind == StepAction::Kind::kStart) {
      exchange(0);
    } else if (collective.step == action.step) {  // skips collectives of earlier steps, which have completed
      moves.push_back({Kind::kAwait, action.index, 0});
      moves.push_back({Kind::kSum, action.index});
      if (flow_of(collective).exchanges == 2) {
        exchange(1);
        moves.push_back({Kind::kAwait, action.index, 1});
      }
      moves.push_back({Kind::kWaited, action.index});
    }
  }
  return all;
}

// The state of one exchange of a collective in one group.
struct Exchange {
  struct Side {
    bool has_begun = false;             // whether the rank has announced its sends
    bool receives = false;              // whether the rank has announced that it receives
    bool is_done = false;               // whether the rank has copied all messages that it must copy
    double sent_bytes = 0;              // bytes that the rank sends to other hosts
    double got_bytes = 0;               // bytes that the rank receives from other hosts
    double sent_s = kNever, got_s = 0;  // times at which all sent_bytes and all got_bytes have arrived
  };
  std::vector<Side> sides;  // one for each rank, in the order of the group
  bool goes_out = false;    // whether messages between hosts have started
};

// An exchange from the viewpoint of one rank.
struct View {
  const RecordedCollective& collective;
  const CollectiveFlow flow;
  const int which;
  const std::vector<int> group;
  const size_t own, root;  // indices in `group`
  Exchange& exchange;

  Exchange::Side& side() const { return exchange.sides[own]; }
  bool sends_to(size_t peer) const { return peer != own && flow.sends(which, own == root, peer == root); }
  bool gets_from(size_t peer) const { return peer != own && flow.sends(which, peer == root, own == root); }
  double message_bytes() const { return flow.message_bytes[which]; }
};

struct Rank {
  const RunRecord* record;
  const Moves* moves;
  std::mt19937 noise;
  size_t next = 0;
  int repeat = -1;  // index of the current repetition of Moves::of_step, or -1 during Moves::before
  double began_s = 0;
  bool is_asleep = false;
  std::vector<double> repeats_s;  // start time of each repetition, and end time of the last repetition
};

// The thread that sends a rank's messages to other hosts, and the state of the rank's link.
struct Messenger {
  struct Piece {
    double processor_s, link_s, latency_s;
    Exchange* exchange;
    size_t side;
    bool is_last;
  };
  std::deque<Piece> pieces;
  double out_free_s = 0, in_free_s = 0;  // times at which the link can send and receive again
};

class CoreSimulation {
 public:
  CoreSimulation(const std::vector<const RunRecord*>& records, const MachineSpeed& speed, int step)
      : speed_(speed),
        ranks_(simulated_ranks(records, speed)),
        repeats_(repeats_of(*records[0], ranks_)),
        turns_(2 * static_cast<size_t>(ranks_), speed.cores, [this](size_t thread) { go_on(thread); }),
        messengers_(static_cast<size_t>(ranks_)) {
    check(records);
    for (const RunRecord* record : records) moves_.push_back(moves_of(*record, step));
    for (int rank = 0; rank < ranks_; ++rank) {
      const size_t which = records.size() == 1 ? 0 : static_cast<size_t>(rank);
      all_.push_back({records[which], &moves_[which], std::mt19937(static_cast<uint32_t>(rank + 1))});
    }
    started_s_.resize(records[0]->collectives.size());
    for (const RecordedCollective& each : records[0]->collectives)  // time_of() throws for an unknown link speed
      if (each.step >= 1 && each.step <= step) {
        const double seconds = time_of(each, speed).seconds;
        if (each.step == step) result_.communication_s += seconds;
      }
  }

  StepTime run() {
    for (int rank = 0; rank < ranks_; ++rank) go_on_rank(rank);
    while (over_ < ranks_) turns_.advance();
    return finish();
  }

 private:
  enum class Outcome : uint8_t { kDone, kBurst, kSleeps };  // kBurst: the move ends when the rank's burst ends

  // Returns the smallest world size that contains all recorded ranks, and whole rows and columns of group_of()'s grids.
  static int world_of(const RunRecord& record) {
    int world = 1;
    for (const RecordedCollective& each : record.collectives)
      world = std::max(world, each.members ? std::ranges::max(*each.members) + 1 : each.ranks);
    for (const RecordedCollective& each : record.collectives) {
      if (!each.members || each.ranks < 2) continue;
      const int block = each.ranks * std::max(1, (*each.members)[1] - (*each.members)[0]);
      world = (world + block - 1) / block * block;
    }
    return world;
  }

  static int simulated_ranks(const std::vector<const RunRecord*>& records, const MachineSpeed& speed) {
    const int world = std::max(world_of(*records[0]), static_cast<int>(records.size()));
    const bool is_one_machine = speed.ranks_per_host == 0 || speed.shares_cores_between_hosts;
    const int ranks = is_one_machine ? world : std::min(world, speed.ranks_per_host);
    require(ranks <= kMostRanks, "the time of ", ranks, " ranks that share ", speed.cores, " cores, expected at most ",
            kMostRanks, " on a host: MachineSpeed::ranks_per_host");
    return ranks;
  }

  static int repeats_of(const RunRecord& record, int ranks) {
    const size_t operators = std::max<size_t>(record.operators.size(), 1) * static_cast<size_t>(ranks);
    return static_cast<int>(std::clamp(kMostOperators / operators, kLeastRepeats, kMostRepeats));
  }

  // Throws std::invalid_argument if there is neither one record nor one record per rank, or if collectives differ.
  void check(const std::vector<const RunRecord*>& records) const {
    require(records.size() == 1 || records.size() == static_cast<size_t>(ranks_), "the time of ", records.size(),
            " records, expected one, or one for each of ", ranks_, " ranks of a host");
    const auto same = [](const RecordedCollective& a, const RecordedCollective& b) {
      return a.operation == b.operation && a.ranks == b.ranks && a.step == b.step;
    };
    for (size_t rank = 1; rank < records.size(); ++rank)
      require(std::ranges::equal(records[0]->collectives, records[rank]->collectives, same),
              "the records of ranks 0 and ", rank, " have other collectives, expected those of one training");
  }

  int host_of(int rank) const { return speed_.ranks_per_host == 0 ? 0 : rank / speed_.ranks_per_host; }
  bool is_simulated(int rank) const { return rank < ranks_; }
  bool share_memory(int rank, int peer) const { return is_simulated(peer) && host_of(rank) == host_of(peer); }
  size_t messenger_of(int rank) const { return messengers_.size() + static_cast<size_t>(rank); }  // index in turns_
  Rank& at(int rank) { return all_[static_cast<size_t>(rank)]; }

  void go_on(size_t thread) {
    const int index = static_cast<int>(thread);
    index < ranks_ ? go_on_rank(index) : go_on_messages(index - ranks_);
  }

  // ---- ranks ----------------------------------------------------------------------------------

  // Called when a burst or sleep of a rank ends. Runs the rank's next moves until a move starts a burst or a sleep.
  void go_on_rank(int rank) {
    Rank& self = at(rank);
    while (self.repeat < repeats_) {
      const std::vector<Move>& moves = self.repeat < 0 ? self.moves->before : self.moves->of_step;
      if (self.next == moves.size()) {
        self.next = 0;
        ++self.repeat;
        self.repeats_s.push_back(turns_.now_s());
        continue;
      }
      const Outcome outcome = make(rank, moves[self.next]);
      if (outcome == Outcome::kSleeps) return;
      ++self.next;
      if (outcome == Outcome::kBurst) return;
    }
    turns_.sleep(static_cast<size_t>(rank));
    ++over_;
  }

  Outcome make(int rank, const Move& move) {
    using Kind = Move::Kind;
    switch (move.kind) {
      case Kind::kCompute:
        return compute(rank, move);
      case Kind::kComputed:
        return computed(rank, move);
      case Kind::kSend:
        return send(rank, move);
      case Kind::kReceive:
        return receive(rank, move);
      case Kind::kReceived: {
        const View view = view_of(rank, move);
        view.side().is_done = true;
        for (const int peer : view.group) look(peer);
        return Outcome::kDone;
      }
      case Kind::kAwait:
        return await(rank, view_of(rank, move));
      case Kind::kSum:
        return sum(rank, view_of(rank, move));
      case Kind::kWaited:
        break;
    }
    if (rank == 0 && self_is_last(rank)) add_collective(view_of(rank, move), move.index);
    return Outcome::kDone;
  }

  bool self_is_last(int rank) { return at(rank).repeat == repeats_ - 1; }

  Outcome burst(int rank, double seconds) {
    if (rank == 0 && at(rank).repeat >= 0) result_.processor_s += seconds;
    turns_.burst(static_cast<size_t>(rank), seconds);
    return Outcome::kBurst;
  }

  Outcome compute(int rank, const Move& move) {
    Rank& self = at(rank);
    self.began_s = turns_.now_s();
    const double seconds = speed_.seconds_of(self.record->operators[move.index]);
    if (!(speed_.jitter > 0)) return burst(rank, seconds);
    return burst(rank, seconds * std::exp(std::normal_distribution<double>(0, speed_.jitter)(self.noise)));
  }

  Outcome computed(int rank, const Move& move) {
    const Rank& self = at(rank);
    if (rank != 0 || self.repeat < 0) return Outcome::kDone;
    result_.compute_s += turns_.now_s() - self.began_s;
    if (!self_is_last(rank)) return Outcome::kDone;
    const RecordedOperator& op = self.record->operators[move.index];
    const auto unit = static_cast<size_t>(op.unit);
    const auto& units = self.record->units;
    result_.intervals.push_back({op.name, Lane::kCompute, self.began_s, turns_.now_s(),
                                 unit < units.size() ? units[unit] : "", op.in_backward});
    return Outcome::kDone;
  }

  // ---- collectives ----------------------------------------------------------------------------

  View view_of(int rank, const Move& move) {
    const RecordedCollective& collective = at(rank).record->collectives[move.index];
    std::vector<int> group = group_of(collective, rank);
    Exchange& exchange = exchanges_[{at(rank).repeat, move.index, move.exchange, group.front()}];
    exchange.sides.resize(group.size());
    const auto own = static_cast<size_t>(std::ranges::find(group, rank) - group.begin());
    const auto root = static_cast<size_t>(std::clamp(collective.root, 0, collective.ranks - 1));
    return {collective, flow_of(collective), move.exchange, std::move(group), own, root, exchange};
  }

  // Returns the time of this rank's copies in kSend, or in kReceive if `receives`. Of two ranks, the later one copies.
  double copy_seconds(int rank, const View& view, bool receives) const {
    double seconds = 0;
    for (size_t peer = 0; peer < view.group.size(); ++peer) {
      const Exchange::Side& other = view.exchange.sides[peer];
      const bool has_message = receives ? view.gets_from(peer) : view.sends_to(peer);
      const bool comes_second = receives ? other.has_begun : other.receives;
      if (has_message && comes_second && share_memory(rank, view.group[peer]))
        seconds += view.message_bytes() / speed_.within_host.bytes_per_s;
    }
    return seconds;
  }

  Outcome send(int rank, const Move& move) {
    const View view = view_of(rank, move);
    if (rank == 0 && move.exchange == 0) started_s_[move.index] = turns_.now_s();
    view.side().has_begun = true;
    for (size_t peer = 0; peer < view.group.size(); ++peer) {
      if (share_memory(rank, view.group[peer])) continue;
      if (view.sends_to(peer)) view.side().sent_bytes += view.message_bytes();
      if (view.gets_from(peer)) view.side().got_bytes += view.message_bytes();
    }
    bool all_have_begun = true;  // messages between hosts start when all ranks of this host have begun
    for (size_t peer = 0; peer < view.group.size(); ++peer)
      all_have_begun = all_have_begun && (!is_simulated(view.group[peer]) || view.exchange.sides[peer].has_begun);
    if (all_have_begun) send_to_hosts(view);
    const double begin_s =
        move.exchange == 0 ? speed_.within_host.latency_s * latencies_of(view.collective) * view.flow.exchanges : 0;
    return burst(rank, begin_s + copy_seconds(rank, view, /*receives=*/false));
  }

  Outcome receive(int rank, const Move& move) {
    const View view = view_of(rank, move);
    const double seconds = copy_seconds(rank, view, /*receives=*/true);
    view.side().receives = true;
    return burst(rank, seconds);
  }

  // Returns the time at which this rank has sent and received all messages of the exchange, or kNever if unknown.
  double through_s(int rank, const View& view) const {
    double through = 0;
    for (size_t peer = 0; peer < view.group.size(); ++peer) {
      const Exchange::Side& other = view.exchange.sides[peer];
      if (!view.sends_to(peer) && !view.gets_from(peer)) continue;
      if (share_memory(rank, view.group[peer])) {
        if (!other.is_done) return kNever;
      } else if (!view.exchange.goes_out) {
        return kNever;
      } else if (is_simulated(view.group[peer]) && view.gets_from(peer)) {
        through = std::max(through, other.sent_s);
      }
    }
    const Exchange::Side& own = view.side();
    if (own.sent_bytes > 0) through = std::max(through, own.sent_s);
    return std::max(through, own.got_s);
  }

  Outcome await(int rank, const View& view) {
    Rank& self = at(rank);
    constexpr double kNothingSeconds = 1e-12;
    const double until_s = through_s(rank, view);
    if (until_s <= turns_.now_s() + kNothingSeconds) {
      self.is_asleep = false;
      return Outcome::kDone;
    }
    if (!self.is_asleep) self.began_s = turns_.now_s();
    self.is_asleep = true;
    turns_.sleep(static_cast<size_t>(rank), until_s);
    return Outcome::kSleeps;
  }

  // Makes a waiting rank check its exchange again: at once if the rank still polls, else after wake_s.
  void look(int rank) {
    if (!is_simulated(rank) || !turns_.sleeps(static_cast<size_t>(rank)) || !at(rank).is_asleep) return;
    const std::chrono::duration<double> polling = poll_time(ranks_, speed_.cores, /*threads=*/1);
    const bool sleeps = turns_.now_s() - at(rank).began_s > polling.count();
    turns_.wake(static_cast<size_t>(rank), turns_.now_s() + (sleeps ? speed_.wake_s : 0));
  }

  // Adds up data from ranks of this host only. The messenger's thread adds up data from other hosts.
  Outcome sum(int rank, const View& view) {
    if (view.flow.sum_bytes == 0 || (view.flow.only_root_sums && view.own != view.root)) return Outcome::kDone;
    const auto near = std::ranges::count_if(view.group, [&](int peer) { return share_memory(rank, peer); }) - 1;
    const double share = static_cast<double>(near) / static_cast<double>(view.group.size() - 1);
    return burst(rank, share * view.flow.sum_bytes * sum_s_per_byte(speed_.within_host));
  }

  void add_collective(const View& view, size_t index) {
    const RecordedCollective& collective = view.collective;
    const std::string name = collective.operation + (collective.what.empty() ? "" : " of " + collective.what);
    bool within = false, between = false;
    for (const int peer : view.group) (share_memory(0, peer) ? within : between) |= peer != 0;
    if (within) result_.intervals.push_back({name, Lane::kWithinHost, started_s_[index], turns_.now_s()});
    if (between) result_.intervals.push_back({name, Lane::kBetweenHosts, started_s_[index], turns_.now_s()});
  }

  // ---- between hosts --------------------------------------------------------------------------

  void send_to_hosts(const View& view) {
    view.exchange.goes_out = true;
    for (size_t side = 0; side < view.group.size(); ++side) {
      const int rank = view.group[side];
      if (!is_simulated(rank)) continue;
      Exchange::Side& own = view.exchange.sides[side];
      const double latency_s = (speed_.between_hosts.latency_s + speed_.tcp.latency_s) * latencies_of(view.collective);
      if (own.got_bytes > 0) {
        double& free_s = messengers_[static_cast<size_t>(rank)].in_free_s;
        free_s = std::max(free_s, turns_.now_s()) + own.got_bytes / speed_.between_hosts.bytes_per_s;
        own.got_s = free_s + latency_s;
      }
      if (own.sent_bytes > 0) {
        queue(rank, side, view, latency_s);
      } else {
        own.sent_s = 0;
      }
    }
    for (const int rank : view.group) look(rank);
  }

  void queue(int rank, size_t side, const View& view, double latency_s) {
    const double bytes = view.exchange.sides[side].sent_bytes;
    const LinkSpeed& tcp = speed_.tcp;
    const bool reduces = view.flow.sum_bytes > 0 && view.which == 0;
    const double per_s = reduces && tcp.reduced_bytes_per_s > 0 ? tcp.reduced_bytes_per_s : tcp.bytes_per_s;
    const int count = std::clamp(static_cast<int>(std::ceil(bytes / kPieceBytes)), 1, kMostPieces);
    const double piece_bytes = bytes / count;
    Messenger& messenger = messengers_[static_cast<size_t>(rank)];
    const bool was_idle = messenger.pieces.empty();
    for (int i = 0; i < count; ++i)
      messenger.pieces.push_back({per_s > 0 ? piece_bytes / per_s : 0, piece_bytes / speed_.between_hosts.bytes_per_s,
                                  latency_s, &view.exchange, side, i + 1 == count});
    if (was_idle) turns_.burst(messenger_of(rank), messenger.pieces.front().processor_s);
  }

  void go_on_messages(int rank) {
    Messenger& messenger = messengers_[static_cast<size_t>(rank)];
    const Messenger::Piece done = messenger.pieces.front();
    messenger.pieces.pop_front();
    messenger.out_free_s = std::max(messenger.out_free_s, turns_.now_s()) + done.link_s;
    if (done.is_last) {
      done.exchange->sides[done.side].sent_s = messenger.out_free_s + done.latency_s;
      for (int each = 0; each < ranks_; ++each) look(each);
    }
    const size_t thread = messenger_of(rank);
    messenger.pieces.empty() ? turns_.sleep(thread) : turns_.burst(thread, messenger.pieces.front().processor_s);
  }

  // ---- the result -----------------------------------------------------------------------------

  // Returns the mean times of the repeats, with the intervals of the last repeat.
  StepTime finish() {
    const std::vector<double>& began_s = all_[0].repeats_s;
    const double last_began_s = began_s[began_s.size() - 2];
    result_.total_s = (began_s.back() - began_s.front()) / repeats_;
    result_.compute_s = std::min(result_.compute_s / repeats_, result_.total_s);
    result_.exposed_s = result_.total_s - result_.compute_s;
    result_.processor_s /= repeats_;
    for (TimedInterval& each : result_.intervals) each.begin_s -= last_began_s, each.end_s -= last_began_s;
    std::ranges::stable_sort(result_.intervals, {},
                             [](const TimedInterval& each) { return std::pair(each.lane, each.begin_s); });
    return std::move(result_);
  }

  const MachineSpeed& speed_;
  const int ranks_;  // number of simulated ranks
  const int repeats_;
  CoreTurns turns_;  // contains the threads of the ranks, then the threads of their messengers
  std::vector<Moves> moves_;
  std::vector<Rank> all_;
  std::vector<Messenger> messengers_;
  std::map<std::tuple<int, size_t, int, int>, Exchange>
      exchanges_;                  // the key is {repetition, collective, exchange, first rank of the group}
  std::vector<double> started_s_;  // the time at which rank 0 started each collective
  int over_ = 0;
  StepTime result_;
};

}  // namespace

StepTime predict_on_cores(const std::vector<const RunRecord*>& records, const MachineSpeed& speed, int step) {
  return CoreSimulation(records, speed, step).run();
}

}  // namespace tessera::internal
