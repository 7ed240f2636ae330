#include "core/gradients/gradient_bucket.h"

#include "core/comm/reduce_scatter_pieces.h"

namespace tessera::internal {
namespace {

// By member, the piece that contains it.
std::vector<size_t> pieces_of_members(const GradientBucket& bucket, const std::vector<BucketPiece>& pieces) {
  std::vector<size_t> piece_of;
  size_t piece = 0;
  for (size_t member = 0; member < bucket.members.size(); ++member) {
    const int64_t begin = bucket.layout.offset(static_cast<int64_t>(member));
    while (piece + 1 < pieces.size() && begin >= pieces[piece].range.end) ++piece;
    piece_of.push_back(piece);
  }
  return piece_of;
}

}  // namespace

BucketRoute route_of(const GradientBucket& bucket, const Mesh& mesh, int64_t zero_copy_bytes) {
  using Cut = FlatLayout::Cut;
  const Cut cut = bucket.layout.cut();
  const bool may_encode = cut != Cut::kWhole && mesh.shard->size() > 1;
  const bool has_one_member = bucket.members.size() == 1;
  BucketRoute route;
  route.codec = make_wire_codec(may_encode ? bucket.wire : WireFormat::kDtype, bucket.dtype, bucket.wire_dtype);
  const bool sends_pieces =
      route.codec->is_identity() && bucket.layout.full_numel() > 0 && exchanges_pieces(*mesh.shard);
  const bool is_large = sends_pieces && has_one_member && bucket.bytes() >= zero_copy_bytes;
  route.reduces_apart = is_large && cut == Cut::kByOwner;
  // On a device a gradient may belong to another stream than `.grad` must.
  route.adopts = is_large && cut == Cut::kWhole && mesh.world->device().is_cpu();

  if (cut == Cut::kEvenly && sends_pieces) {
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(bucket.dtype));
    route.pieces = cut_into_pieces(bucket.layout, element_bytes, zero_copy_bytes);
  } else {
    route.pieces = {{{0, bucket.layout.full_numel()}}};
    const bool sends_only = cut == Cut::kByOwner && has_one_member && bucket.result == nullptr;
    if (route.adopts || route.reduces_apart || sends_only) route.pieces[0].member = 0;
  }
  route.piece_of = pieces_of_members(bucket, route.pieces);
  return route;
}

}  // namespace tessera::internal
