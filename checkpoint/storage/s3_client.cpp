#include "checkpoint/storage/s3_client.h"

#include <curl/curl.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

namespace tessera::internal {
namespace {

constexpr size_t kKeptConnections = 32;
constexpr char kEmptySha256[] = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

std::string environment(const char* name, const char* instead = nullptr) {
  if (const char* value = std::getenv(name); value != nullptr && *value != '\0') return value;
  return instead == nullptr ? "" : environment(instead);
}

int number(const char* name, int otherwise) {
  const std::string text = environment(name);
  if (text.empty()) return otherwise;
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || *end != '\0' || value < 1)
    throw std::invalid_argument(std::string(name) + " is '" + text + "', expected a number above 0");
  return value;
}

// Escapes all characters except letters, digits, "-_.~" and, in a key, '/'. Request signatures require these rules.
std::string percent_encoded(const std::string& text, bool is_key) {
  if (text.empty()) return text;
  const std::unique_ptr<char, decltype(&curl_free)> escaped(
      curl_easy_escape(nullptr, text.data(), static_cast<int>(text.size())), &curl_free);
  std::string encoded = escaped.get();
  if (is_key)
    for (size_t at = encoded.find("%2F"); at != std::string::npos; at = encoded.find("%2F", at))
      encoded.replace(at, 3, "/");
  return encoded;
}

// A request and the part of its answer that was received so far.
struct Answer {
  CURL* handle;
  const S3Request* request;
  S3Response response;
};

size_t take_body(char* data, size_t, size_t bytes, void* opaque) {
  auto& [handle, request, response] = *static_cast<Answer*>(opaque);
  long status = 0;
  curl_easy_getinfo(handle, CURLINFO_RESPONSE_CODE, &status);
  if (status == 206 && request->target != nullptr) {
    if (response.body_bytes + static_cast<int64_t>(bytes) > request->target_bytes) return 0;  // aborts the request
    std::memcpy(request->target + response.body_bytes, data, bytes);
  } else {
    response.body.append(data, bytes);
  }
  response.body_bytes += static_cast<int64_t>(bytes);
  return bytes;
}

size_t take_header(char* data, size_t, size_t bytes, void* opaque) {
  const std::string line(data, bytes);
  const size_t colon = line.find(':');
  if (colon == std::string::npos) return bytes;
  std::string name = line.substr(0, colon);
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
  const size_t begin = line.find_first_not_of(" \t", colon + 1), end = line.find_last_not_of(" \t\r\n");
  static_cast<Answer*>(opaque)->response.headers[name] =
      begin == std::string::npos || end < begin ? "" : line.substr(begin, end - begin + 1);
  return bytes;
}

// Returns whether a curl error may be transient.
bool may_pass(CURLcode code) {
  switch (code) {
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_CONNECT:
    case CURLE_PARTIAL_FILE:
    case CURLE_OPERATION_TIMEDOUT:
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_GOT_NOTHING:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_HTTP2:
    case CURLE_HTTP2_STREAM:
    case CURLE_WEIRD_SERVER_REPLY:
      return true;
    default:
      return false;
  }
}

// Formats the error that the service sent: "503 SlowDown: Please reduce your request rate."
std::string told(const S3Response& response) {
  std::string text = std::to_string(response.status);
  for (const auto& [tag, separator] : {std::pair("Code", " "), {"Message", ": "}})
    if (const auto texts = xml_texts(response.body, tag); !texts.empty()) text += separator + texts[0];
  return text;
}

}  // namespace

S3Location s3_location(const std::string& uri) {
  const size_t begin = uri.find("://");
  if (begin == std::string::npos) throw std::invalid_argument("'" + uri + "' is not s3://<bucket>/<path>");
  std::string rest = uri.substr(begin + 3);
  while (rest.ends_with('/')) rest.pop_back();
  const size_t slash = rest.find('/');
  if (rest.empty() || slash == 0) throw std::invalid_argument("'" + uri + "' is not s3://<bucket>/<path>");
  return {rest.substr(0, slash), slash == std::string::npos ? "" : rest.substr(slash + 1)};
}

std::vector<std::string> xml_texts(const std::string& xml, const std::string& tag) {
  static constexpr std::pair<const char*, char> kEntities[] = {
      {"&lt;", '<'}, {"&gt;", '>'}, {"&quot;", '"'}, {"&apos;", '\''}, {"&amp;", '&'}};
  const std::string open = "<" + tag + ">", close = "</" + tag + ">";
  std::vector<std::string> texts;
  for (size_t begin = xml.find(open); begin != std::string::npos; begin = xml.find(open, begin)) {
    begin += open.size();
    const size_t end = xml.find(close, begin);
    if (end == std::string::npos) break;
    std::string& text = texts.emplace_back(xml.substr(begin, end - begin));
    for (const auto& [entity, character] : kEntities)
      for (size_t at = text.find(entity); at != std::string::npos; at = text.find(entity, at + 1))
        text.replace(at, std::strlen(entity), 1, character);
  }
  return texts;
}

