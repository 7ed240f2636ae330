#include "elastic/unchanged_pieces.h"

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <atomic>
#include <cstring>
#include <iterator>

#include "checkpoint/save/save_plan.h"
#include "core/runtime/no_grad_no_inference_guard.h"

namespace tessera::internal {
namespace {

// Compares bytes: values that compare as equal, such as zeros of both signs, may differ in their bytes.
bool has_bytes_of(const at::Tensor& held, const Piece& piece) {
  const at::Tensor live = checked_data(piece);
  if (live.scalar_type() != held.scalar_type() || live.sizes() != held.sizes()) return false;
  const auto* a = static_cast<const char*>(live.const_data_ptr());
  const auto* b = static_cast<const char*>(held.const_data_ptr());
  std::atomic<bool> is_equal = true;
  at::parallel_for(0, static_cast<int64_t>(held.nbytes()), int64_t{1} << 18, [&](int64_t begin, int64_t end) {
    if (is_equal && std::memcmp(a + begin, b + begin, static_cast<size_t>(end - begin)) != 0) is_equal = false;
  });
  return is_equal;
}

}  // namespace

at::Tensor tensor_of(const std::shared_ptr<CopyMemory>& memory) {
  const c10::InferenceMode ordinary(false);
  return at::from_blob(
      memory->data(), {memory->bytes()}, [memory](void*) {}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
}

std::vector<Piece> UnchangedPieces::take(int64_t generation, const std::set<std::string>& frozen,
                                         std::vector<Piece>& pieces, int64_t block_bytes) {
  const NoGradNoInferenceGuard quiet;
  if (std::exchange(generation_, generation) != generation) {
    changed_.clear();
    held_.clear();
  }
  const auto key_of = [](const Piece& piece) { return Key{piece.name, piece.memory.begin}; };
  const auto may_share = [&](const Piece& piece) {
    return (piece.kind == TensorKind::kBuffer ||
            (piece.kind == TensorKind::kParameter && frozen.contains(piece.name))) &&
           !changed_.contains(piece.name);
  };
  bool are_held = true;
  for (const Piece& piece : pieces) {
    if (!may_share(piece)) continue;
    const auto found = held_.find(key_of(piece));
    if (found == held_.end())
      are_held = false;
    else if (!has_bytes_of(found->second.data(), piece))
      changed_.insert(piece.name);
  }
  SavePlan shared;
  const auto rest = std::stable_partition(pieces.begin(), pieces.end(), may_share);
  shared.pieces.assign(std::make_move_iterator(pieces.begin()), std::make_move_iterator(rest));
  pieces.erase(pieces.begin(), rest);
  const int64_t bytes = HostCopies::bytes_for(shared.pieces);
  // Reuses the memory if it holds all pieces, and at most an eighth is unused because buffers have changed.
  if (are_held && memory_ && bytes >= memory_->bytes() - memory_->bytes() / 8) {
    for (Piece& piece : shared.pieces) {
      const Piece& held = held_.at(key_of(piece));
      piece.data = held.data;
      piece.view = nullptr;
      piece.checksums = held.checksums;
    }
    return std::move(shared.pieces);
  }
  held_.clear();
  memory_ = shared.pieces.empty() ? nullptr : std::make_shared<CopyMemory>(bytes);
  if (!memory_) return {};
  HostCopies copies(tensor_of(memory_));
  copies.begin(shared, at::kCPU, block_bytes);
  copies.end(shared, at::kCPU, [] {});
  for (const Piece& piece : shared.pieces) held_[key_of(piece)] = piece;
  return std::move(shared.pieces);
}

}  // namespace tessera::internal
