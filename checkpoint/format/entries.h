#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "checkpoint/storage/storage.h"
#include "core/runtime/file.h"

namespace tessera::internal {

// Functions for files and directories of checkpoints. Failures throw CheckpointError with the path and the reason.

// Returns the storage of a path. Each scheme has one instance, which is never destroyed.
const Storage& storage_of(const std::filesystem::path& path);
// Opens an existing file on any storage; refuses a symbolic link.
inline std::unique_ptr<InputFile> open_file(const std::filesystem::path& path) { return storage_of(path).open(path); }

// Read or write a small file as a whole, on any storage. read_text() throws for a file above max_bytes; write_text()
// creates the file, durably.
std::string read_text(const std::filesystem::path& path, int64_t max_bytes);
inline void write_text(const std::filesystem::path& path, std::string_view text) {
  storage_of(path).put(path, text, /*durable=*/true);
}

// The functions below take local paths.

// Creates a file. Throws if it exists.
File create_file(const std::filesystem::path& path);
// Opens an existing file in order to write parts of it.
File open_file_to_write(const std::filesystem::path& path);

// Creates a directory and its missing parents, durably. The path must be absolute.
void make_directories(const std::filesystem::path& directory);
// Makes a directory's entries durable (fsync).
void sync_directory(const std::filesystem::path& directory);

// Returns the first line of a file (at most 4096 bytes); "" if the file is empty or cannot be read.
std::string first_line(const std::filesystem::path& path);

// Renames an entry. Replaces an existing target only if `replace`; otherwise throws.
void rename_entry(const std::filesystem::path& from, const std::filesystem::path& to, bool replace);
// Exchanges two directory entries atomically. Throws if the file system cannot.
void exchange_entries(const std::filesystem::path& a, const std::filesystem::path& b);

// Formats a number for a file name: 42 is "00042".
std::string five_digits(int64_t number);

}  // namespace tessera::internal
