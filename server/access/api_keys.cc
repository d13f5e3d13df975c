#include "server/access/api_keys.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <utility>
#include <vector>

#include "base/number.h"
#include "base/status.h"
#include "server/observe/refusals.h"

namespace treadle {
namespace {

constexpr size_t kMinKey = 16;
constexpr size_t kMaxKey = 512;
constexpr double kMaxPerMinute = 1e12;
constexpr char kOperator[] = "operator";
constexpr std::string_view kWeight = "weight=";
constexpr double kMinWeight = 0.001;
constexpr double kMaxWeight = 1000;
constexpr size_t kShownDigits = 8;                                // of a digest, as a name
constexpr std::string_view kNamed = "name ", kNameless = "key ";  // begin an owner

absl::StatusOr<std::optional<double>> ParseLimit(const std::string& text) {
  if (text.empty() || text == "-") return std::optional<double>();
  const std::optional<int64_t> value = NumberIn<int64_t>(text);
  if (value && *value >= 0 && *value <= kMaxPerMinute) return static_cast<double>(*value);
  return InvalidArgument("limit is '", text, "', expected a whole number per minute, or -");
}

// The words of a line, without its comment.
std::vector<std::string> WordsOf(const std::string& line) {
  std::istringstream in(line.substr(0, line.find('#')));
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

// The terms that a line gives its key. `words`: the line's, at least one; `digest`: the key's, in
// hexadecimal digits.
absl::StatusOr<ApiKey::Terms> ParseTerms(std::vector<std::string> words,
                                         const std::string& digest) {
  const size_t length = words[0].size();
  if (length < kMinKey || length > kMaxKey) {
    return InvalidArgument("a key has ", length, " characters, expected ", kMinKey, " to ",
                           kMaxKey);
  }
  ApiKey::Terms terms;
  for (size_t i = 4; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == kOperator) {
      terms.is_operator = true;
    } else if (word.starts_with(kWeight)) {
      const auto weight = NumberIn<double>(word.substr(kWeight.size()));
      if (!weight || !(*weight >= kMinWeight && *weight <= kMaxWeight)) {
        return InvalidArgument("weight is '", word.substr(kWeight.size()),
                               "', expected a number from ", kMinWeight, " to ", kMaxWeight);
      }
      terms.weight = *weight;
    } else {
      return InvalidArgument(
          "there are ", words.size(),
          " words, expected: key [name [requests/min [tokens/min [operator] [weight=N]]]]");
    }
  }
  words.resize(4);
  const bool named = !words[1].empty() && words[1] != "-";
  terms.owner = named ? Str(kNamed, words[1]) : Str(kNameless, digest);
  terms.name = ApiKey::Terms::NameOf(terms.owner);
  TREADLE_ASSIGN_OR_RETURN(terms.requests, ParseLimit(words[2]));
  TREADLE_ASSIGN_OR_RETURN(terms.tokens, ParseLimit(words[3]));
  return terms;
}

}  // namespace

std::string ApiKey::Terms::NameOf(std::string_view owner) {
  if (owner.starts_with(kNamed)) return std::string(owner.substr(kNamed.size()));
  if (!owner.starts_with(kNameless)) return "";
  return Str("key-", owner.substr(kNameless.size(), kShownDigits));
}

ApiKey::ApiKey(Terms terms, TimePoint now)
    : terms_(std::move(terms)),
      requests_(terms_.requests.value_or(0)),
      tokens_(terms_.tokens.value_or(0)),
      refilled_(now) {}

void ApiKey::Change(Terms terms) {
  MutexLock lock(mutex_);
  if (terms.requests && !terms_.requests) requests_ = *terms.requests;
  if (terms.tokens && !terms_.tokens) tokens_ = *terms.tokens;
  terms_ = std::move(terms);
}

ApiKey::Terms ApiKey::terms() const {
  MutexLock lock(mutex_);
  return terms_;
}

absl::Status ApiKey::Check() const {
  MutexLock lock(mutex_);
  if (terms_.requests != 0.0 && terms_.tokens != 0.0) return absl::OkStatus();
  return absl::PermissionDeniedError(Str("the API key '", terms_.name, "' is suspended"));
}

void ApiKey::Refill(TimePoint now) {
  const double minutes = std::chrono::duration<double, std::ratio<60>>(now - refilled_).count();
  refilled_ = now;
  const auto refill = [&](double& left, const std::optional<double>& limit) {
    if (limit) left = std::min(left + *limit * minutes, *limit);
  };
  refill(requests_, terms_.requests);
  refill(tokens_, terms_.tokens);
}

absl::Status ApiKey::Admit(TimePoint now) {
  MutexLock lock(mutex_);
  Refill(now);
  const std::string& name = terms_.name;
  const auto used_up = [&name](double limit, const char* what) {
    return Because(RefusalReason::kRateLimited,
                   ResourceExhausted("the API key '", name, "' has used up its ",
                                     static_cast<int64_t>(limit), " ", what, " per minute"));
  };
  if (terms_.requests && requests_ < 1) return used_up(*terms_.requests, "requests");
  if (terms_.tokens && tokens_ <= 0) return used_up(*terms_.tokens, "tokens");
  if (terms_.requests) requests_ -= 1;
  return absl::OkStatus();
}

void ApiKey::Charge(int64_t tokens) {
  MutexLock lock(mutex_);
  if (terms_.tokens) tokens_ -= static_cast<double>(tokens);
}

ApiKeys::Digest ApiKeys::DigestOf(std::string_view key) {
  Digest digest;
  SHA256(reinterpret_cast<const unsigned char*>(key.data()), key.size(), digest.data());
  return digest;
}

absl::Status ApiKeys::Take(const FileWatcher::Content& content) {
  if (!content.ok()) {
    return InvalidArgument(flag_, ": cannot read ", path_, ": ", content.status().message());
  }
  std::istringstream file(*content);
  std::map<Digest, ApiKey::Terms> lines;
  std::string text;
  for (size_t number = 1; std::getline(file, text); ++number) {
    const std::vector<std::string> words = WordsOf(text);
    if (words.empty()) continue;
    const Digest digest = DigestOf(words[0]);
    std::string digits;
    for (const unsigned char byte : digest) digits += Str(std::hex, byte / 16, byte % 16);
    auto terms = ParseTerms(words, digits);
    if (terms.ok() && !lines.try_emplace(digest, *terms).second) {
      terms = InvalidArgument("the key is there twice");
    }
    if (!terms.ok()) {
      return InvalidArgument(flag_, ": ", path_, " line ", number, ": ", terms.status().message());
    }
  }
  if (lines.empty()) return InvalidArgument(flag_, ": ", path_, " has no key");

  const auto now = ApiKey::TimePoint::clock::now();
  std::map<Digest, std::shared_ptr<ApiKey>> keys;
  MutexLock lock(mutex_);
  for (auto& [digest, terms] : lines) {
    const auto known = keys_.find(digest);
    if (known == keys_.end()) {
      keys.emplace(digest, std::make_shared<ApiKey>(std::move(terms), now));
    } else {
      known->second->Change(std::move(terms));  // what it has used stays used
      keys.insert(*known);
    }
  }
  keys_ = std::move(keys);
  return absl::OkStatus();
}

void ApiKeys::Tell(const absl::Status& read) const {
  if (!read.ok()) {
    log_({.severity = Severity::kWarning,
          .name = "keys_reload_failed",
          .message = Str(read.message(), "; the keys stay as they were"),
          .fields = {{"file", path_}}});
    return;
  }
  int64_t count = 0;
  {
    MutexLock lock(mutex_);
    count = static_cast<int64_t>(keys_.size());
  }
  log_({.name = "keys_reloaded",
        .message = Str(flag_, ": read ", path_, " anew, keys: ", count),
        .fields = {{"file", path_}, {"keys", count}}});
}

absl::StatusOr<std::unique_ptr<ApiKeys>> ApiKeys::Open(const std::string& path, LogSink log,
                                                       std::string flag) {
  std::unique_ptr<ApiKeys> keys(new ApiKeys(path, std::move(log), std::move(flag)));
  ApiKeys* const self = keys.get();
  const auto take = [self](const std::vector<FileWatcher::Content>& contents) {
    return self->Take(contents[0]);
  };
  TREADLE_ASSIGN_OR_RETURN(
      keys->watcher_,
      FileWatcher::Open({path}, take, [self](const absl::Status& taken) { self->Tell(taken); }));
  return keys;
}

absl::StatusOr<std::shared_ptr<ApiKey>> ApiKeys::Find(std::string_view authorization) const {
  constexpr std::string_view kScheme = "Bearer ";
  if (!authorization.starts_with(kScheme)) {
    return absl::UnauthenticatedError(
        "no API key: expected the metadata 'authorization: Bearer KEY'");
  }
  const Digest digest = DigestOf(authorization.substr(kScheme.size()));
  std::shared_ptr<ApiKey> found;
  {
    MutexLock lock(mutex_);
    for (const auto& [other, key] : keys_) {  // all of them, always
      if (CRYPTO_memcmp(other.data(), digest.data(), digest.size()) == 0) found = key;
    }
  }
  if (!found) return absl::UnauthenticatedError("the API key is not known here");
  TREADLE_RETURN_IF_ERROR(found->Check());
  return found;
}

absl::StatusOr<std::string> ReadFirstKey(const std::string& path) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> words = WordsOf(line);
    if (!words.empty()) return words[0];
  }
  return InvalidArgument("--api-key-file: ", path,
                         file.bad() || !file.eof() ? " cannot be read" : " has no key");
}

}  // namespace treadle
