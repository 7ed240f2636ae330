#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "checkpoint/storage/storage.h"
#include "core/runtime/file.h"

namespace tessera::internal {

// File and directory functions for checkpoints. On failure, they throw CheckpointError with the path and the reason.

// Returns the storage for the scheme of `path`: one object per scheme, never destroyed. Throws like make_storage().
const Storage& storage_of(const std::filesystem::path& path);
// Opens an existing file on any storage. Throws for a symbolic link.
inline std::unique_ptr<InputFile> open_file(const std::filesystem::path& path) { return storage_of(path).open(path); }

// Read or write a small file as a whole, on any storage. read_text() throws for a file larger than max_bytes.
// write_text() makes the content durable. A local file's directory entry becomes durable in sync_directory().
std::string read_text(const std::filesystem::path& path, int64_t max_bytes);
inline void write_text(const std::filesystem::path& path, std::string_view text) {
  storage_of(path).put(path, text, /*durable=*/true);
}

// The functions below support local paths only.

// Throws CheckpointError with the path, the failed action and errno's text.
[[noreturn]] void fail_at(const std::filesystem::path& path, const std::string& action);

// Creates a file. Throws if the file exists.
File create_file(const std::filesystem::path& path);
// Opens an existing file for writing, and keeps its content.
File open_file_to_write(const std::filesystem::path& path);

// Creates a directory and its missing parents. All of these are durable on return. The path must be absolute.
void make_directories(const std::filesystem::path& directory);
// Makes the entries of a directory durable with fsync().
void sync_directory(const std::filesystem::path& directory);

// Returns the first line of a file, truncated to 4096 bytes. Returns "" if the file is empty or not readable.
std::string first_line(const std::filesystem::path& path);

// Renames an entry. If `replace`, replaces a file or an empty directory at `to`. Otherwise throws if `to` exists; on a
// file system without RENAME_NOREPLACE, only if `to` is a non-empty directory.
void rename_entry(const std::filesystem::path& from, const std::filesystem::path& to, bool replace);
// Exchanges two directory entries atomically. Throws if the file system does not support an exchange.
void exchange_entries(const std::filesystem::path& a, const std::filesystem::path& b);

// Formats a number with at least five digits, for use in file names: 42 becomes "00042".
std::string five_digits(int64_t number);

}  // namespace tessera::internal
