#include "core/gradients/gradient_bucket.h"

#include "core/comm/reduce_scatter_pieces.h"

namespace tessera::internal {

void GradientBucket::derive_route(const Mesh& mesh, int64_t zero_copy_bytes) {
  using Cut = FlatLayout::Cut;
  const Cut cut = layout.cut();
  const bool may_encode = cut != Cut::kWhole && mesh.shard->size() > 1;
  codec = make_wire_codec(may_encode ? wire : WireFormat::kDtype, dtype, wire_dtype);
  const bool sends_pieces = codec->is_identity() && layout.full_numel() > 0 && exchanges_pieces(*mesh.shard);
  const bool is_large = sends_pieces && members.size() == 1 && bytes() >= zero_copy_bytes;
  reduces_apart = is_large && cut == Cut::kByOwner;
  // On a device a gradient may belong to another stream than `.grad` must.
  adopts = is_large && cut == Cut::kWhole && mesh.world->device().is_cpu();

  pieces = {{{0, layout.full_numel()}}};
  piece_of.assign(members.size(), 0);
  if (cut == Cut::kEvenly) {
    if (!sends_pieces) return;
    pieces = cut_into_pieces(layout, static_cast<int64_t>(c10::elementSize(dtype)), zero_copy_bytes);
    size_t piece = 0;
    for (size_t member = 0; member < members.size(); ++member) {
      const int64_t begin = layout.offset(static_cast<int64_t>(member));
      while (piece + 1 < pieces.size() && begin >= pieces[piece].range.end) ++piece;
      piece_of[member] = piece;
    }
  } else if (adopts || (cut == Cut::kByOwner && members.size() == 1 && (result == nullptr || reduces_apart))) {
    pieces[0].member = 0;
  }
}

}  // namespace tessera::internal
