#include "elastic/joining.h"

#include <c10/util/env.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <future>
#include <iterator>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include <tessera/errors.h>
#include "core/runtime/warn.h"

namespace tessera::internal {

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kRound{100};  // pause between the requests of a joining process to the members
constexpr std::chrono::seconds kRequestLife{3};

// Replaces a file atomically, because readers must never see a partly written file.
void replace(const fs::path& path, const json& content, const std::string& id) {
  std::error_code error;
  fs::create_directories(path.parent_path(), error);  // the write below reports a failure
  const fs::path temporary = path.string() + "." + id;
  std::ofstream file(temporary, std::ios::trunc);
  file << content.dump() << "\n";
  file.close();
  if (!file) throw std::runtime_error("ElasticOptions::rendezvous: cannot write " + temporary.string());
  fs::rename(temporary, path, error);
  if (error)
    throw std::runtime_error("ElasticOptions::rendezvous: cannot replace " + path.string() + ": " + error.message());
}

// Returns the content of a file; nullopt if it cannot be opened. Throws std::runtime_error if the file is damaged, or
// is not a regular file, because opening a pipe would block.
template <class T>
std::optional<T> read_as(const fs::path& path) {
  std::error_code ignored;
  if (const auto status = fs::status(path, ignored); fs::exists(status) && !fs::is_regular_file(status))
    throw std::runtime_error("ElasticOptions::rendezvous: " + path.string() + " is not a regular file; remove it");
  std::ifstream file(path);
  if (!file) return std::nullopt;
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  try {
    return json::parse(text).get<T>();
  } catch (const json::exception& error) {
    throw std::runtime_error("ElasticOptions::rendezvous: " + path.string() +
                             " is damaged; delete it if no run uses the folder: " + error.what());
  }
}

}  // namespace

RunFile::RunFile(const fs::path& folder) : path_(folder / "elastic-run.json") {}

void RunFile::write(const RunFacts& facts, const std::string& id) const { replace(path_, facts, id); }

std::optional<RunFacts> RunFile::read() const { return read_as<RunFacts>(path_); }

fs::path RunFile::record_path(const std::string& run_id, int64_t generation) const {
  return path_.string() + "." + run_id + "." + std::to_string(generation);
}

void RunFile::record(const std::string& run_id, const Decision& decision, const std::string& id) const {
  replace(record_path(run_id, decision.generation), decision, id);
}

std::optional<Decision> RunFile::recorded(const std::string& run_id, int64_t generation) const {
  const fs::path path = record_path(run_id, generation);
  std::error_code error;
  if (fs::status(path, error).type() == fs::file_type::not_found) return std::nullopt;
  auto decision = read_as<Decision>(path);
  if (!decision) throw std::runtime_error("ElasticOptions::rendezvous: cannot read " + path.string());
  return decision;
}

bool RunFile::has_later_group(const std::string& run_id, int64_t generation) const {
  const auto run = read();
  return run && run->run_id == run_id && (run->has_ended || run->generation > generation);
}

void RunFile::forget(const std::string& run_id) const {
  std::error_code error;  // ignored: a leftover record is harmless
  for (const auto& entry : fs::directory_iterator(path_.parent_path(), error))
    if (entry.path().string().starts_with(path_.string() + "." + run_id + ".")) fs::remove(entry.path(), error);
}

fs::path rendezvous_folder(const ElasticOptions& options) {
  return options.rendezvous.empty() ? fs::path(c10::utils::get_env(kRendezvousVariable).value_or(""))
                                    : options.rendezvous;
}

bool is_alive(const RunFile& file) {
  const auto run = file.read();
  if (!run || run->has_ended) return false;
  return std::ranges::any_of(run->members, [&](const Member& member) {
    try {
      return !look_at(member, run->generation, kPromptAnswer).contains("retired");
    } catch (const std::runtime_error&) {  // the member has ended or is silent; another one may answer
      return false;
    }
  });
}

bool has_ended(const RunFile& file) try {
  const auto run = file.read();
  if (!run || run->has_ended) return true;
  return std::ranges::all_of(run->members, [&](const Member& member) {
    try {
      return look_at(member, run->generation, kPromptAnswer).contains("retired");
    } catch (const PeerError& error) {
      return error.is_gone();
    }
  });
} catch (const std::exception&) {  // for example, the file is damaged: that proves nothing, and the members report it
  return false;
}

RendezvousFolder::RendezvousFolder() {
  const std::string folder = c10::utils::get_env("TMPDIR").value_or("");
  std::string name = fs::path(folder.empty() ? "/tmp" : folder) / "tessera-elastic-XXXXXX";
  if (::mkdtemp(name.data()) == nullptr)
    throw std::runtime_error("tessera::spawn_elastic: cannot create " + name + ": " + std::strerror(errno));
  path_ = name;
}

RendezvousFolder::~RendezvousFolder() {
  std::error_code error;  // ignored: a leftover folder is harmless
  fs::remove_all(path_, error);
}

