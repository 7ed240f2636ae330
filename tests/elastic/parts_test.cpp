// The parts of elastic training, without ranks or with threads as members.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <tessera/ddp.h>
#include <tessera/distributed_sampler.h>
#include <tessera/elastic.h>
#include <tessera/errors.h>
#include "checkpoint/format/checksum.h"
#include "core/launch/local_address.h"
#include "elastic/copies.h"
#include "elastic/copy_memory.h"
#include "elastic/group_store.h"
#include "elastic/joining.h"
#include "elastic/part_copies.h"
#include "elastic/peer_link.h"
#include "elastic/regroup.h"
#include "elastic/unchanged_pieces.h"
#include "tests/support/temporary_folder.h"

namespace tessera::parts_test {
using namespace internal;
namespace {

using std::chrono::milliseconds;

TEST(ElasticPartners, AreOnOtherHostsAndSpreadEvenly) {
  const std::vector<std::string> hosts{"a", "a", "b", "b", "c", "c"};
  std::vector<int> loads(hosts.size(), 0);
  for (int rank = 0; rank < 6; ++rank) {
    const auto partners = partners_of(rank, hosts, 2);
    ASSERT_EQ(partners.size(), 2U);
    std::set<std::string> of_hosts{hosts[static_cast<size_t>(rank)]};
    for (const int partner : partners) {
      of_hosts.insert(hosts[static_cast<size_t>(partner)]);
      ++loads[static_cast<size_t>(partner)];
    }
    EXPECT_EQ(of_hosts.size(), 3U) << rank;
  }
  EXPECT_EQ(loads, std::vector<int>(6, 2));
}

TEST(ElasticPartners, OfOneHostAreTheNextRanks) {
  const std::vector<std::string> hosts(3, "a");
  EXPECT_EQ(partners_of(0, hosts, 1), std::vector<int>{1});
  EXPECT_EQ(partners_of(2, hosts, 1), std::vector<int>{0});
  EXPECT_EQ(partners_of(1, hosts, 5), (std::vector<int>{2, 0}));
  EXPECT_TRUE(partners_of(0, {"a"}, 1).empty());
  EXPECT_TRUE(partners_of(0, hosts, 0).empty());
  for (int world = 2; world < 8; ++world)
    for (int rank = 0; rank < world; ++rank) {
      std::vector<std::string> uneven(static_cast<size_t>(world), "a");
      uneven.back() = "b";
      const auto partners = partners_of(rank, uneven, 2);
      EXPECT_EQ(partners.size(), static_cast<size_t>(std::min(2, world - 1)));
      EXPECT_FALSE(std::ranges::count(partners, rank));
    }
}

TEST(ElasticSteps, TheNewestCompleteOneIsChosen) {
  // Members 0 and 1 of three: each holds its own part and that of the rank before it.
  const std::vector<HeldStep> zero{{0, 10, 3, {0, 2}}, {0, 20, 3, {0}}}, one{{0, 10, 3, {0, 1}}, {0, 20, 3, {0, 1}}};
  const auto step = newest_complete_step({zero, one});
  EXPECT_EQ(step.step, 10);
  EXPECT_EQ(step.world, 3);
  EXPECT_EQ(step.holders, (std::vector<std::vector<int>>{{0, 1}, {1}, {0}}));
  EXPECT_EQ(newest_complete_step({one}).world, 0);
  EXPECT_EQ(newest_complete_step({}).world, 0);
  // A later generation is newer, also at an earlier step.
  EXPECT_EQ(newest_complete_step({zero, one, {{1, 5, 1, {0}}}}).step, 5);
}

TEST(ElasticQuorum, IsAMajorityOrAllThatAreNotDead) {
  EXPECT_TRUE(is_quorum(3, {0, 1}, {}));
  EXPECT_FALSE(is_quorum(3, {0}, {}));
  EXPECT_FALSE(is_quorum(3, {0}, {1}));
  EXPECT_TRUE(is_quorum(3, {0}, {1, 2}));
  EXPECT_FALSE(is_quorum(4, {0, 1}, {}));
  EXPECT_FALSE(is_quorum(4, {0, 1}, {2}));
  EXPECT_TRUE(is_quorum(4, {0, 1}, {2, 3}));
  EXPECT_FALSE(is_quorum(2, {}, {0, 1}));
  // Any two quorums share a member, unless all members of one are dead.
  for (int size = 1; size <= 5; ++size)
    for (int a = 0; a < 1 << size; ++a)
      for (int dead_a = 0; dead_a < 1 << size; ++dead_a)
        for (int b = 0; b < 1 << size; ++b) {
          const auto set = [&](int bits) {
            std::set<int> members;
            for (int i = 0; i < size; ++i)
              if (bits >> i & 1) members.insert(i);
            return members;
          };
          // b is a later quorum: none of its members was dead before, and all of `dead` is known.
          for (const int dead_b : {dead_a, (1 << size) - 1 - b})
            if ((a & dead_a) == 0 && (b & dead_b) == 0 && (a & b) == 0 && (dead_a & ~dead_b) == 0 &&
                is_quorum(size, set(a), set(dead_a)) && is_quorum(size, set(b), set(dead_b))) {
              EXPECT_EQ(a & ~dead_b, 0) << size << " " << a << " " << b;
            }
        }
}

CopiedFile file_of(const std::string& text, std::shared_ptr<CopyMemory> memory = nullptr) {
  if (!memory) memory = std::make_shared<CopyMemory>(static_cast<int64_t>(text.size()));
  CopiedFileWriter writer(std::move(memory));
  writer.append(text.data() + 4, static_cast<int64_t>(text.size()) - 4);
  return writer.finish(text.substr(0, 4));
}

std::string text_of(const CopiedFile& file) {
  std::string text(static_cast<size_t>(file.bytes), '\0');
  file.read(text.data(), file.bytes, 0);
  return text;
}

std::shared_ptr<CopiedPart> part_of(const std::string& description, CopiedFile file) {
  auto part = std::make_shared<CopiedPart>();
  part->world = 2;
  part->description = description;
  part->files["rank-00000-0.safetensors"] = std::move(file);
  return part;
}

// A process that receives parts.
struct Holder {
  CopyStore store;
  std::atomic<int> blocks = 0;  // received
  PeerServer server{"127.0.0.1", "partner", [this]() -> PeerServer::Session {
                      auto receiver = std::make_shared<PartReceiver>(store);
                      return [this, receiver](PeerMessage&& request) {
                        blocks += request.fields.at("op") == "block" ? 1 : 0;
                        return receiver->answer(std::move(request));
                      };
                    }};
};

std::string random_bytes(size_t bytes, unsigned seed) {
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>((seed = seed * 1664525 + 1013904223) >> 24);
  return text;
}

TEST(ElasticCopies, UnchangedBlocksAreSentAndHeldOnce) {
  const size_t bytes = 3 * kCopyBlockBytes + 100;
  std::string text = random_bytes(bytes, 1);
  CopyStore own;
  const auto put = [&](int64_t step, CopiedFile file) {
    auto part = part_of("of step " + std::to_string(step), std::move(file));
    own.put({0, step, 0}, part);
    return part;
  };
  const auto first = put(1, file_of(text));
  text[static_cast<size_t>(kCopyBlockBytes) + 7] ^= 1;
  const auto second = put(2, file_of(text));

  std::string received(bytes, '\0');
  EXPECT_EQ(text_of(second->files.begin()->second), text);
  EXPECT_THROW(second->files.begin()->second.read(received.data(), 2, static_cast<int64_t>(bytes) - 1),
               std::out_of_range);

  Holder partner;
  PeerConnection connection({"partner", "127.0.0.1", partner.server.port(), "host"}, milliseconds(5000));
  send_part(connection, {0, 1, 0}, *first, milliseconds(5000));
  EXPECT_EQ(partner.blocks, 4);
  send_part(connection, {0, 2, 0}, *second, milliseconds(5000));
  EXPECT_EQ(partner.blocks, 5);
  const auto copy = partner.store.find({0, 2, 0});
  ASSERT_TRUE(copy);
  EXPECT_EQ(copy->description, "of step 2");
  EXPECT_EQ(text_of(copy->files.begin()->second), text);
  EXPECT_EQ(partner.store.bytes(), static_cast<int64_t>(bytes) + kCopyBlockBytes);
  partner.store.free_before(0, 2);
  EXPECT_FALSE(partner.store.find({0, 1, 0}));
  EXPECT_EQ(partner.store.bytes(), static_cast<int64_t>(bytes));
  own.free_after(0, 1);
  EXPECT_TRUE(own.find({0, 1, 0}));
  EXPECT_FALSE(own.find({0, 2, 0}));
}

TEST(ElasticCopies, SharedMemoryOutlivesItsOwner) {
  const std::string text = random_bytes(3 * kCopyBlockBytes + 100, 3);
  int to_owner[2], to_holder[2];
  ASSERT_EQ(::pipe(to_owner) + ::pipe(to_holder), 0);
  const pid_t owner = ::fork();
  if (owner == 0) {
    CopyMemories memories;
    const auto memory = memories.take(static_cast<int64_t>(text.size()));
    text.copy(memory->data(), text.size());
    const std::string notice = memory->notice().dump();
    char is_mapped = 0;
    if (::write(to_holder[1], notice.data(), notice.size()) < 0 || ::read(to_owner[0], &is_mapped, 1) != 1) ::_exit(1);
    // Dies while it writes the next part.
    std::memset(memories.take(memory->bytes())->data(), 1, text.size() / 2);
    ::kill(::getpid(), SIGKILL);
  }
  std::string notice(1000, '\0');
  notice.resize(static_cast<size_t>(std::max<ssize_t>(::read(to_holder[0], notice.data(), notice.size()), 0)));
  const CopyMemory held(nlohmann::json::parse(notice));
  ASSERT_EQ(::write(to_owner[1], "", 1), 1);
  int status = 0;
  ::waitpid(owner, &status, 0);
  for (const int end : {to_owner[0], to_owner[1], to_holder[0], to_holder[1]}) ::close(end);
  ASSERT_TRUE(WIFSIGNALED(status)) << status;
  EXPECT_EQ(std::string(held.data(), static_cast<size_t>(held.bytes())), text);
}

TEST(ElasticCopies, MemoryThatCannotBeReachedIsNotHeld) {
  Holder partner;
  PeerConnection connection({"partner", "127.0.0.1", partner.server.port(), "host"}, milliseconds(5000));
  const auto memory = std::make_shared<CopyMemory>(1000);
  const std::string text = random_bytes(1000, 5);
  const auto part = part_of("", file_of(text, memory));
  part->memories = {memory};
  nlohmann::json other = memory->notice();
  other["file"] = other.at("file").get<std::string>() + "1";  // another inode
  EXPECT_THROW(CopyMemory{other}, std::runtime_error);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  rlimit limited = before;
  limited.rlim_cur = 1;
  ::setrlimit(RLIMIT_FSIZE, &limited);
  const auto own = std::make_shared<CopyMemory>(1000);
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_TRUE(own->notice().is_null());
  part->memories.push_back(own);
  EXPECT_FALSE(share_part(connection, {0, 1, 0}, *part, milliseconds(5000)));
  EXPECT_FALSE(partner.store.find({0, 1, 0}));
  part->memories.pop_back();
  EXPECT_TRUE(share_part(connection, {0, 1, 0}, *part, milliseconds(5000)));
  const auto held = partner.store.find({0, 1, 0});
  ASSERT_TRUE(held);
  EXPECT_EQ(text_of(held->files.begin()->second), text);
  EXPECT_EQ(partner.blocks, 0);
}

TEST(ElasticCopies, OnlyMemoryOfFreedPartsIsReused) {
  CopyMemories memories;
  auto first = memories.take(1000);
  const CopyMemory* const address = first.get();
  auto part = part_of("", file_of(random_bytes(1000, 6), std::exchange(first, nullptr)));
  EXPECT_NE(memories.take(1000).get(), address);
  const auto second = memories.take(1000);  // the one before was freed
  part.reset();
  EXPECT_EQ(memories.take(1000).get(), address);
  EXPECT_EQ(memories.take(2000)->bytes(), 2000);
}

TEST(ElasticCopies, MemoryOfSuccessivePartsIsMappedAndCountedOnce) {
  Holder partner;
  PeerConnection connection({"partner", "127.0.0.1", partner.server.port(), "host"}, milliseconds(5000));
  constexpr int64_t kBytes = 1000;
  const auto shared = std::make_shared<CopyMemory>(2 * kBytes);
  random_bytes(2 * kBytes, 7).copy(shared->data(), 2 * kBytes);
  const std::string common(shared->data(), 2 * kBytes);
  for (int64_t step = 1; step <= 2; ++step) {
    const auto memory = std::make_shared<CopyMemory>(kBytes);
    const std::string own = random_bytes(kBytes, static_cast<unsigned>(step));
    CopiedFileWriter writer(memory, shared);
    // The second part has other pieces of the shared memory.
    if (step == 1) writer.append(shared->data(), 2 * kBytes);
    writer.append(own.data(), kBytes);
    if (step == 2) writer.append(shared->data() + kBytes, kBytes);
    const auto part = part_of("", writer.finish(""));
    part->memories = {memory, shared};
    ASSERT_TRUE(share_part(connection, {0, step, 0}, *part, milliseconds(5000)));
    EXPECT_EQ(text_of(partner.store.find({0, step, 0})->files.begin()->second),
              step == 1 ? common + own : own + common.substr(kBytes));
  }
  const auto first = partner.store.find({0, 1, 0}), second = partner.store.find({0, 2, 0});
  EXPECT_EQ(first->memories[1], second->memories[1]);
  EXPECT_NE(first->memories[0], second->memories[0]);
  EXPECT_EQ(partner.store.bytes(), 4 * kBytes);
}

// Parts with a frozen weight, a trained weight, and a buffer.
struct PiecesOfParts {
  at::Tensor frozen = at::zeros({1000}), trained = at::zeros({1000}), buffer = at::zeros({8});
  UnchangedPieces unchanged;

