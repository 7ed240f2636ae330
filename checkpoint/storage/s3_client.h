#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::internal {

// "s3://bucket/some/key"; the key has no '/' at its ends and may be empty.
struct S3Location {
  std::string bucket;
  std::string key;
};
// Throws std::invalid_argument for anything else.
S3Location s3_location(const std::string& uri);

struct S3Request {
  std::string method;  // "GET", "HEAD", "PUT", "POST", "DELETE"
  S3Location location;
  std::vector<std::pair<std::string, std::string>> query;  // sorted by name
  std::string range;                                       // "0-1023" of a GET; "": all
  std::string_view body;                                   // of a PUT or POST
  // Where the body of a 206 goes, as far as there is room; null: to S3Response::body.
  char* target = nullptr;
  int64_t target_bytes = 0;
};

struct S3Response {
  long status = 0;
  std::string body;
  int64_t body_bytes = 0;
  std::map<std::string, std::string> headers;  // names in lower case
};

// What the service or the network said, once it has been asked often enough. status 0: no answer at all.
class S3Error : public std::runtime_error {
 public:
  S3Error(long status, const std::string& what) : std::runtime_error(what), status_(status) {}
  long status() const { return status_; }

 private:
  const long status_;
};

// What says nothing of the object: it was not to be had now, and may be sound.
class S3Unanswered : public S3Error {
 public:
  using S3Error::S3Error;
};

// Sends signed requests; keeps its connections. What may pass by itself (no connection, one that breaks or stalls, an
// answer cut short, 408, 429, 5xx) is tried again, after a pause that doubles from 0.1 s to 20 s, less a random part;
// AWS_MAX_ATTEMPTS times in all, or 10. Thread-safe.
class S3Client {
 public:
  // Reads the environment. Throws std::invalid_argument for a credential that is missing.
  S3Client();
  ~S3Client();
  S3Client(const S3Client&) = delete;
  S3Client& operator=(const S3Client&) = delete;

  // Answers of the 200s, and 404; S3Unanswered for others, S3Error for a range outside of the object (416).
  S3Response send(const S3Request& request) const;

 private:
  struct Connections;
  struct Connection;
  std::string url(const S3Request& request) const;
  void set_request(Connection& own, const S3Request& request) const;
  S3Response send_once(const S3Request& request, std::string& fault) const;

  std::string endpoint_;  // "" for Amazon's own
  std::string region_, key_id_, secret_, token_;
  int attempts_ = 10;
  long stall_seconds_ = 30;
  std::unique_ptr<Connections> connections_;
};

// What stands between <tag> and </tag>, for each; entities are resolved.
std::vector<std::string> xml_texts(const std::string& xml, const std::string& tag);
// "%20" is ' '.
std::string percent_decoded(std::string text);

}  // namespace tessera::internal
