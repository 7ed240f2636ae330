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

// The parts of "s3://bucket/some/key". The key has no '/' at its end, and may be empty.
struct S3Location {
  std::string bucket;
  std::string key;
};
// Parses a URI. Throws std::invalid_argument if it has no bucket.
S3Location s3_location(const std::string& uri);

struct S3Request {
  std::string method;  // "GET", "HEAD", "PUT", "POST", "DELETE"
  S3Location location;
  std::vector<std::pair<std::string, std::string>> query;  // sorted by name
  std::string range;                                       // "0-1023" in a GET; "": the whole object
  std::string_view body;                                   // sent in a PUT or POST
  // Memory of target_bytes bytes that receives the body of a 206. If null, S3Response::body receives the body.
  char* target = nullptr;
  int64_t target_bytes = 0;
};

struct S3Response {
  long status = 0;
  std::string body;
  int64_t body_bytes = 0;
  std::map<std::string, std::string> headers;  // names in lower case
};

// The final error of the service or the network, after all attempts. status 0: no answer.
class S3Error : public std::runtime_error {
 public:
  S3Error(long status, const std::string& what) : std::runtime_error(what), status_(status) {}
  long status() const { return status_; }

 private:
  const long status_;
};

// The service gave no usable answer. The object may be undamaged.
class S3Unanswered : public S3Error {
 public:
  using S3Error::S3Error;
};

// Sends signed requests over persistent connections. Retries transient failures: no, broken or stalled connections,
// truncated answers, and the statuses 408, 429 and 5xx. Pauses double from 0.1 s to 20 s, minus a random part. Makes at
// most AWS_MAX_ATTEMPTS attempts, 10 by default. Thread-safe.
class S3Client {
 public:
  // Reads the environment. Throws std::invalid_argument for a missing credential or an invalid number.
  S3Client();
  ~S3Client();
  S3Client(const S3Client&) = delete;
  S3Client& operator=(const S3Client&) = delete;

  // Returns an answer with status 2xx or 404. Throws S3Error for 416, a range outside the object, else S3Unanswered.
  S3Response send(const S3Request& request) const;

 private:
  struct Connections;
  struct Connection;
  std::string url(const S3Request& request) const;
  void set_request(Connection& own, const S3Request& request) const;
  S3Response send_once(const S3Request& request, std::string& fault) const;

  std::string endpoint_;  // "" for Amazon's own endpoint
  std::string region_, key_id_, secret_, token_;
  int attempts_ = 10;
  long stall_seconds_ = 30;
  std::unique_ptr<Connections> connections_;
};

// Returns the text of each <tag>...</tag>, with entities resolved.
std::vector<std::string> xml_texts(const std::string& xml, const std::string& tag);
// Decodes escapes: "%20" and "+" are ' '.
std::string percent_decoded(std::string text);

}  // namespace tessera::internal
