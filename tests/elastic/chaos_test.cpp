// Random faults on processes that train: one is killed, stopped, crashes, exits or throws, or the link between two
// network namespaces is cut, at a random moment in a gather, a reduction, a step, a copy, a commit, a regroup, a join
// or a save. Spares and restarted ranks join. No process may hang; there is one group of each generation; each process
// that ends well has the parameters of a run that loads checkpoints of the same steps at the same worlds; and a death
// loses no more than the steps since the last complete copy.
//
// TESSERA_CHAOS_FAULTS (40) rounds from seed TESSERA_CHAOS_SEED (1). `make elastic-chaos` runs 1,000.
#include <c10/util/Logging.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/elastic/elastic_ranks.h"

namespace tessera::chaos_test {
namespace {

using namespace testing_support;

// The last one is drawn apart.
enum class Way { kKill, kStop, kCrash, kExit, kThrow, kCut };
constexpr const char* kWays[] = {"SIGKILL", "SIGSTOP", "SIGSEGV", "exit", "exception", "cut link"};
constexpr const char* kPlaces[] = {"gather", "reduction", "step", "copy", "commit", "regroup", "join", "save"};
constexpr char kLink[] = "veth0";
constexpr int kForever = -1;

struct Blow {
  int process = 0;
  Way way = Way::kKill;
  Place place = Place::kGather;
  int skip = 0;  // how often the process reaches the place before
  int delay_us = 0;
};

struct Round {
  int world = 2;
  int first_side = 0;         // processes of the first namespace; 0: no namespaces
  int heal_after = kForever;  // milliseconds until the cut link is up again
  Training training;
  ElasticOptions options;
  std::vector<Blow> blows;

  bool is_on_first_side(int process) const { return process < world ? process < first_side : process % 2 == 0; }
  std::string text() const {
    std::ostringstream text;
    text << world << " ranks, wrapper " << static_cast<int>(training.wrapper) << ", copy_every " << options.copy_every
         << ", copies " << options.copies << ", most_ranks " << options.most_ranks << ", spares " << training.joiners
         << ", restarts " << training.restarts;
    for (const Blow& blow : blows)
      text << "; process " << blow.process << ": " << kWays[static_cast<int>(blow.way)] << " in a "
           << kPlaces[static_cast<int>(blow.place)] << " after " << blow.skip << " others + " << blow.delay_us << " us";
    if (first_side > 0) text << "; ranks from " << first_side << " in the second namespace, up after " << heal_after;
    return text.str();
  }
};

Round draw_round(unsigned seed, bool may_cut) {
  std::mt19937 random(seed);
  const auto draw = [&](int least, int most) { return std::uniform_int_distribution<int>(least, most)(random); };
  Round round;
  round.world = draw(2, 6);
  round.training.wrapper = static_cast<Wrapper>(draw(0, 2));
  round.training.steps = 11;
  round.training.save_every = 4;
  round.options = quick_options();
  round.options.copy_every = draw(1, 4);
  round.options.copies = draw(1, 2);
  const auto place_of = [&](const std::vector<Place>& places) {
    return places[static_cast<size_t>(draw(0, static_cast<int>(places.size()) - 1))];
  };
  const std::vector<Place> in_training{Place::kGather, Place::kReduction, Place::kStep,
                                       Place::kCopy,   Place::kCommit,    Place::kSave};
  std::vector<Place> places = in_training;
  places.push_back(Place::kJoin);
  if (round.world > 2) places.push_back(Place::kRegroup);
  const Place first = place_of(places);
  std::vector<Place> of_blows{first};
  if (first == Place::kRegroup)
    of_blows = {place_of(in_training), first};  // the first one causes the regroup
  else if (round.world > 2 && draw(0, 2) == 0)
    of_blows.push_back(place_of(in_training));
  round.training.joiners = first == Place::kJoin || draw(0, 4) == 0 ? 1 : 0;
  round.training.restarts = draw(0, 3) == 0 ? 1 : 0;
  const bool may_grow = first == Place::kJoin || (round.training.joiners > 0 && draw(0, 1) == 0);
  round.options.most_ranks = may_grow ? round.world + 1 : 0;
  // A process that joins asks ten times a second.
  if (round.training.joiners + round.training.restarts > 0) round.training.pause = milliseconds(20);
  for (const Place place : of_blows) {
    Blow blow{.place = place};
    do {
      blow.process = draw(0, place == Place::kJoin ? round.world : round.world - 1);
    } while (!round.blows.empty() && blow.process == round.blows[0].process);
    const int way = draw(0, 49);  // stopped ranks and cut links cost seconds
    blow.way = way == 0             ? Way::kStop
               : way < 3 && may_cut ? Way::kCut
               : way < 33           ? Way::kKill
                                    : static_cast<Way>(2 + way % 3);
    const int most = place == Place::kCopy ? 10 / round.options.copy_every
                     : place == Place::kSave || (place == Place::kJoin && blow.process == round.world) ? 1
                     : place == Place::kRegroup || place == Place::kJoin                               ? 0
                                                                                                       : 10;
    blow.skip = draw(0, most);
    const int longest_us[] = {200, 3000, 30000};
    blow.delay_us = draw(0, longest_us[draw(0, 2)]);
    if (blow.way == Way::kStop) {
      round.options.group.timeout = milliseconds(2000);
      round.options.stopped_after = milliseconds(1000);
      round.training.wake_after = milliseconds(4000);
    } else if (blow.way == Way::kCut) {
      round.first_side = draw(1, round.world - 1);
      const int times[] = {200, 3000, kForever};
      round.heal_after = times[draw(0, 2)];
      round.options.group.timeout = milliseconds(1500);
      round.options.stopped_after = milliseconds(1000);
      round.options.regroup_timeout = milliseconds(5000);
    }
    round.blows.push_back(blow);
  }
  return round;
}

// Two network namespaces, joined by a pair of virtual interfaces.
class TwoHosts {
 public:
  TwoHosts() {
    is_made_ =
        run("ip netns add " + names_[0]) && run("ip netns add " + names_[1]) &&
        run("ip link add " + link_ + " netns " + names_[0] + " type veth peer name " + link_ + " netns " + names_[1]);
    for (const int side : {0, 1})
      is_made_ = is_made_ && run("ip -n " + names_[side] + " link set lo up") &&
                 run("ip -n " + names_[side] + " addr add 10.213.8." + std::to_string(side + 1) + "/24 dev " + link_);
  }
  ~TwoHosts() {
    for (const std::string& name : names_) run("ip netns del " + name);
  }
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  bool is_made() const { return is_made_; }
  void connect() {
    for (const std::string& name : names_) ASSERT_TRUE(run("ip -n " + name + " link set " + link_ + " up"));
  }
  // This process communicates by the namespace's link from now on. It must have one thread.
  void enter(int side) const {
    const int space = ::open(("/var/run/netns/" + names_[side]).c_str(), O_RDONLY | O_CLOEXEC);
    if (space < 0 || ::setns(space, CLONE_NEWNET) != 0) throw std::runtime_error("setns failed");
    ::close(space);
    ::setenv("GLOO_SOCKET_IFNAME", link_.c_str(), 1);
    ::setenv("TESSERA_PEER_MEMORY", "0", 1);
  }

