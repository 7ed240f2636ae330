#include "core/comm/guest/guest_transports.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "core/comm/guest/transport_source.h"
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
  MessageTransport(std::shared_ptr<MessageLibrary> library, PartOfGroup part)
      : library_(std::move(library)), part_(std::move(part)) {}

  bool reaches(int /*peer*/) const override { return true; }
  void start(const at::Tensor& tensor, int peer, bool is_send, const MessageTag& tag,
             TransportMessages& started) override {
    const int other = part_.rank_of(peer);
    const auto number = static_cast<int>(part_.number_of(tag) % (static_cast<uint64_t>(library_->most_tag()) + 1));
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
  // Returns false, because only the thread that calls the library could cancel a message in flight.
  bool withdraw() noexcept override { return false; }

 private:
  static constexpr int64_t kMostBytes = int64_t{1} << 30;  // largest message, because MPI counts in int

  const std::shared_ptr<MessageLibrary> library_;
  const PartOfGroup part_;
};

}  // namespace

std::shared_ptr<TransportSource> message_transports(std::shared_ptr<MessageLibrary> library) {
  return std::make_shared<TransportSource>([library = std::move(library)](const PartOfGroup& part) {
    return std::make_unique<MessageTransport>(library, part);
  });
}

}  // namespace tessera::internal
