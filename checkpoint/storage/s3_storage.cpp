#include <algorithm>
#include <charconv>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>
#include <set>

#include "checkpoint/storage/s3_client.h"
#include "checkpoint/storage/storage.h"

namespace tessera::internal {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kPartBytes = 16 * kMiB;  // S3 requires at least 5 MiB, except for the last part
constexpr int64_t kMaxParts = 10000;
constexpr size_t kUploads = 4;             // maximum number of parts in flight for one file
constexpr int64_t kFirstBytes = 64 << 10;  // size of the first read of a file, usually its whole header
constexpr int64_t kWindowBytes = kMiB;     // minimum size of a later read request
constexpr size_t kWindows = 8;             // maximum number of windows in the cache of one file

std::string range_text(int64_t begin, int64_t end) { return std::to_string(begin) + "-" + std::to_string(end - 1); }

// Runs `work`, and adds the action and the file to the text of its errors.
template <class Work>
auto told_of(const fs::path& path, FileAction action, ThrowFailure fail, Work work) {
  try {
    return work();
  } catch (const S3Error& error) {
    throw_with(fail, {path, action, 0, error.what(), dynamic_cast<const S3Unanswered*>(&error) != nullptr});
  }
}

// Returns the file's size, from the header Content-Range: "bytes 0-65535/403177472". Throws S3Error if the header is
// not that of an answer whose bytes begin at `begin`.
int64_t size_of(S3Response& response, int64_t begin) {
  const std::string &range = response.headers["content-range"], expected = "bytes " + std::to_string(begin) + "-";
  int64_t size = -1;
  if (const size_t slash = range.find('/'); range.starts_with(expected) && slash != std::string::npos)
    std::from_chars(range.data() + slash + 1, range.data() + range.size(), size);
  if (size >= begin + response.body_bytes) return size;
  throw S3Error("gave the Content-Range '" + range + "'; expected '" + expected + "<last byte>/<size>'");
}

// Reads an object. Caches recently read windows of the file, so that several small reads need only one request.
class S3Input : public InputFile {
 public:
  S3Input(const fs::path& path, std::shared_ptr<S3Client> client, ThrowFailure fail)
      : InputFile(path), client_(std::move(client)), location_(s3_location(path.native())), fail_(fail) {
    told_of(path, FileAction::kOpen, fail_, [&] {
      auto response = client_->send({.method = "GET", .location = location_, .range = range_text(0, kFirstBytes)});
      if (response.status == 416) return;  // the file is empty
      if (response.status == 404) throw S3Error("there is no such object");
      bytes_ = response.status == 206 ? size_of(response, 0) : response.body_bytes;
      tag_ = response.headers["etag"];
      windows_.push_back({0, std::make_shared<const std::string>(std::move(response.body))});
    });
  }

  int64_t bytes() const override { return bytes_; }

  void read(void* data, int64_t bytes, int64_t position) const override {
    if (bytes == 0) return;
    told_of(path(), FileAction::kRead, fail_, [&] {
      if (position + bytes > bytes_) throw S3Error("ends at byte " + std::to_string(bytes_));
      char* to = static_cast<char*>(data);
      if (take(to, bytes, position)) return;
      if (bytes >= kWindowBytes) return fetch(to, bytes, position);
      std::string text(static_cast<size_t>(std::min(kWindowBytes, bytes_ - position)), '\0');
      fetch(text.data(), static_cast<int64_t>(text.size()), position);
      std::memcpy(to, text.data(), static_cast<size_t>(bytes));
      const std::lock_guard lock(mutex_);
      windows_.push_back({position, std::make_shared<const std::string>(std::move(text))});
      if (windows_.size() > kWindows) windows_.erase(windows_.begin() + 1);  // keeps the first window, with the header
    });
  }

 private:
  struct Window {
    int64_t begin;
    std::shared_ptr<const std::string> text;
  };

  bool take(char* to, int64_t bytes, int64_t position) const {
    std::shared_ptr<const std::string> text;
    int64_t begin = 0;
    {
      const std::lock_guard lock(mutex_);
      const auto found = std::ranges::find_if(windows_, [&](const Window& window) {
        return window.begin <= position && position + bytes <= window.begin + static_cast<int64_t>(window.text->size());
      });
      if (found == windows_.end()) return false;
      text = found->text;
      begin = found->begin;
    }
    std::memcpy(to, text->data() + (position - begin), static_cast<size_t>(bytes));
    return true;
  }