  static Piece piece_of(const std::string& name, const at::Tensor& tensor, TensorKind kind) {
    return {.name = name,
            .shape = tensor.sizes().vec(),
            .kind = kind,
            .box = {{0}, tensor.sizes().vec()},
            .data = [tensor] { return tensor; },
            .memory = {0, tensor.numel()},
            .view = [tensor] { return tensor; }};
  }
  // Returns where the next part has the values of each shared piece, by name.
  std::map<std::string, const float*> next(int64_t generation = 0) {
    std::vector<Piece> pieces{piece_of("frozen", frozen, TensorKind::kParameter),
                              piece_of("trained", trained, TensorKind::kParameter),
                              piece_of("buffer", buffer, TensorKind::kBuffer)};
    std::map<std::string, const float*> places;
    for (const Piece& piece : unchanged.take(generation, {"frozen"}, pieces, /*block_bytes=*/4096)) {
      const at::Tensor data = piece.data();
      const auto sums = {checksum(data.const_data_ptr(), static_cast<int64_t>(data.nbytes()))};
      EXPECT_EQ(piece.checksums.sums, std::vector<uint64_t>(sums)) << piece.name;
      EXPECT_TRUE(unchanged.memory()->contains(static_cast<const char*>(piece.data().const_data_ptr()), 4));
      places[piece.name] = piece.data().const_data_ptr<float>();
    }
    EXPECT_EQ(pieces.size() + places.size(), 3);
    return places;
  }
};

TEST(ElasticCopies, PiecesThatDoNotChangeAreCopiedOnce) {
  PiecesOfParts parts;
  const auto first = parts.next();
  EXPECT_EQ(first.size(), 2);
  EXPECT_EQ(parts.next(), first);
  // A buffer that changes leaves the shared memory for good, and the weight stays.
  parts.buffer.add_(1);
  for (int i = 0; i < 2; ++i) {
    const auto next = parts.next();
    EXPECT_EQ(next.size(), 1);
    EXPECT_EQ(next.at("frozen"), first.at("frozen"));
  }
  // Another group begins anew.
  const auto other = parts.next(1);
  EXPECT_EQ(other.size(), 2);
  EXPECT_NE(other.at("frozen"), first.at("frozen"));
}

TEST(ElasticCopies, PiecesWithOtherBytesAreNotShared) {
  for (const float written : {1.f, -0.f}) {  // -0 equals the 0 that was there
    PiecesOfParts parts;
    parts.next();
    const auto before = parts.unchanged.memory();
    const auto version = parts.frozen._version();
    parts.frozen.data()[999] = written;
    EXPECT_EQ(parts.frozen._version(), version);
    EXPECT_FALSE(parts.next().contains("frozen"));
    EXPECT_NE(parts.unchanged.memory(), before);
    EXPECT_EQ(reinterpret_cast<const float*>(before->data())[999], 0);  // the part before is as it was
  }
}

TEST(ElasticCopies, ADamagedOrIncompletePartIsNotHeld) {
  CopyStore store;
  PartReceiver receiver(store);
  const std::string text = random_bytes(1000, 2);
  const auto begin = [&] {
    return receiver.answer({{{"op", "begin_part"},
                             {"generation", 0},
                             {"step", 1},
                             {"owner", 0},
                             {"world", 1},
                             {"description", ""},
                             {"files", {{"f", {{"bytes", 1000}, {"sums", to_hex(checksum(text))}}}}}},
                            {}});
  };
  EXPECT_EQ(begin().fields.at("needed").at("f").size(), 1U);
  EXPECT_THROW(receiver.answer({{{"op", "end_part"}}, {}}), std::runtime_error);
  std::string damaged = text;
  damaged[500] ^= 1;
  begin();
  EXPECT_THROW(receiver.answer({{{"op", "block"}, {"file", "f"}, {"index", 0}}, damaged}), std::runtime_error);
  EXPECT_FALSE(store.find({0, 1, 0}));
  receiver.answer({{{"op", "block"}, {"file", "f"}, {"index", 0}}, text});
  receiver.answer({{{"op", "end_part"}}, {}});
  EXPECT_TRUE(store.find({0, 1, 0}));
}

TEST(ElasticPeers, ADeadProcessIsToldFromASilentOne) {
  Member member{"one", "127.0.0.1", 0, "host"};
  {
    const PeerServer server("127.0.0.1", "one", []() -> PeerServer::Session {
      return [](PeerMessage&& request) -> PeerMessage {
        if (request.fields.at("op") == "sleep") std::this_thread::sleep_for(milliseconds(400));
        if (request.fields.at("op") == "fail") throw std::runtime_error("as asked");
        return {{{"echo", request.bytes}}, {}};
      };
    });
    member.port = server.port();
    EXPECT_EQ(ask_member(member, {{{"op", "echo"}}, "text"}, milliseconds(5000)).fields.at("echo"), "text");
    // A member that cannot serve a request is not a reason to end the caller's process.
    EXPECT_THROW(ask_member(member, {{{"op", "fail"}}, {}}, milliseconds(5000)), PeerError);
    try {
      ask_member(member, {{{"op", "sleep"}}, {}}, milliseconds(50));
      FAIL();
    } catch (const PeerError& error) {
      EXPECT_FALSE(error.is_gone()) << error.what();
    }
    // Another process at the port of one that has ended.
    try {
      ask_member({"two", "127.0.0.1", server.port(), "host"}, {{{"op", "echo"}}, {}}, milliseconds(5000));
      FAIL();
    } catch (const PeerError& error) {
      EXPECT_TRUE(error.is_gone()) << error.what();
    }
  }
  try {
    ask_member(member, {{{"op", "echo"}}, {}}, milliseconds(5000));
    FAIL();
  } catch (const PeerError& error) {
    EXPECT_TRUE(error.is_gone()) << error.what();
  }
}

// A process that serves stores.
struct StoreProcess {
  ServedStores stores;
  PeerServer server{"127.0.0.1", "leader", [this]() -> PeerServer::Session {
                      return [this](PeerMessage&& request) { return stores.answer(request); };
                    }};
  Member member() const { return {"leader", "127.0.0.1", server.port(), "host"}; }
};

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

TEST(ElasticStore, AnswersAsAStoreInMemory) {
  StoreProcess process;
  process.stores.serve(3);
  GroupStore store(process.member(), 3, milliseconds(5000));
  c10d::HashStore expected;
  const auto use = [](c10d::Store& one) {
    std::vector<std::vector<uint8_t>> seen;
    const auto note = [&](int64_t number) { seen.push_back(bytes_of(std::to_string(number))); };
    one.set("binary", std::vector<uint8_t>{0, 255, 10, 0});
    one.set("empty", std::vector<uint8_t>{});
    seen.push_back(one.get("binary"));
    seen.push_back(one.get("empty"));
    note(one.add("count", 5));
    note(one.add("count", -7));
    seen.push_back(one.compareSet("count", bytes_of("other"), bytes_of("9")));
    seen.push_back(one.compareSet("count", bytes_of("-2"), bytes_of("9")));
    note(one.check({"binary", "count"}));
    note(one.check({"binary", "missing"}));
    one.append("text", bytes_of("one"));
    one.append("text", bytes_of(" two"));
    one.multiSet({"a", "b"}, {bytes_of("A"), bytes_of("B")});
    for (auto& value : one.multiGet({"b", "text", "a"})) seen.push_back(std::move(value));
    note(one.deleteKey("a"));
    note(one.deleteKey("a"));
    note(one.getNumKeys());
    return seen;
  };
  EXPECT_EQ(use(store), use(expected));
}

TEST(ElasticStore, WaitsForAnotherClientsKey) {
  StoreProcess process;
  process.stores.serve(0);
  GroupStore store(process.member(), 0, milliseconds(5000));
  auto value = std::async(std::launch::async, [&] { return store.get("late"); });
  GroupStore(process.member(), 0, milliseconds(5000)).set("late", bytes_of("here"));
  EXPECT_EQ(value.get(), bytes_of("here"));
  EXPECT_THROW(store.wait({"never"}, milliseconds(30)), c10::DistStoreError);
}

TEST(ElasticStore, CountsTheCallsOfAllThreads) {
  StoreProcess process;
  process.stores.serve(0);
  GroupStore shared(process.member(), 0, milliseconds(5000));
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      GroupStore own(process.member(), 0, milliseconds(5000));
      for (int call = 0; call < 50; ++call) (call % 2 == 0 ? shared : own).add("count", 1);
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(shared.add("count", 0), 200);
}

TEST(ElasticStore, IsOfOneGroupAndEndsAfterTheNextOne) {
  StoreProcess process;
  const auto store_of = [&](int64_t generation) {
    return c10::make_intrusive<GroupStore>(process.member(), generation, milliseconds(5000));
  };
  process.stores.serve(0);
  store_of(0)->set("key", bytes_of("0"));
  process.stores.serve(0);
  EXPECT_THROW(store_of(1)->check({"key"}), c10::DistStoreError);
  process.stores.serve(1);
  EXPECT_FALSE(store_of(1)->check({"key"}));
  EXPECT_EQ(store_of(0)->get("key"), bytes_of("0"));
  process.stores.serve(2);
  EXPECT_THROW(store_of(0)->check({"key"}), c10::DistStoreError);
}

TEST(ElasticStore, AnEndedProcessIsAnErrorAtOnce) {
  auto process = std::make_unique<StoreProcess>();
  process->stores.serve(0);
  GroupStore store(process->member(), 0, milliseconds(60000));
  store.set("key", bytes_of("value"));
  process.reset();
  for (int i = 0; i < 2; ++i) EXPECT_THROW(store.check({"key"}), c10::DistNetworkError);
}

// Members that regroup as threads of this process.
class Members {
 public:
  explicit Members(int count)
      : acceptors_(static_cast<size_t>(count)),
        is_silent_(static_cast<size_t>(count)),
        servers_(static_cast<size_t>(count)) {
    for (size_t i = 0; i < acceptors_.size(); ++i) {
      const std::string id = "member-" + std::to_string(i);
      servers_[i] = std::make_unique<PeerServer>("127.0.0.1", id, [this, i]() -> PeerServer::Session {
        return [this, i](PeerMessage&& request) -> PeerMessage {
          if (is_silent_[i]) std::this_thread::sleep_for(milliseconds(2000));
          return {acceptors_[i].answer(request.fields), {}};
        };
      });
      group_.members.push_back({id, "127.0.0.1", servers_[i]->port(), "host"});
      acceptors_[i].begin(0);
    }
  }