void JoinRequests::enter(RunFacts facts, const Decision& group, std::string options) {
  const std::lock_guard lock(mutex_);
  std::erase_if(requests_, [&](const Request& request) { return std::ranges::count(group.members, request.member); });
  facts_ = std::move(facts);
  group_ = group;
  options_ = std::move(options);
}

void JoinRequests::leave() {
  const std::lock_guard lock(mutex_);
  facts_.reset();
}

json JoinRequests::answer(const json& request) {
  const auto member = request.at("member").get<Member>();
  const auto options = request.at("options").get<std::string>();
  std::unique_lock lock(mutex_);
  if (!facts_) return json::object();
  if (options != options_) {
    json refusal{{"refused", options_}};
    lock.unlock();  // the program's handler of warnings may block
    warn("a process at " + member.address + ":" + std::to_string(member.port) + " cannot join: it passes " + options +
         ", this run " + refusal.at("refused").get<std::string>() + "; expected equal ElasticOptions in all processes");
    return refusal;
  }
  json answer{{"facts", *facts_}};
  if (std::ranges::count(group_.members, member) > 0) {
    answer["decision"] = group_;
    return answer;
  }
  const auto known = std::ranges::find(requests_, member, &Request::member);
  if (known == requests_.end())
    requests_.push_back({member, RunClock::now()});
  else
    known->last_asked = RunClock::now();
  return answer;
}

std::vector<Member> JoinRequests::waiting() const {
  const std::lock_guard lock(mutex_);
  std::vector<Member> waiting;
  for (const Request& request : requests_)
    if (RunClock::now() - request.last_asked < kRequestLife) waiting.push_back(request.member);
  return waiting;
}

Joiner::Joiner(RunFile file, Member self, std::string options, milliseconds stopped_after, milliseconds timeout)
    : file_(std::move(file)),
      self_(std::move(self)),
      options_(std::move(options)),
      stopped_after_(stopped_after),
      timeout_(timeout) {}

bool Joiner::read_file() {
  const auto found = file_.read();
  if (found && (!run_ || found->run_id != run_->run_id || found->generation > run_->generation)) run_ = found;
  return found && found->has_ended;
}

std::optional<Joiner::Place> Joiner::ask() {
  has_answer_ = false;
  are_all_gone_ = run_.has_value();
  const std::vector<Member> members = run_ ? run_->members : std::vector<Member>();
  const PeerMessage request{{{"op", "join"}, {"member", self_}, {"options", options_}}, {}};
  std::vector<std::future<PeerMessage>> answers;
  // If no thread is free, this thread asks the member.
  for (const Member& member : members)
    answers.push_back(std::async(std::launch::async | std::launch::deferred,
                                 [&] { return ask_member(member, request, kPromptAnswer); }));
  for (auto& pending : answers) {
    json answer;
    try {
      answer = pending.get().fields;
    } catch (const PeerError& error) {  // the member is lost or silent
      are_all_gone_ = are_all_gone_ && error.is_gone();
      continue;
    }
    if (const auto refused = answer.find("refused"); refused != answer.end())
      throw std::invalid_argument("tessera::Elastic: this process passes " + options_ + ", the run that it joins " +
                                  refused->get<std::string>() + "; expected equal ElasticOptions in all processes");
    if (!answer.contains("facts")) continue;  // the member has left the run
    has_answer_ = true;
    are_all_gone_ = false;
    auto facts = answer.at("facts").get<RunFacts>();
    if (answer.contains("decision")) return Place{std::move(facts), answer.at("decision").get<Decision>()};
    if (facts.generation > run_->generation) run_ = std::move(facts);
  }
  return std::nullopt;
}

void Joiner::fail(const std::string& reason) const {
  throw CommError("tessera::Elastic: this process cannot join the run of " + file_.path().string() + ": " + reason +
                  "; expected a member that answers; restart the job from a checkpoint");
}

std::optional<Joiner::Place> Joiner::await_place() {
  const auto began = RunClock::now();
  const bool was_over = read_file();  // if true, the file is of a former run, and a next run may begin soon
  auto last_answer = began, last_living = began;
  for (;;) {
    if (auto place = ask()) return place;
    const auto now = RunClock::now();
    if (has_answer_) last_answer = now;
    if (!are_all_gone_) last_living = now;
    // A newer group, whose members this process does not know, may have written the file.
    if (!has_answer_ && read_file() && (!was_over || now - began > stopped_after_)) return std::nullopt;
    if (now - last_answer > timeout_)
      fail(run_ ? "no member has answered for " + std::to_string(timeout_.count()) +
                      " ms (ElasticOptions::regroup_timeout)"
                : "there is no such file after " + std::to_string(timeout_.count()) +
                      " ms (ElasticOptions::regroup_timeout)");
    if (now - last_living > stopped_after_) fail("all members have ended");
    std::this_thread::sleep_for(kRound);
  }
}

}  // namespace tessera::internal
