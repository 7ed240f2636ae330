#include "core/comm/guest/message_transport.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "core/comm/fingerprint.h"
#include "core/runtime/run_clock.h"

namespace tessera::internal {
namespace {

class LibraryMessage : public TransportMessage {
 public:
  LibraryMessage(std::unique_ptr<MessageLibrary::Request> request, at::Tensor tensor, int peer, bool is_send)
      : TransportMessage(peer, is_send), request_(std::move(request)), tensor_(std::move(tensor)) {}

  std::optional<MessageFailure> wait(Deadline until) override {
    const auto began = RunClock::now();
    for (auto pause = kShortestPause; !request_->is_complete();) {
      if (is_interrupted_) return failure("");
      const auto now = RunClock::now();
      if (now >= until) return failure("timed out");
      if (now - began < kSpin) {
        std::this_thread::yield();  // the awaited rank may need this core
        continue;
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
    return std::nullopt;
  }
  void prepare_wait() override { is_interrupted_ = false; }
  void interrupt() noexcept override { is_interrupted_ = true; }
  at::Tensor exposed_tensor() const override { return tensor_; }

 private:
  static constexpr std::chrono::microseconds kSpin{30}, kShortestPause{20}, kLongestPause{500};

  const std::unique_ptr<MessageLibrary::Request> request_;
  const at::Tensor tensor_;
  std::atomic<bool> is_interrupted_ = false;
};

class MessageTransport : public Transport {
 public:
  MessageTransport(std::shared_ptr<MessageLibrary> library, std::vector<int> members, uint64_t part)
      : library_(std::move(library)), members_(std::move(members)), part_(part) {}

  bool reaches(int /*peer*/) const override { return true; }
  void start(const at::Tensor& tensor, int peer, bool is_send, const MessageTag& tag,
             TransportMessages& started) override {
    const int other = members_.empty() ? peer : members_[static_cast<size_t>(peer)];
    const uint64_t sum =
        Fingerprint().add(tag.sequence).add(tag.fingerprint).add(tag.step).add(tag.part).add(part_).value();
    const int number = static_cast<int>((sum ^ (sum >> 32)) % (static_cast<uint64_t>(library_->most_tag()) + 1));
    auto* data = const_cast<char*>(static_cast<const char*>(tensor.const_data_ptr()));
    for (auto left = static_cast<int64_t>(tensor.nbytes()); left > 0;) {
      const int64_t bytes = std::min(left, kMostBytes);
      started.push_back(std::make_shared<LibraryMessage>(
          library_->start(data, static_cast<int>(bytes), other, number, is_send), tensor, peer, is_send));
      data += bytes;
      left -= bytes;
    }
  }
  int64_t max_eager_numel() const override { return 0; }
  // A message in flight cannot be taken back by a thread that may not call the library.
  bool withdraw() noexcept override { return false; }

 private:
  static constexpr int64_t kMostBytes = int64_t{1} << 30;  // of one message: MPI counts in int

  const std::shared_ptr<MessageLibrary> library_;
  const std::vector<int> members_;  // the ranks of a part of the group; empty for the whole group
  const uint64_t part_;
};

class MessageSource : public TransportSource {
 public:
  MessageSource(std::shared_ptr<MessageLibrary> library, std::vector<int> members, uint64_t part)
      : library_(std::move(library)), members_(std::move(members)), part_(part) {}

  std::unique_ptr<Transport> make() override { return std::make_unique<MessageTransport>(library_, members_, part_); }
  std::shared_ptr<TransportSource> part(const std::string& name, const std::vector<int>& members) override {
    std::vector<int> ranks;
    for (const int rank : members) ranks.push_back(members_.empty() ? rank : members_[static_cast<size_t>(rank)]);
    return std::make_shared<MessageSource>(library_, std::move(ranks), Fingerprint().add(part_).add(name).value());
  }

 private:
  const std::shared_ptr<MessageLibrary> library_;
  const std::vector<int> members_;
  const uint64_t part_;
};

}  // namespace

std::shared_ptr<TransportSource> message_transports(std::shared_ptr<MessageLibrary> library) {
  return std::make_shared<MessageSource>(std::move(library), std::vector<int>(), 0);
}

}  // namespace tessera::internal