  void kill(int member) { servers_[static_cast<size_t>(member)].reset(); }
  void silence(int member) { is_silent_[static_cast<size_t>(member)] = true; }
  Acceptor& acceptor(int member) { return acceptors_[static_cast<size_t>(member)]; }

  // Returns the decision of a member, or its error.
  std::string regroup(int member, milliseconds timeout = milliseconds(10000), int least_ranks = 1,
                      bool was_stopped = false, const std::optional<Decision>& recorded = std::nullopt,
                      bool has_gone_on = false) {
    acceptor(member).arrive(0, {{0, 6, static_cast<int>(group_.members.size()), {member}}});
    Regroup next(
        group_, member, acceptor(member),
        [](const Member& to, const nlohmann::json& request, milliseconds patience) {
          return ask_member(to, {request, {}}, patience).fields;
        },
        [this, member](Decision& decision) { decision.store = group_.members[static_cast<size_t>(member)]; },
        {.stopped_after = milliseconds(600),
         .timeout = timeout,
         .least_ranks = least_ranks,
         .recorded = [&] { return recorded; },
         .has_gone_on = [has_gone_on] { return has_gone_on; },
         .was_stopped = [was_stopped] { return was_stopped; }});
    try {
      const Decision decision = next.run();
      std::string text = "generation " + std::to_string(decision.generation) + ":";
      for (const Member& one : decision.members) text += " " + one.id.substr(7);
      return text + ", step " + std::to_string(decision.step.step);
    } catch (const CommError& error) {
      return error.what();
    }
  }

