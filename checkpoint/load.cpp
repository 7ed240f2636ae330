#include <ATen/core/grad_mode.h>

#include <set>
#include <sstream>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/dtype.h"
#include "tessera/checkpoint/entries.h"
#include "tessera/checkpoint/load_plan.h"
#include "tessera/checkpoint/outcome.h"
#include "tessera/checkpoint/saved_state.h"
#include "tessera/checkpoint/slice_reader.h"
#include "tessera/comm/agreement.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// The manifest as rank 0 sees it, so that ranks cannot see different ones if it is replaced now.
Manifest agree_on_manifest(const fs::path& dir, Communicator& comm, const std::string& what) {
  require_agreement(comm, "which checkpoint to load", {"directory " + dir.string()});
  const auto texts = settle(comm, attempt([&] {
                              if (comm.rank() != 0) return std::string();
                              std::error_code ignored;
                              if (!fs::exists(dir / kManifestName, ignored))
                                throw CheckpointError(explain_missing(dir));
                              return read_text(dir / kManifestName, kMaxManifestBytes);
                            }),
                            what);
  Manifest manifest =
      parse_manifest(texts[0], (dir / kManifestName).string());  // the same text, the same error, everywhere
  manifest.saved.directory = dir;
  return manifest;
}

nlohmann::json load(const fs::path& dir, ModelShards& model, torch::optim::Optimizer* optimizer,
                    const LoadOptions& options) {
  const std::string what = "loading " + dir.string();
  Communicator& comm = *model.comm();
  const Manifest manifest = agree_on_manifest(dir, comm, what);
  const auto shards = model.named_shards();
  LoadedState loaded;
  settle(comm, attempt([&] {
           const at::NoGradGuard no_grad;
           loaded = read_state_of(manifest, model, shards, optimizer, options);
           return std::string();
         }),
         what);
  // From here on nothing can fail but memory that ends, and ranks that are gone.
  const at::NoGradGuard no_grad;
  loaded.apply();
  // Ranks that are threads share generators: one that went on would find its own turned back by one that lags.
  comm.barrier(what);
  if (options.bytes_read != nullptr) *options.bytes_read = loaded.bytes_read;
  return manifest.extra;
}

}  // namespace

nlohmann::json load_checkpoint(const fs::path& dir, ModelShards& model, torch::optim::Optimizer& optimizer,
                               const LoadOptions& options) {
  return load(dir, model, &optimizer, options);
}

nlohmann::json load_checkpoint(const fs::path& dir, ModelShards& model, const LoadOptions& options) {
  return load(dir, model, nullptr, options);
}

}  // namespace tessera