std::string percent_decoded(std::string text) {
  std::ranges::replace(text, '+', ' ');
  int bytes = 0;
  const std::unique_ptr<char, decltype(&curl_free)> decoded(
      curl_easy_unescape(nullptr, text.data(), static_cast<int>(text.size()), &bytes), &curl_free);
  return {decoded.get(), static_cast<size_t>(bytes)};
}

// A pool of idle curl handles, which keep their connections open.
struct S3Client::Connections {
  std::mutex mutex;
  std::vector<CURL*> idle;

  CURL* take() {
    {
      const std::lock_guard lock(mutex);
      if (!idle.empty()) {
        CURL* handle = idle.back();
        idle.pop_back();
        return handle;
      }
    }
    CURL* handle = curl_easy_init();
    if (handle == nullptr) throw S3Unanswered("libcurl has no memory");
    return handle;
  }
  void put_back(CURL* handle) {
    curl_easy_reset(handle);
    const std::lock_guard lock(mutex);
    if (idle.size() < kKeptConnections)
      idle.push_back(handle);
    else
      curl_easy_cleanup(handle);
  }
};

S3Client::S3Client()
    : endpoint_(environment("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")),
      region_(environment("AWS_REGION", "AWS_DEFAULT_REGION")),
      key_id_(environment("AWS_ACCESS_KEY_ID")),
      secret_(environment("AWS_SECRET_ACCESS_KEY")),
      token_(environment("AWS_SESSION_TOKEN")),
      attempts_(number("AWS_MAX_ATTEMPTS", 10)),
      stall_seconds_(number("TESSERA_S3_STALL_SECONDS", 30)),
      connections_(std::make_unique<Connections>()) {
  static const CURLcode ready = curl_global_init(CURL_GLOBAL_DEFAULT);
  if (ready != CURLE_OK) throw std::runtime_error(std::string("libcurl: ") + curl_easy_strerror(ready));
  for (const auto& [name, value] : {std::pair("AWS_ACCESS_KEY_ID", &key_id_), {"AWS_SECRET_ACCESS_KEY", &secret_}})
    if (value->empty())
      throw std::invalid_argument(std::string("s3:// needs the environment variable ") + name + ", which is not set");
  if (region_.empty()) region_ = "us-east-1";
  while (endpoint_.ends_with('/')) endpoint_.pop_back();
}

S3Client::~S3Client() {
  for (CURL* handle : connections_->idle) curl_easy_cleanup(handle);
}

std::string S3Client::url(const S3Request& request) const {
  const auto& [bucket, key] = request.location;
  // For a bucket with dots, uses a path-style URL: TLS certificates do not cover host names with further dots.
  const bool by_path = !endpoint_.empty() || bucket.find('.') != std::string::npos;
  const std::string host = "s3." + region_ + ".amazonaws.com";
  std::string url = !endpoint_.empty() ? endpoint_ : "https://" + (by_path ? host : bucket + "." + host);
  if (by_path) url += "/" + percent_encoded(bucket, false);
  if (!key.empty()) url += "/" + percent_encoded(key, true);
  if (key.empty() && !by_path) url += "/";
  char separator = '?';
  for (const auto& [name, value] : request.query) {
    url += separator + percent_encoded(name, false) + "=" + percent_encoded(value, false);
    separator = '&';
  }
  return url;
}