  // Regroups these members at once, each after a delay.
  std::vector<std::string> regroup_all(const std::vector<int>& members) {
    std::vector<std::string> results(members.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < members.size(); ++i)
      threads.emplace_back([&, i] {
        std::this_thread::sleep_for(milliseconds(7 * ((members[i] * 5) % 4)));
        results[i] = regroup(members[i]);
      });
    for (auto& thread : threads) thread.join();
    return results;
  }

 private:
  Decision group_;
  std::vector<Acceptor> acceptors_;
  std::vector<std::atomic<bool>> is_silent_;
  std::vector<std::unique_ptr<PeerServer>> servers_;
};

TEST(ElasticRegroup, SurvivorsAgree) {
  for (const int dead : {0, 1, 3}) {
    Members members(4);
    members.kill(dead);
    std::vector<int> alive{0, 1, 2, 3};
    std::erase(alive, dead);
    const auto results = members.regroup_all(alive);
    std::string expected = "generation 1:";
    for (const int member : alive) expected += " " + std::to_string(member);
    for (const auto& result : results) EXPECT_EQ(result, expected + ", step -1") << dead;
  }
}

TEST(ElasticRegroup, AllMayGoOnTogether) {
  Members members(3);
  for (const auto& result : members.regroup_all({0, 1, 2})) EXPECT_EQ(result, "generation 1: 0 1 2, step 6");
}

TEST(ElasticRegroup, ASilentMemberIsLeftOutByAMajorityOnly) {
  Members three(3);
  three.silence(0);
  for (const auto& result : three.regroup_all({1, 2})) EXPECT_EQ(result, "generation 1: 1 2, step -1");
  Members two(2);
  two.silence(0);
  const std::string error = two.regroup(1, milliseconds(1500));
  EXPECT_NE(error.find("could not regroup within 1500 ms"), std::string::npos) << error;
  EXPECT_NE(error.find("do not answer or did not leave the group: 0"), std::string::npos) << error;
}

TEST(ElasticRegroup, AMemberThatComesLateLearnsTheDecision) {
  Members members(3);
  const auto results = members.regroup_all({0, 1});  // member 2 answers, but does not leave the group in time
  for (const auto& result : results) EXPECT_EQ(result, "generation 1: 0 1, step -1");
  EXPECT_EQ(members.regroup(2), "generation 1: 0 1, step -1");
}

TEST(ElasticRegroup, AnAcceptedValueSurvivesItsProposer) {
  Members members(3);
  // Member 0 got a value accepted by itself and by member 1, and died before member 2 learned it.
  Decision decided{.generation = 1};
  decided.members = {{"member-9", "127.0.0.1", 1, "host"}};
  for (const int member : {0, 1}) {
    members.acceptor(member).answer({{"op", "prepare"}, {"generation", 0}, {"ballot", 3}});
    members.acceptor(member).answer({{"op", "accept"}, {"generation", 0}, {"ballot", 3}, {"value", decided}});
  }
  members.kill(0);
  for (const auto& result : members.regroup_all({1, 2})) EXPECT_EQ(result, "generation 1: 9, step -1");
}

TEST(ElasticRegroup, AStoppedMemberDoesNotGoOnAloneAfterTheOthersHaveEnded) {
  Members members(3);
  members.kill(0);
  members.kill(1);
  const std::string error = members.regroup(2, milliseconds(10000), 1, /*was_stopped=*/true);
  EXPECT_NE(error.find("rank 2 of 3 was stopped, and 2 of the other ranks have ended"), std::string::npos) << error;
}

// The others have let process 9 in, went on without member 2, and have ended.
TEST(ElasticRegroup, ProofsOfDeathDoNotCountAgainstARecordedDecision) {
  const Decision recorded{.generation = 1, .members = {{"member-0", "", 0, ""}, {"member-9", "", 0, ""}}};
  Members members(3);
  members.kill(0);
  EXPECT_EQ(members.regroup(1, milliseconds(10000), 1, false, recorded), "generation 1: 1, step -1")
      << "a majority needs no proofs";
  Members others(3);
  others.kill(0);
  others.kill(1);
  EXPECT_EQ(others.regroup(2, milliseconds(10000), 1, false, recorded), "generation 1: 0 9, step -1");
}

// The link to member 2 was cut while the others went on and ended.
TEST(ElasticRegroup, ProofsOfDeathDoNotCountIfTheOthersHaveGoneOn) {
  Members members(3);
  members.kill(0);
  EXPECT_EQ(members.regroup(1, milliseconds(10000), 1, false, std::nullopt, /*has_gone_on=*/true),
            "generation 1: 1, step -1")
      << "a majority needs no proofs";
  Members others(3);
  others.kill(0);
  others.kill(1);
  const std::string error = others.regroup(2, milliseconds(10000), 1, false, std::nullopt, /*has_gone_on=*/true);
  EXPECT_NE(error.find("the other ranks have gone on without it, and have ended"), std::string::npos) << error;
}

TEST(ElasticRegroup, ARetiredMemberCountsAsEndedAndFewerThanTheLeastAreRefused) {
  Members members(2);
  members.acceptor(0).retire();
  EXPECT_EQ(members.regroup(1), "generation 1: 1, step -1");
  Members others(2);
  others.kill(0);
  const std::string error = others.regroup(1, milliseconds(500), 2);
  EXPECT_NE(error.find("at least 2 ranks"), std::string::npos) << error;
}

TEST(ElasticRegroup, SilentMembersAreAskedAtOnce) {
  for (const auto& [world, silent] :
       std::vector<std::pair<int, std::set<int>>>{{4, {0}}, {5, {0, 1}}, {5, {1, 3}}, {6, {0, 1}}, {6, {0, 5}}}) {
    Decision group;
    std::vector<Acceptor> acceptors(static_cast<size_t>(world));
    for (int member = 0; member < world; ++member) {
      group.members.push_back({std::to_string(member), "", 0, ""});
      acceptors[static_cast<size_t>(member)].begin(0);
    }
    std::vector<int> alive;
    for (int member = 0; member < world; ++member)
      if (!silent.contains(member)) alive.push_back(member);
    std::vector<std::future<std::vector<Member>>> decided;
    for (const int member : alive)
      decided.push_back(std::async(std::launch::async, [&, member] {
        Acceptor& own = acceptors[static_cast<size_t>(member)];
        own.arrive(0, {});
        std::mutex mutex;
        std::condition_variable changed;
        size_t calls = 0;  // of silent members
        // The call of a silent member ends when all of them have been asked: each time by the leader, and once by the
        // others, which ask only the members up to the leader then.
        const auto ask = [&](const Member& to, const nlohmann::json& request, milliseconds) {
          const int asked = std::stoi(to.id);
          if (!silent.contains(asked)) return acceptors[static_cast<size_t>(asked)].answer(request);
          std::unique_lock lock(mutex);
          const size_t round = calls++ / silent.size();
          changed.notify_all();
          const auto all_are_asked = [&] { return calls >= (round + 1) * silent.size(); };
          if (round == 0 || member == alive[0]) {
            EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(20), all_are_asked)) << member << " of " << world;
          }
          throw PeerError("silent", false);
        };
        return Regroup(group, member, own, ask, [](Decision&) {},
                       {.stopped_after = milliseconds(200), .timeout = milliseconds(60000)})
            .run()
            .members;
      }));
    std::vector<Member> expected;
    for (const int member : alive) expected.push_back(group.members[static_cast<size_t>(member)]);
    for (auto& members : decided) EXPECT_EQ(members.get(), expected);
  }
}

