#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "checkpoint/storage/storage.h"
#include "core/runtime/file.h"

namespace tessera::internal {

// Files and directories of checkpoints: what fails throws CheckpointError with the path and the system's reason.

// The storage that a path is on, of which there is one of each kind.
const Storage& storage_of(const std::filesystem::path& path);
// A file that is there, on any storage; a symbolic link is refused.
inline std::unique_ptr<InputFile> open_file(const std::filesystem::path& path) { return storage_of(path).open(path); }

// A whole small file at once, on any storage: reading refuses one of more than max_bytes; writing makes a new file,
// durably.
std::string read_text(const std::filesystem::path& path, int64_t max_bytes);
inline void write_text(const std::filesystem::path& path, std::string_view text) {
  storage_of(path).put(path, text, /*durable=*/true);
}

// The rest is for local paths.

// A new file; one that exists is refused.
File create_file(const std::filesystem::path& path);
// A file that is there, for writing parts of it.
File open_file_to_write(const std::filesystem::path& path);

// Makes a directory and its parents, where they are not there, durably. The path is absolute.
void make_directories(const std::filesystem::path& directory);
// fsync of a directory: makes its entries durable.
void sync_directory(const std::filesystem::path& directory);

// "" if there is none, or no such file.
std::string first_line(const std::filesystem::path& path);

// Renames, over a file that is there if `replace`; else an existing target is an error.
void rename_entry(const std::filesystem::path& from, const std::filesystem::path& to, bool replace);
// Exchanges two directory entries in one step.
void exchange_entries(const std::filesystem::path& a, const std::filesystem::path& b);

// A number as names of files have it: 42 is "00042".
std::string five_digits(int64_t number);

}  // namespace tessera::internal