// The curl handle and the headers of one attempt.
struct S3Client::Connection {
  explicit Connection(Connections& connections) : all(connections), handle(connections.take()) {}
  ~Connection() {
    curl_slist_free_all(headers);
    all.put_back(handle);
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  void add(const std::string& header) { headers = curl_slist_append(headers, header.c_str()); }

  Connections& all;
  CURL* const handle;
  curl_slist* headers = nullptr;
};

void S3Client::set_request(Connection& own, const S3Request& request) const {
  CURL* const handle = own.handle;
  const std::string where = url(request);
  curl_easy_setopt(handle, CURLOPT_URL, where.c_str());
  curl_easy_setopt(handle, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(handle, CURLOPT_CONNECTTIMEOUT, 15L);
  curl_easy_setopt(handle, CURLOPT_LOW_SPEED_LIMIT, 1L);
  // Allows more time for a POST, because the service may need minutes to assemble a large file from its parts.
  curl_easy_setopt(handle, CURLOPT_LOW_SPEED_TIME, request.method == "POST" ? 10 * stall_seconds_ : stall_seconds_);
  curl_easy_setopt(handle, CURLOPT_BUFFERSIZE, 512L << 10);
  curl_easy_setopt(handle, CURLOPT_AWS_SIGV4, ("aws:amz:" + region_ + ":s3").c_str());
  curl_easy_setopt(handle, CURLOPT_USERNAME, key_id_.c_str());
  curl_easy_setopt(handle, CURLOPT_PASSWORD, secret_.c_str());
  if (request.method == "PUT" || request.method == "POST") {
    curl_easy_setopt(handle, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request.body.size()));
    curl_easy_setopt(handle, CURLOPT_POSTFIELDS, request.body.empty() ? "" : request.body.data());
    own.add("Content-Type: application/octet-stream");
  }
  if (request.method == "HEAD")
    curl_easy_setopt(handle, CURLOPT_NOBODY, 1L);
  else
    curl_easy_setopt(handle, CURLOPT_CUSTOMREQUEST, request.method.c_str());
  if (!request.range.empty()) curl_easy_setopt(handle, CURLOPT_RANGE, request.range.c_str());
  // Does not hash the body: blocks have checksums, and https:// (if used) protects the rest.
  own.add(std::string("x-amz-content-sha256: ") + (request.body.empty() ? kEmptySha256 : "UNSIGNED-PAYLOAD"));
  if (!token_.empty()) own.add("x-amz-security-token: " + token_);
  curl_easy_setopt(handle, CURLOPT_HTTPHEADER, own.headers);
}

// Sends a request once. If the failure may be transient, sets `fault`. Throws S3Unanswered for other errors of curl.
S3Response S3Client::send_once(const S3Request& request, std::string& fault) const {
  Connection own(*connections_);
  CURL* const handle = own.handle;
  set_request(own, request);
  Answer answer{handle, &request, {}};
  curl_easy_setopt(handle, CURLOPT_WRITEFUNCTION, &take_body);
  curl_easy_setopt(handle, CURLOPT_WRITEDATA, &answer);
  curl_easy_setopt(handle, CURLOPT_HEADERFUNCTION, &take_header);
  curl_easy_setopt(handle, CURLOPT_HEADERDATA, &answer);
  char detail[CURL_ERROR_SIZE] = "";
  curl_easy_setopt(handle, CURLOPT_ERRORBUFFER, detail);
  const CURLcode code = curl_easy_perform(handle);
  curl_easy_setopt(handle, CURLOPT_ERRORBUFFER, nullptr);
  curl_easy_getinfo(handle, CURLINFO_RESPONSE_CODE, &answer.response.status);
  if (code != CURLE_OK) {
    const std::string reason = *detail != '\0' ? detail : curl_easy_strerror(code);
    // On a reused connection, the rest of the previous answer may come first. curl reports "HTTP/0.9"; a retry helps.
    long connections_made = 0;
    curl_easy_getinfo(handle, CURLINFO_NUM_CONNECTS, &connections_made);
    const bool is_left_over = code == CURLE_UNSUPPORTED_PROTOCOL && connections_made == 0;
    if (!may_pass(code) && !is_left_over) throw S3Unanswered(reason);
    fault = reason;
    return {};
  }
  S3Response& response = answer.response;
  // CompleteMultipartUpload may fail after the service sent status 200. The body then contains the error.
  if (response.status == 200 && request.method == "POST" && response.body.find("<Error>") != std::string::npos)
    response.status = 500;
  const long status = response.status;
  if (status == 408 || status == 429 || status >= 500 ||
      (status == 400 && response.body.find("RequestTimeout") != std::string::npos))
    fault = told(response);
  return std::move(response);
}

S3Response S3Client::send(const S3Request& request) const {
  thread_local std::minstd_rand random(std::random_device{}());
  auto pause = std::chrono::milliseconds(100);
  for (int attempt = 1;; ++attempt, pause = std::min(2 * pause, std::chrono::milliseconds(20000))) {
    std::string fault;
    S3Response response = send_once(request, fault);
    if (fault.empty()) {
      const bool is_outside = response.status == 416 && !request.range.empty();
      if (response.status / 100 == 2 || response.status == 404 || is_outside) return response;
      throw S3Unanswered(told(response));
    }
    if (attempt >= attempts_) throw S3Unanswered(fault + " (after " + std::to_string(attempt) + " attempts)");
    std::this_thread::sleep_for(pause * std::uniform_real_distribution<>(0.5, 1.0)(random));
  }
}

}  // namespace tessera::internal