// A member on a busy machine may miss the time of one prompt answer.
TEST(ElasticJoining, ASilentMemberIsAskedAgain) {
  const testing_support::TemporaryFolder folder;
  const Member self{"joins", "127.0.0.1", 1, "host"};
  RunFacts facts{.run_id = "run", .first_world = 1};
  Decision group{.generation = 1, .members = {self}};
  std::atomic<int> requests = 0;
  std::promise<void> is_asked_again;
  const PeerServer server("127.0.0.1", "member", [&]() -> PeerServer::Session {
    return [&](PeerMessage&&) -> PeerMessage {
      const int request = requests++;
      if (request == 0) is_asked_again.get_future().wait_for(std::chrono::seconds(20));
      if (request == 1) is_asked_again.set_value();
      return {{{"facts", facts}, {"decision", group}}, {}};
    };
  });
  facts.members = {{"member", "127.0.0.1", server.port(), "host"}};
  const RunFile file(folder.path());
  file.write(facts, "member");
  Joiner joiner(file, self, "options", std::chrono::seconds(15), std::chrono::seconds(15));
  const auto place = joiner.await_place();
  ASSERT_TRUE(place);
  EXPECT_EQ(place->group.members, group.members);
  EXPECT_EQ(requests, 2);
}

// Reads late.
struct LateStore : c10d::PrefixStore {
  using PrefixStore::PrefixStore;
  std::vector<uint8_t> get(const std::string& key) override {
    std::this_thread::sleep_for(milliseconds(200));
    return PrefixStore::get(key);
  }
};

