#pragma once

#include <cstdint>

namespace tessera {

struct SaveOptions {
  // After a save, only this many of the complete checkpoints in the directory's parent stay, the
  // newest; 0: all. The parent is then taken to hold one run's checkpoints alone.
  int keep_last = 0;

  // How many bytes one checksum covers: what a rank that needs a part of a slice reads at least. A
  // multiple of 16, at most 1 GiB.
  int64_t block_bytes = int64_t{1} << 20;

  // The states of the random generators too. Where ranks are threads of one process they share the
  // CPU's, and it is saved as each finds it.
  bool rng = true;
};

struct LoadOptions {
  // true: the names of the model and of the checkpoint must be the same. false: what only one of
  // them has is left as it is. Shapes and dtypes must agree either way.
  bool strict = true;

  // Restores the random generators, if the checkpoint has their states and was saved by as many
  // ranks as load it.
  bool rng = true;

  // If not null, gets the number of bytes that this rank read from data files.
  int64_t* bytes_read = nullptr;
};

}  // namespace tessera