 private:
  static bool run(const std::string& command) { return std::system((command + " > /dev/null 2>&1").c_str()) == 0; }

  const std::string id_ = std::to_string(::getpid()), link_ = kLink;
  const std::string names_[2] = {"tessera-chaos-a-" + id_, "tessera-chaos-b-" + id_};
  bool is_made_ = false;
};

void set_link(bool is_up) {
  const int socket = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ifreq request{};
  std::strcpy(request.ifr_name, kLink);
  ::ioctl(socket, SIOCGIFFLAGS, &request);
  request.ifr_flags = static_cast<short>(is_up ? request.ifr_flags | IFF_UP : request.ifr_flags & ~IFF_UP);
  ::ioctl(socket, SIOCSIFFLAGS, &request);
  ::close(socket);
}

void strike(const Blow& blow, int heal_after) {
  if (blow.way == Way::kThrow) throw std::runtime_error("as planned");
  std::thread([blow, heal_after] {
    std::this_thread::sleep_for(std::chrono::microseconds(blow.delay_us));
    if (blow.way == Way::kExit) ::_exit(3);
    if (blow.way == Way::kCut) {
      set_link(false);
      if (heal_after == kForever) return;
      std::this_thread::sleep_for(milliseconds(heal_after));
      set_link(true);
      return;
    }
    ::kill(::getpid(), blow.way == Way::kKill ? SIGKILL : blow.way == Way::kStop ? SIGSTOP : SIGSEGV);
  }).detach();
}

// The groups, as all processes saw them.
std::map<int64_t, Segment> history_of(const TemporaryFolder& folder, int processes) {
  std::map<int64_t, Segment> history;
  for (int process = 0; process < processes; ++process) {
    for (const Segment& segment : segments_of(folder, process)) {
      Segment& known = history.emplace(segment.generation, segment).first->second;
      EXPECT_EQ(segment.world, known.world) << "generation " << segment.generation;
      EXPECT_EQ(segment.step, known.step) << "generation " << segment.generation;
      EXPECT_EQ(segment.made_by, known.made_by) << "generation " << segment.generation;
      // A rank that did not reach a step has a group that did.
      known.last_before = std::max(known.last_before, segment.last_before);
    }
  }
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    if (!entry.path().filename().string().starts_with("member-")) continue;
    EXPECT_EQ(entry.file_size(), 1U) << "two groups of one generation: " << entry.path();
  }
  return history;
}

// Whether the process may end with an error.
bool may_fail(const Round& round, int process, int lost, const std::string& error) {
  const auto is_cut = [](const Blow& blow) { return blow.way == Way::kCut; };
  if (std::ranges::any_of(round.blows, [&](const Blow& blow) { return blow.process == process && !is_cut(blow); }))
    return true;
  // The last members may end or die before a joining process has learned of it.
  if (process >= round.world && error.find("cannot join the run") != std::string::npos) return true;
  // As many deaths as there are holders lose a part; before the first checkpoint on disk nothing replaces it.
  if (lost > round.options.copies && !latest_checkpoint(round.options.checkpoints)) return true;
  // Ranks that are silent as long as stopped_after are left out.
  if (round.heal_after != kForever && error.find("have gone on without it") != std::string::npos) return true;
  if (std::ranges::none_of(round.blows, is_cut)) return false;
  // More than half of the ranks must see each other.
  const int side = round.is_on_first_side(process) ? round.first_side : round.world - round.first_side;
  return round.blows.size() > 1 || round.training.joiners > 0 || 2 * side <= round.world;
}

void run_round(unsigned seed, std::optional<TwoHosts>& hosts, bool prints) {
  Round round = draw_round(seed, hosts.has_value());
  SCOPED_TRACE(round.text() + "\nrepeat: make elastic-chaos FAULTS=1 SEED=" + std::to_string(seed));
  const TemporaryFolder folder;
  round.options.checkpoints = folder / "saved";
  if (round.training.joiners + round.training.restarts + round.first_side > 0)
    round.options.rendezvous = folder / "rendezvous";
  if (round.first_side > 0) hosts->connect();
  std::vector<int> reached(round.blows.size(), 0);  // of each process
  const auto codes = run_ranks_as_processes(
      folder, round.world, round.training, round.options, nullptr,
      [&](int process, Place place) {
        for (size_t i = 0; i < round.blows.size(); ++i) {
          const Blow& blow = round.blows[i];
          if (process == blow.process && place == blow.place && reached[i]++ == blow.skip)
            strike(blow, round.heal_after);
        }
      },
      [&](int process) {
        // By default c10d prints a stack trace of each lost connection.
        ::setenv("TORCH_CPP_LOG_LEVEL", "ERROR", 0);
        c10::initLogging();
        if (round.first_side > 0) hosts->enter(round.is_on_first_side(process) ? 0 : 1);
      });
  const auto processes = static_cast<int>(codes.size());
  const std::string warnings = warnings_of(folder, processes);
  const auto history = history_of(folder, processes);
  if (prints) {
    std::printf("%s\n", round.text().c_str());
    for (const auto& [generation, segment] : history)
      std::printf("  %d ranks from step %lld, after step %lld\n", segment.world, static_cast<long long>(segment.step),
                  static_cast<long long>(segment.last_before));
    std::fflush(stdout);
  }
  const int other_side = std::min(round.first_side, round.world - round.first_side);
  const int lost = static_cast<int>(round.blows.size()) + std::max(0, other_side - 1);
  std::map<std::string, std::string> references;  // by segments
  for (int process = 0; process < processes; ++process) {
    const int code = codes[static_cast<size_t>(process)];
    const std::string error = file_bytes(folder / ("error-" + std::to_string(process)));
    EXPECT_TRUE(code == 0 || may_fail(round, process, lost, error)) << "process " << process << ": " << error << "\n"
                                                                    << warnings;
    const auto own = segments_of(folder, process);
    EXPECT_TRUE(code != 0 || process >= round.world || !own.empty()) << "process " << process;
    if (code != 0 || own.empty()) continue;
    std::string name;
    std::vector<Segment> segments;
    for (const auto& [generation, segment] : history) {
      if (generation > own.back().generation) break;
      name += std::to_string(segment.world) + " from " + std::to_string(segment.step) + " of group " +
              std::to_string(segment.made_by) + ", ";
      // A copy ends before the next one starts, so the newest complete one is at most two periods old.
      const bool is_from_disk = warnings.find("continuing from") != std::string::npos;
      EXPECT_TRUE(segments.empty() || is_from_disk ||
                  segment.last_before - segment.step <= 2 * round.options.copy_every)
          << name << "\n"
          << warnings;
      segments.push_back(segment);
    }
    if (!references.contains(name)) references[name] = reference(folder, segments, round.training);
    EXPECT_EQ(file_bytes(folder / ("parameters-" + std::to_string(process))), references[name])
        << "process " << process << ": " << name << "\n"
        << warnings;
  }
}

int number_of(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoi(text);
}

TEST(ElasticChaos, SurvivorsGoOnAfterAnyFault) {
  const int faults = number_of("TESSERA_CHAOS_FAULTS", 40), seed = number_of("TESSERA_CHAOS_SEED", 1);
  std::optional<TwoHosts> hosts(std::in_place);
  if (!hosts->is_made()) {
    std::printf("no link is cut: `ip netns add` is not allowed or not installed here (it needs root and iproute2)\n");
    hosts.reset();
  }
  for (int i = 0; i < faults && !HasFailure(); ++i)
    run_round(static_cast<unsigned>(seed + i), hosts, /*prints=*/faults == 1);
}

}  // namespace
}  // namespace tessera::chaos_test