  void fetch(char* to, int64_t bytes, int64_t position) const {
    auto response = client_->send({.method = "GET",
                                   .location = location_,
                                   .range = range_text(position, position + bytes),
                                   .target = to,
                                   .target_bytes = bytes});
    if (response.status == 404) throw S3Error("was removed while it was read");
    if (response.status != 206 || response.body_bytes != bytes)
      throw S3Error("gave " + std::to_string(response.body_bytes) + " bytes; expected " + std::to_string(bytes));
    if (response.headers["etag"] != tag_ || size_of(response, position) != bytes_)
      throw S3Error("was replaced while it was read");
  }

  const std::shared_ptr<S3Client> client_;
  const S3Location location_;
  const ThrowFailure fail_;
  int64_t bytes_ = 0;
  std::string tag_;
  mutable std::mutex mutex_;
  mutable std::vector<Window> windows_;
};

// Uploads a file in parts. Fills a part while previous parts are in flight. Sends the first part last, because its
// header is complete only at the end. Sends a file of one part in one request.
class S3Output : public OutputFile {
 public:
  S3Output(fs::path path, std::shared_ptr<S3Client> client, ThrowFailure fail, int64_t start_bytes, int64_t bytes)
      : path_(std::move(path)), client_(std::move(client)), location_(s3_location(path_.native())), fail_(fail) {
    auto whole = [](int64_t n) { return (n + kMiB - 1) / kMiB * kMiB; };
    part_bytes_ = std::max({kPartBytes, whole(bytes / (kMaxParts - 1)), whole(start_bytes)});
    part_.reserve(static_cast<size_t>(std::min(part_bytes_, bytes)));
    part_.resize(static_cast<size_t>(start_bytes));
  }

  ~S3Output() override {
    for (auto& upload : uploads_) upload.wait();
    if (upload_id_.empty()) return;
    try {
      client_->send({.method = "DELETE", .location = location_, .query = {{"uploadId", upload_id_}}});
    } catch (const std::exception&) {  // ignores errors, because the bucket's lifecycle rule removes unfinished uploads
    }
  }

  void append(const void* data, int64_t bytes) override {
    const char* from = static_cast<const char*>(data);
    while (bytes > 0) {
      if (static_cast<int64_t>(part_.size()) == part_bytes_) send_part();
      const int64_t count = std::min(bytes, part_bytes_ - static_cast<int64_t>(part_.size()));
      part_.append(from, static_cast<size_t>(count));
      from += count;
      bytes -= count;
    }
  }

  void finish(std::string_view start) override {
    told_of(path_, FileAction::kWrite, fail_, [&] {
      std::string& first = first_.empty() ? part_ : first_;
      first.replace(0, start.size(), start);
      if (first_.empty()) {
        put(client_->send({.method = "PUT", .location = location_, .body = part_}));
        return;
      }
      begin_upload(std::move(part_));
      tags_[0] = upload(1, first_);
      while (!uploads_.empty()) await_one();
      complete();
      upload_id_.clear();
    });
  }

 private:
  static S3Response put(S3Response response) {
    if (response.status == 404) throw S3Error("404 NoSuchBucket: there is no such bucket");
    return response;
  }

  void send_part() {
    told_of(path_, FileAction::kWrite, fail_, [&] {
      if (first_.empty()) {
        const auto response = put(client_->send({.method = "POST", .location = location_, .query = {{"uploads", ""}}}));
        const auto ids = xml_texts(response.body, "UploadId");
        if (ids.empty()) throw S3Error("the service gave no UploadId");
        upload_id_ = ids[0];
        first_ = std::move(part_);
        tags_.emplace_back();
      } else {
        begin_upload(std::move(part_));
      }
      part_.clear();
      part_.reserve(static_cast<size_t>(part_bytes_));
    });
  }

  // Uploads a part and returns its tag.
  std::string upload(size_t number, const std::string& part) const {
    auto response = client_->send({.method = "PUT",
                                   .location = location_,
                                   .query = {{"partNumber", std::to_string(number)}, {"uploadId", upload_id_}},
                                   .body = part});
    if (response.status == 404) throw S3Error("the upload was aborted by somebody else");
    return response.headers["etag"];
  }

  void begin_upload(std::string part) {
    while (uploads_.size() >= kUploads) await_one();
    tags_.emplace_back();
    uploads_.push_back(std::async(std::launch::async, [this, number = tags_.size(), own = std::move(part)] {
      return std::pair(number, upload(number, own));
    }));
  }

  void await_one() {
    auto upload = std::move(uploads_.front());
    uploads_.pop_front();
    auto [number, tag] = upload.get();
    tags_[number - 1] = std::move(tag);
  }