TEST(ElasticStart, AnEmptyBodyIsRefused) {
  try {
    Elastic(c10::make_intrusive<c10d::HashStore>(), 0, 1).run(nullptr);
    FAIL() << "no error";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "tessera::Elastic::run: the body is empty, expected a function");
  }
}

TEST(ElasticStart, AnEmptyTmpdirMeansTheUsualFolder) {
  ASSERT_EQ(::setenv("TMPDIR", "", 1), 0);
  const RendezvousFolder folder;
  ::unsetenv("TMPDIR");
  EXPECT_EQ(folder.path().parent_path(), "/tmp");
}

TEST(ElasticStart, TheProcessOfTheStoreWaitsForTheOthers) {
  std::promise<uint16_t> port;
  std::thread other([&] {
    c10d::TCPStoreOptions options;
    options.port = port.get_future().get();
    const auto client = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    EXPECT_NO_THROW(Elastic(c10::make_intrusive<LateStore>("late", client), 1, 2));
  });
  {
    c10d::TCPStoreOptions options;
    options.port = 0;
    options.isServer = true;
    options.waitWorkers = false;
    const auto server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    port.set_value(server->getPort());
    EXPECT_NO_THROW(Elastic(c10::make_intrusive<c10d::PrefixStore>("late", server), 0, 2));
  }
  other.join();
}

