// API keys, or the tokens of scrapers: who may call, and how much. Read from a file, one per line:
//
//   KEY [NAME [REQUESTS_PER_MINUTE [TOKENS_PER_MINUTE [operator] [weight=N]]]]      # comment
//
// "-" is no name or no limit, 0 suspends the key. Keys of one name are one owner's: a new key
// beside or instead of an old one has what the old one asked for. A key without a name is an owner
// of its own, wherever its line stands. An operator sees all owners' names and request ids in the
// ledger, and may follow what is cached. Under --policy fair-share an owner gets N times the tokens
// of one with weight 1; where its keys differ, that of its latest request. A change of the file is
// taken over within a second or two; a file that cannot be read then is reported, and the keys stay
// as they were.
//
// Only SHA-256 digests are kept, and each lookup compares with all of them in constant time. No
// message contains a key. Limits are token buckets of one minute's capacity: a call needs one
// request and some tokens left, before it is read; a prompt is charged when its length is known,
// what was generated at the end, which may leave a debt.
//
// Thread safety: all methods from any thread.
#pragma once

#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync.h"
#include "server/access/file_watcher.h"
#include "server/observe/log_event.h"

namespace treadle {

class ApiKey {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  struct Terms {
    std::string name;                                   // for logs and messages
    std::string owner;                                  // tells owners apart; not a secret
    static std::string NameOf(std::string_view owner);  // an owner's `name`
    std::optional<double> requests;                     // per minute; unset: no limit
    std::optional<double> tokens;
    bool is_operator = false;
    double weight = 1;
  };

  ApiKey(Terms terms, TimePoint now);

  void Change(Terms terms) ABSL_LOCKS_EXCLUDED(mutex_);
  Terms terms() const ABSL_LOCKS_EXCLUDED(mutex_);
  // PermissionDenied if the key is suspended.
  absl::Status Check() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes one request; ResourceExhausted says which limit is used up.
  absl::Status Admit(TimePoint now) ABSL_LOCKS_EXCLUDED(mutex_);
  void Charge(int64_t tokens) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Refill(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  Terms terms_ ABSL_GUARDED_BY(mutex_);
  double requests_ ABSL_GUARDED_BY(mutex_);  // left
  double tokens_ ABSL_GUARDED_BY(mutex_);
  TimePoint refilled_ ABSL_GUARDED_BY(mutex_);
};

class ApiKeys {
 public:
  // Errors name `flag`, the file, the line and what was expected, never what was found.
  static absl::StatusOr<std::unique_ptr<ApiKeys>> Open(const std::string& path, LogSink log,
                                                       std::string flag = "--api-keys-file");

  // `authorization`: "Bearer KEY", as in the header. Unauthenticated if it is missing or of nobody,
  // PermissionDenied if the key is suspended.
  absl::StatusOr<std::shared_ptr<ApiKey>> Find(std::string_view authorization) const
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Digest = std::array<unsigned char, 32>;

  ApiKeys(std::string path, LogSink log, std::string flag)
      : path_(std::move(path)), log_(std::move(log)), flag_(std::move(flag)) {}
  static Digest DigestOf(std::string_view key);
  absl::Status Take(const FileWatcher::Content& content) ABSL_LOCKS_EXCLUDED(mutex_);
  void Tell(const absl::Status& read) const ABSL_LOCKS_EXCLUDED(mutex_);

  const std::string path_;
  const LogSink log_;
  const std::string flag_;
  mutable Mutex mutex_;
  std::map<Digest, std::shared_ptr<ApiKey>> keys_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<FileWatcher> watcher_;  // last
};

// The first key of a file of that format, for a client.
absl::StatusOr<std::string> ReadFirstKey(const std::string& path);

}  // namespace treadle
