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

// A file of some storage that is there, open for reading. Safe from several threads at a time.
class InputFile {
 public:
  explicit InputFile(std::filesystem::path path) : path_(std::move(path)) {}
  virtual ~InputFile() = default;
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  virtual int64_t bytes() const = 0;
  // All of it or a failure: one that ends before is one.
  virtual void read(void* data, int64_t bytes, int64_t position) const = 0;
  // The same file, for a thread that reads another part of it, if it is read faster that way; null: it may use this
  // one.
  virtual std::unique_ptr<InputFile> for_another_thread() const { return nullptr; }

 private:
  const std::filesystem::path path_;
};

// A new file, written from front to end but for its first bytes, which are written last. By one thread.
class OutputFile {
 public:
  virtual ~OutputFile() = default;
  virtual void append(const void* data, int64_t bytes) = 0;
  // Writes the first bytes, as many as were announced; durable when it returns. In an object store the file appears
  // now: one that was not finished never was.
  virtual void finish(std::string_view start) = 0;
};

// Where checkpoints lie: local folders ("out/step-100"), this process's memory ("memory://run/step-100") or an object
// store ("s3://bucket/run/step-100"). Failures are thrown by the function that the storage was made with. Thread-safe.
class Storage {
 public:
  explicit Storage(ThrowFailure fail) : fail_(fail) {}
  virtual ~Storage() = default;
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  virtual std::unique_ptr<InputFile> open(const std::filesystem::path& path) const = 0;
  // A file of `bytes`, of which the first `start_bytes` are written last. One that is there fails, or is replaced (in
  // an object store).
  virtual std::unique_ptr<OutputFile> create(const std::filesystem::path& path, int64_t start_bytes,
                                             int64_t bytes) const = 0;
  // A small file at once; as create() for one that is there. Not durable: a local one may be lost with the power.
  virtual void put(const std::filesystem::path& path, std::string_view text, bool durable) const = 0;
  // At most max_bytes of the beginning of a file; "" if there is none.
  virtual std::string beginning(const std::filesystem::path& path, int64_t max_bytes) const = 0;
  virtual bool exists(const std::filesystem::path& file) const = 0;
  // Names in a folder, in order, of folders with a '/' behind them; none if there is no such folder. These three fail
  // where it cannot be told what is there.
  virtual std::vector<std::string> list(const std::filesystem::path& folder) const = 0;
  // What is not there is removed already.
  virtual void remove(const std::filesystem::path& file) const = 0;
  virtual void remove_all(const std::filesystem::path& folder) const = 0;

  // How many threads read one file the fastest.
  virtual int reading_threads() const = 0;
  // And how many bytes at a time.
  virtual int64_t reading_bytes() const { return int64_t{2} << 20; }

 protected:
  // Throws.
  [[noreturn]] void refuse(const std::filesystem::path& path, FileAction action, std::string problem) const;
  const ThrowFailure fail_;
};

// The storage of a path, by what it begins with. Throws std::invalid_argument for another "<scheme>://", and for s3://
// where Tessera was built without libcurl.
std::unique_ptr<Storage> make_storage(const std::filesystem::path& path, ThrowFailure fail);

std::unique_ptr<Storage> make_local_storage(ThrowFailure fail);
// Files by name, kept until they are removed or the process ends; all of it is one storage.
std::unique_ptr<Storage> make_memory_storage(ThrowFailure fail);
// Settings from AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION or AWS_DEFAULT_REGION, AWS_ACCESS_KEY_ID,
// AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_MAX_ATTEMPTS: docs/checkpoint.md.
std::unique_ptr<Storage> make_s3_storage(ThrowFailure fail);

// "s3" of "s3://bucket/path"; "" of a local path.
std::string scheme_of(const std::filesystem::path& path);
// Whether it is an object store: whole files appear at once, nothing is renamed or locked.
inline bool is_remote(const std::filesystem::path& path) { return !scheme_of(path).empty(); }

}  // namespace tessera::internal