  void complete() {
    std::string list = "<CompleteMultipartUpload>";
    for (size_t i = 0; i < tags_.size(); ++i)
      list += "<Part><PartNumber>" + std::to_string(i + 1) + "</PartNumber><ETag>" + tags_[i] + "</ETag></Part>";
    list += "</CompleteMultipartUpload>";
    const auto response =
        client_->send({.method = "POST", .location = location_, .query = {{"uploadId", upload_id_}}, .body = list});
    // If the answer to the first attempt was lost, the retry returns 404, although the file exists.
    if (response.status == 404 && client_->send({.method = "HEAD", .location = location_}).status != 200)
      throw S3Error("the upload was aborted by somebody else");
  }

  const fs::path path_;
  const std::shared_ptr<S3Client> client_;
  const S3Location location_;
  const ThrowFailure fail_;
  int64_t part_bytes_ = 0;
  std::string part_;   // the part to which append() adds data
  std::string first_;  // the first part; empty until a second part begins
  std::string upload_id_;
  std::vector<std::string> tags_;
  std::deque<std::future<std::pair<size_t, std::string>>> uploads_;
};

class S3Storage : public Storage {
 public:
  explicit S3Storage(ThrowFailure fail) : Storage(fail), client_(std::make_shared<S3Client>()) {}

  std::unique_ptr<InputFile> open(const fs::path& path) const override {
    return std::make_unique<S3Input>(path, client_, fail_);
  }
  std::unique_ptr<OutputFile> create(const fs::path& path, int64_t start_bytes, int64_t bytes) const override {
    return std::make_unique<S3Output>(path, client_, fail_, start_bytes, bytes);
  }
  void put(const fs::path& path, std::string_view text, bool) const override {
    S3Output(path, client_, fail_, static_cast<int64_t>(text.size()), static_cast<int64_t>(text.size())).finish(text);
  }
  std::string beginning(const fs::path& path, int64_t max_bytes) const override {
    return told_of(path, FileAction::kRead, fail_, [&] {
      const auto response =
          client_->send({.method = "GET", .location = s3_location(path.native()), .range = range_text(0, max_bytes)});
      const bool is_empty = response.status == 404 || response.status == 416;
      return is_empty ? std::string() : response.body.substr(0, static_cast<size_t>(max_bytes));
    });
  }
  bool exists(const fs::path& file) const override {
    return told_of(file, FileAction::kLookAt, fail_, [&] {
      return client_->send({.method = "HEAD", .location = s3_location(file.native())}).status != 404;
    });
  }
  std::vector<std::string> list(const fs::path& folder) const override { return list(folder, false); }
  void remove(const fs::path& file) const override {
    told_of(file, FileAction::kWrite, fail_,
            [&] { client_->send({.method = "DELETE", .location = s3_location(file.native())}); });
  }
  void remove_all(const fs::path& folder) const override {
    for (const auto& name : list(folder, true)) remove(folder / name);
  }
  int reading_threads() const override { return 8; }
  int64_t reading_bytes() const override { return int64_t{8} << 20; }

 private:
  std::vector<std::string> list(const fs::path& folder, bool recursive) const {
    const S3Location location = s3_location(folder.native());
    const std::string prefix = location.key.empty() ? "" : location.key + "/";
    std::set<std::string> names, tokens;
    std::string token;
    told_of(folder, FileAction::kRead, fail_, [&] {
      do {
        if (!tokens.insert(token).second) throw S3Error("gave the continuation token '" + token + "' twice");
        S3Request request{.method = "GET", .location = {location.bucket, ""}};
        if (!token.empty()) request.query.emplace_back("continuation-token", token);
        if (!recursive) request.query.emplace_back("delimiter", "/");
        request.query.emplace_back("encoding-type", "url");
        request.query.emplace_back("list-type", "2");
        request.query.emplace_back("prefix", prefix);
        const auto response = client_->send(request);
        if (response.status == 404) throw S3Error("there is no bucket '" + location.bucket + "'");
        if (response.body.find("</ListBucketResult>") == std::string::npos)
          throw S3Unanswered("gave no list of objects: " + response.body.substr(0, 100));
        std::vector<std::string> keys = xml_texts(response.body, "Key");
        for (const auto& group : xml_texts(response.body, "CommonPrefixes"))
          for (auto& key : xml_texts(group, "Prefix")) keys.push_back(std::move(key));
        for (const auto& encoded : keys)
          if (const std::string key = percent_decoded(encoded); key.size() > prefix.size() && key.starts_with(prefix))
            names.insert(key.substr(prefix.size()));
        const auto next = xml_texts(response.body, "NextContinuationToken");
        token = next.empty() ? "" : next[0];
      } while (!token.empty());
    });
    return {names.begin(), names.end()};
  }

  const std::shared_ptr<S3Client> client_;
};

}  // namespace

std::unique_ptr<Storage> make_s3_storage(ThrowFailure fail) { return std::make_unique<S3Storage>(fail); }

}  // namespace tessera::internal
