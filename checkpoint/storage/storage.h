#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/runtime/file.h"

namespace tessera::internal {

// An existing file on any storage, open for reading. Thread-safe.
class InputFile {
 public:
  explicit InputFile(std::filesystem::path path) : path_(std::move(path)) {}
  virtual ~InputFile() = default;
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  virtual int64_t bytes() const = 0;
  // Reads exactly `bytes` bytes. Fails if the file is too short.
  virtual void read(void* data, int64_t bytes, int64_t position) const = 0;
  // Returns a second handle for use by another thread, or null if threads read equally fast with a shared handle.
  virtual std::unique_ptr<InputFile> for_another_thread() const { return nullptr; }

 private:
  const std::filesystem::path path_;
};

// A new file, written sequentially except for its first bytes, which are written last. Must be used by one thread.
class OutputFile {
 public:
  virtual ~OutputFile() = default;
  virtual void append(const void* data, int64_t bytes) = 0;
  // Writes the first bytes, whose length must be the `start_bytes` passed to Storage::create(). The content is then
  // durable, but a local directory entry only after sync_directory(). A remote file appears only now, as a whole.
  virtual void finish(std::string_view start) = 0;
};

// Storage for checkpoints: local folders ("out/step-100"), this process's memory ("memory://run/step-100") or an object
// store ("s3://bucket/run/step-100"). On failure, calls the function `fail`, which throws. Thread-safe.
class Storage {
 public:
  explicit Storage(ThrowFailure fail) : fail_(fail) {}
  virtual ~Storage() = default;
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  virtual std::unique_ptr<InputFile> open(const std::filesystem::path& path) const = 0;
  // Creates a file of `bytes` bytes, of which the first `start_bytes` are written last. If the file exists, local
  // storage fails, and other storage replaces the file.
  virtual std::unique_ptr<OutputFile> create(const std::filesystem::path& path, int64_t start_bytes,
                                             int64_t bytes) const = 0;
  // Writes a small file. Treats an existing file like create(). If not `durable`, a power cut may destroy a local file.
  virtual void put(const std::filesystem::path& path, std::string_view text, bool durable) const = 0;
  // Returns at most max_bytes bytes from the start of a file, or "" if the file does not exist.
  virtual std::string beginning(const std::filesystem::path& path, int64_t max_bytes) const = 0;
  virtual bool exists(const std::filesystem::path& file) const = 0;
  // Returns the sorted names of a folder's entries, with '/' appended to the names of subfolders. The list is empty if
  // the folder does not exist. exists(), beginning() and list() fail if the storage does not answer.
  virtual std::vector<std::string> list(const std::filesystem::path& folder) const = 0;
  // Removes a file. A no-op if the file does not exist.
  virtual void remove(const std::filesystem::path& file) const = 0;
  virtual void remove_all(const std::filesystem::path& folder) const = 0;

  // Return the number of threads, and the number of bytes per read, that read one file fastest.
  virtual int reading_threads() const = 0;
  virtual int64_t reading_bytes() const { return int64_t{2} << 20; }

 protected:
  [[noreturn]] void refuse(const std::filesystem::path& path, FileAction action, std::string problem) const;
  const ThrowFailure fail_;
};

// Creates the storage for the scheme of `path`. Throws std::invalid_argument for an unknown scheme, and for s3:// if
// Tessera was built without libcurl, or if the environment has no credentials or an invalid number.
std::unique_ptr<Storage> make_storage(const std::filesystem::path& path, ThrowFailure fail);

// Registers the storage of another library for paths that begin with "<scheme>://". A second call for a scheme is a
// no-op. Thread-safe.
using MakeStorage = std::unique_ptr<Storage> (*)(ThrowFailure fail);
void register_storage(const std::string& scheme, MakeStorage make);

std::unique_ptr<Storage> make_local_storage(ThrowFailure fail);
// Creates storage in memory. Files exist until they are removed or the process ends. All instances share the files.
std::unique_ptr<Storage> make_memory_storage(ThrowFailure fail);
// Creates S3 storage. Reads the environment variables AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION or
// AWS_DEFAULT_REGION, AWS_ACCESS_KEY_ID and others (docs/checkpoint.md lists them).
std::unique_ptr<Storage> make_s3_storage(ThrowFailure fail);

// Returns the scheme of a path: "s3" for "s3://bucket/path", and "" for a local path.
std::string scheme_of(const std::filesystem::path& path);
// Returns whether the path has a scheme. On remote storage, files appear as a whole, and cannot be renamed or locked.
inline bool is_remote(const std::filesystem::path& path) { return !scheme_of(path).empty(); }

}  // namespace tessera::internal
