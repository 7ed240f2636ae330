#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "tessera/storage/file.h"

namespace tessera {

// The files and directories of checkpoints: all that fails throws CheckpointError with the path and the system's
// reason.

// A new file; one that exists is refused.
File create_file(const std::filesystem::path& path);
// A regular file that is there; a symbolic link is refused.
File open_file(const std::filesystem::path& path);
// The same for writing parts of one that is there.
File open_file_to_write(const std::filesystem::path& path);

// fsync of a directory: makes its entries durable.
void sync_directory(const std::filesystem::path& directory);

// A whole small file at once: reading refuses one of more than max_bytes; writing makes a new file
// and syncs it.
std::string read_text(const std::filesystem::path& path, int64_t max_bytes);
void write_text(const std::filesystem::path& path, std::string_view text);

// Renames, over a file that is there if `replace`; else an existing target is an error.
void rename_entry(const std::filesystem::path& from, const std::filesystem::path& to, bool replace);
// Exchanges two directory entries in one step.
void exchange_entries(const std::filesystem::path& a, const std::filesystem::path& b);

// A number as names of files have it: 42 is "00042".
std::string five_digits(int64_t number);

}  // namespace tessera
