#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/runtime/file.h"

namespace tessera::internal {

// An existing file of some storage, open for reading. Thread-safe.
class InputFile {
 public:
  explicit InputFile(std::filesystem::path path) : path_(std::move(path)) {}
  virtual ~InputFile() = default;
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  virtual int64_t bytes() const = 0;
  // Reads exactly `bytes` bytes. Fails if the file ends earlier.
  virtual void read(void* data, int64_t bytes, int64_t position) const = 0;
  // Returns another handle if a second thread reads faster with its own. If null, threads should share this handle.
  virtual std::unique_ptr<InputFile> for_another_thread() const { return nullptr; }

 private:
  const std::filesystem::path path_;
};

// A new file, written sequentially except for its first bytes, which are written last. Must be used by one thread.
class OutputFile {
 public:
  virtual ~OutputFile() = default;
  virtual void append(const void* data, int64_t bytes) = 0;
  // Writes the first bytes, which must have the announced length; the file is durable on return. In an object store the
  // file appears only now; an unfinished file never exists.
  virtual void finish(std::string_view start) = 0;
};

// A place for checkpoints: local folders ("out/step-100"), this process's memory ("memory://run/step-100") or an object
// store ("s3://bucket/run/step-100"). Failures are thrown by the function passed to the constructor. Thread-safe.
class Storage {
 public:
  explicit Storage(ThrowFailure fail) : fail_(fail) {}
  virtual ~Storage() = default;
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  virtual std::unique_ptr<InputFile> open(const std::filesystem::path& path) const = 0;
  // Creates a file of `bytes` bytes whose first `start_bytes` are written last. If the file exists, fails on a local
  // path, and replaces it on other storage.
  virtual std::unique_ptr<OutputFile> create(const std::filesystem::path& path, int64_t start_bytes,
                                             int64_t bytes) const = 0;
  // Writes a small file; treats an existing file like create(). Unless `durable`, a power cut may lose a local file.
  virtual void put(const std::filesystem::path& path, std::string_view text, bool durable) const = 0;
  // Returns at most max_bytes from the start of a file; "" if it does not exist.
  virtual std::string beginning(const std::filesystem::path& path, int64_t max_bytes) const = 0;
  virtual bool exists(const std::filesystem::path& file) const = 0;
  // Returns the sorted names in a folder, subfolders with a trailing '/'; an empty list if the folder does not exist.
  // exists(), beginning() and list() fail if the storage does not answer.
  virtual std::vector<std::string> list(const std::filesystem::path& folder) const = 0;
  // Removes a file. A no-op if the file does not exist.
  virtual void remove(const std::filesystem::path& file) const = 0;
  virtual void remove_all(const std::filesystem::path& folder) const = 0;

  // Return the number of threads with which one file is read fastest, and the bytes of each read.
  virtual int reading_threads() const = 0;
  virtual int64_t reading_bytes() const { return int64_t{2} << 20; }

 protected:
  [[noreturn]] void refuse(const std::filesystem::path& path, FileAction action, std::string problem) const;
  const ThrowFailure fail_;
};

// Returns the storage of a path, chosen by its scheme. Throws std::invalid_argument for an unknown "<scheme>://", and
// for s3:// if Tessera was built without libcurl.
std::unique_ptr<Storage> make_storage(const std::filesystem::path& path, ThrowFailure fail);

// Adds a storage of another library, for paths that begin with "<scheme>://". Another call for the scheme is a no-op.
// Thread-safe.
using MakeStorage = std::unique_ptr<Storage> (*)(ThrowFailure fail);
void register_storage(const std::string& scheme, MakeStorage make);

std::unique_ptr<Storage> make_local_storage(ThrowFailure fail);
// Returns storage in memory. It keeps files until they are removed or the process ends. All instances share the files.
std::unique_ptr<Storage> make_memory_storage(ThrowFailure fail);
// Returns S3 storage. Reads AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION or AWS_DEFAULT_REGION,
// AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_MAX_ATTEMPTS (docs/checkpoint.md).
std::unique_ptr<Storage> make_s3_storage(ThrowFailure fail);

// Returns "s3" for "s3://bucket/path"; "" for a local path.
std::string scheme_of(const std::filesystem::path& path);
// Returns whether the path has a scheme. On such storage, files appear as a whole, and cannot be renamed or locked.
inline bool is_remote(const std::filesystem::path& path) { return !scheme_of(path).empty(); }

}  // namespace tessera::internal