TEST(ElasticStart, ProcessesOfOtherHostsReachTheMembersByTheFolder) {
  const testing_support::TemporaryFolder folder;
  ElasticOptions options;
  options.rendezvous = folder / "run";
  const Elastic elastic(options);  // no launcher: one rank
  const auto run = RunFile(options.rendezvous).read();
  ASSERT_TRUE(run);
  EXPECT_EQ(run->members.at(0).address, public_address());
}

// Returns the error of a rank's call on each of two threads; "" if there is none.
std::vector<std::string> on_two_ranks(const std::function<void(const c10::intrusive_ptr<c10d::Store>&, int)>& call) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(2);
  const auto run = [&](int rank) {
    try {
      call(store, rank);
    } catch (const std::exception& error) {
      errors[static_cast<size_t>(rank)] = error.what();
    }
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  return errors;
}

TEST(ElasticStart, NamesOtherGroupOptionsOnEveryRank) {
  for (const milliseconds timeout : {milliseconds(50000), milliseconds(0)})
    for (const std::string& error : on_two_ranks([&](const auto& store, int rank) {
           ElasticOptions options;
           if (rank == 1) options.group.timeout = timeout;
           Elastic(store, rank, 2, options);
         }))
      EXPECT_NE(error.find(timeout.count() == 0 ? "on rank 1 of 2: ElasticOptions::stopped_after"
                                                : "expected equal ElasticOptions on all ranks"),
                std::string::npos)
          << error;
}

