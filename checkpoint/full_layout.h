#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tessera/checkpoint/full_file.h"
#include "tessera/checkpoint/safetensors_header.h"

namespace tessera {

// Which tensors go to which full file, and where. Pure: touches no file.
struct FullFile {
  std::filesystem::path path;
  std::string header;                     // the file's first bytes
  std::vector<SafetensorsEntry> entries;  // in the order of their data
  int64_t bytes = 0;
};

struct FullLayout {
  std::vector<FullFile> files;
  std::filesystem::path index_path;  // empty: one file, no index
  std::string index;
};

// Throws std::invalid_argument for a dtype that safetensors has no name for.
FullLayout plan_full_files(const std::filesystem::path& file, const std::vector<FullTensor>& tensors,
                           const SaveFullOptions& options);

// While files are written they have this name: hidden, beside the target.
std::filesystem::path draft_of(const std::filesystem::path& path);

// Makes the layout's files visible, the index last.
void publish(const FullLayout& layout);
// Removes the drafts; errors are ignored.
void discard(const FullLayout& layout);

}  // namespace tessera
