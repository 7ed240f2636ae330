#include "checkpoint/save/save_plan.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>
#include <stdexcept>
#include <utility>

#include "checkpoint/format/checked_json.h"
#include "core/memory/page_locked.h"
#include "core/paging/residency.h"
#include "core/runtime/no_grad_no_inference_guard.h"
#include "core/runtime/require.h"
#include "core/runtime/stream_uses.h"

namespace tessera::internal {
namespace {

int64_t padded(int64_t bytes) {
  constexpr int64_t kAlignment = 64;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Returns the destination of each piece in `host`. If `host` is too small, first replaces `host` by new memory.
std::vector<at::Tensor> room_for(const std::vector<Piece>& pieces, at::Tensor& host, bool pinned) {
  const int64_t total = HostCopies::bytes_for(pieces);
  if (!host.defined() || host.numel() < total)
    host = pinned ? page_locked(total) : at::empty({total}, at::TensorOptions(at::kCPU).dtype(at::kByte));
  std::vector<at::Tensor> room;
  int64_t offset = 0;
  for (const Piece& piece : pieces) {
    room.push_back(host.narrow(0, offset, bytes_of(piece)).view(piece.dtype).view(piece.box.sizes));
    offset += padded(bytes_of(piece));
  }
  return room;
}

bool is_watched(const Piece& piece) { return piece.kind == TensorKind::kParameter || piece.kind == TensorKind::kState; }

}  // namespace

void check_extra(const nlohmann::json& extra) {
  require(json_depth(extra, kMaxExtraDepth) <= kMaxExtraDepth, "`extra` nests deeper than ", kMaxExtraDepth, " levels");
  const nlohmann::json values = extra.flatten();  // the keys are JSON pointers such as "/losses/1"
  for (const auto& [place, value] : values.items()) {
    if (value.is_number_float() && !std::isfinite(value.get<double>()))
      throw std::invalid_argument("`extra" + place + "` is " + std::to_string(value.get<double>()) +
                                  ", which JSON has no number for");
    require(!value.is_binary(), "`extra", place,
            "` is binary, which JSON has no form for: it would come back as an object");
    require(!value.is_discarded(), "`extra", place, "` is no value but what a failed parse gives (is_discarded())");
  }
  try {
    static_cast<void>(extra.dump());
  } catch (const nlohmann::json::exception& error) {
    throw std::invalid_argument(std::string("`extra` cannot be written as JSON: ") + error.what());
  }
}

int64_t writes_to(const at::Tensor& tensor) {
  const Page* page = page_of(tensor);
  return static_cast<int64_t>(tensor._version()) + (page != nullptr ? page->writes() : 0);
}

int64_t HostCopies::bytes_for(const std::vector<Piece>& pieces) {
  int64_t total = 0;
  for (const Piece& piece : pieces) total += padded(bytes_of(piece));
  return total;
}

// Copies a piece from the live tensor to `room`. For a device tensor, starts the copy without blocking.
void HostCopies::copy(Piece& piece, const at::Tensor& room) {
  at::Tensor from = piece.view ? piece.view() : piece.data();
  piece.checksums = {};
  if (can_be_data(piece, from))
    piece.checksums =
        copy_with_checksums(static_cast<char*>(room.mutable_data_ptr()),
                            static_cast<const char*>(from.const_data_ptr()), bytes_of(piece), block_bytes_);
  else
    room.copy_(from, /*non_blocking=*/true);
  if (!from.is_cpu()) sources_.push_back(std::move(from));
  piece.data = [room] { return room; };
  piece.view = nullptr;
}

void HostCopies::begin(SavePlan& plan, at::Device device, int64_t block_bytes) {
  block_bytes_ = block_bytes;
  const NoGradNoInferenceGuard quiet;  // makes no inference tensors, because only inference mode can write to those
  room_ = room_for(plan.pieces, memory_, device.is_cuda());
  for (size_t i = 0; i < plan.pieces.size(); ++i) {
    Piece& piece = plan.pieces[i];
    // [Note: no copy on write] With libtorch's copy-on-write clones, end() could copy the other pieces, too. But in
    // libtorch 2.11 to 2.15, a thread that frees a clone may lock a counter that a writing thread has just freed.
    if (!plan.watched.empty() && is_watched(piece) && piece.view) {
      later_.push_back(i);
    } else {
      copy(piece, room_[i]);
    }
  }
  if (device.is_cpu()) return;
  begun_.emplace(device.type());
  begun_->record(current_stream(device));
}

void HostCopies::await_copies() {
  if (begun_) begun_->synchronize();
  begun_.reset();
  sources_.clear();
}

void HostCopies::end(SavePlan& plan, at::Device device, const std::function<void()>& progress) {
  await_copies();
  if (later_.empty()) return;
  std::optional<c10::StreamGuard> on_side;  // a side stream, so that copies overlap the training loop's work
  if (!device.is_cpu())
    on_side.emplace(
        c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/false));
  for (const size_t i : std::exchange(later_, {})) copy(plan.pieces[i], room_[i]), progress();
  if (on_side) begun_.emplace(device.type()).record(on_side->current_stream());
  await_copies();
  for (const auto& [fqn, tensor, writes] : plan.watched)
    require(writes_to(tensor) == writes, "'", fqn,
            "' was written to while it was copied: call PendingSave::copied() before optimizer.step()");
}

at::Tensor HostCopies::take_memory() {
  await_copies();
  room_.clear();
  return std::exchange(memory_, {});
}

}  // namespace tessera::internal