TEST(ElasticStart, NamesOtherObjectsOfRestoreOnEveryRank) {
  for (const std::string& error : on_two_ranks([](const auto& store, int rank) {
         Elastic(store, rank, 2).run([&](ElasticRun& run) {
           if (run.generation() > 0) return;
           DistributedDataParallel ddp(torch::nn::Linear(2, 2), run.comm());
           DistributedSampler sampler(8, rank, 2);
           run.restore(rank == 0 ? TrainingState{ddp} : TrainingState{ddp, sampler});
         });
       }))
    EXPECT_NE(error.find("the ranks disagree about the objects of ElasticRun::restore(): rank 0 has 'nothing more', "
                         "rank 1 has 'beside the model sampler'"),
              std::string::npos)
        << error;
}

// To open a pipe would block.
TEST(ElasticStart, RefusesAFolderWithAPipeInPlaceOfTheFile) {
  const testing_support::TemporaryFolder folder;
  ASSERT_EQ(::mkfifo((folder / "elastic-run.json").c_str(), 0600), 0);
  ElasticOptions options;
  options.rendezvous = folder.path();
  EXPECT_THROW(Elastic{options}, std::runtime_error);
}

TEST(ElasticServer, ClosesItsSocketIfNoThreadStarts) {
  pthread_attr_t usual, large;
  ASSERT_EQ(::pthread_getattr_default_np(&usual), 0);
  ASSERT_EQ(::pthread_attr_init(&large), 0);
  ASSERT_EQ(::pthread_attr_setstacksize(&large, size_t{1} << 46), 0);  // more than the address space has
  ASSERT_EQ(::pthread_setattr_default_np(&large), 0);
  const int before = ::dup(0);  // the lowest free descriptor
  ::close(before);
  EXPECT_THROW(PeerServer("127.0.0.1", "one", nullptr), std::system_error);
  ASSERT_EQ(::pthread_setattr_default_np(&usual), 0);
  const int after = ::dup(0);
  ::close(after);
  EXPECT_EQ(after, before);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // these need much address space
// If no thread can start for a connection, the server closes the connection. The process must not end.
TEST(ElasticServer, OutlivesAConnectionWithoutAThread) {
  const pid_t child = ::fork();
  if (child == 0) {
    const Holder holder;
    const auto connect = [&] {
      const int descriptor = ::socket(AF_INET, SOCK_STREAM, 0);
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_port = htons(static_cast<uint16_t>(holder.server.port()));
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      return ::connect(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ? descriptor : -1;
    };
    long pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit limit{};
    ::getrlimit(RLIMIT_AS, &limit);
    limit.rlim_cur = static_cast<rlim_t>(pages) * 4096 + (rlim_t{2} << 20);  // less than the stack of a thread
    ::setrlimit(RLIMIT_AS, &limit);
    std::vector<pollfd> connections;  // more than the stacks of earlier threads that libc keeps
    for (int i = 0; i < 40; ++i) connections.push_back({connect(), POLLIN, 0});
    ::poll(connections.data(), connections.size(), 10000);
    const bool is_any_closed = std::ranges::any_of(connections, [](const pollfd& one) { return one.revents != 0; });
    ::_exit(is_any_closed && connect() >= 0 ? 0 : 3);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}
#endif

}  // namespace
}  // namespace tessera::parts_test
