// Answers of /v1/responses that their owners may ask for again, or go on from. In memory: bounded
// in bytes and in age, the oldest go first.
//
// Thread safety: all methods, from any thread; none waits.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/sync.h"
#include "models/text/jinja/chat_template.h"
#include "scheduler/request/request.h"

namespace treadle {

struct KeptResponse {
  std::string id;
  std::string owner;                  // of the key that asked; empty: everybody may call
  std::string body;                   // as it was answered
  std::vector<ChatMessage> messages;  // the conversation with the answer, without instructions
  Clock::time_point kept_at = {};
};

class ResponseStore {
 public:
  struct Limits {
    size_t bytes = 64 << 20;
    Clock::duration age = std::chrono::hours(24);
  };
  explicit ResponseStore(Limits limits) : limits_(limits) {}

  // One that is larger than all room is not kept.
  void Keep(KeptResponse response) ABSL_LOCKS_EXCLUDED(mutex_);
  // Null: there is none, or it is another owner's.
  std::shared_ptr<const KeptResponse> Find(const std::string& id, const std::string& owner,
                                           Clock::time_point now) ABSL_LOCKS_EXCLUDED(mutex_);
  // False: there was none, or it is another owner's.
  bool Delete(const std::string& id, const std::string& owner, Clock::time_point now)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Kept = std::list<std::shared_ptr<const KeptResponse>>;
  // Lets go what is too old, and, for `room` more bytes, the oldest.
  void Shrink(size_t room, Clock::time_point now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Drop(Kept::iterator response) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Kept::iterator Place(const std::string& id, const std::string& owner, Clock::time_point now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Limits limits_;
  Mutex mutex_;
  Kept kept_ ABSL_GUARDED_BY(mutex_);  // the oldest first
  std::map<std::string, Kept::iterator> by_id_ ABSL_GUARDED_BY(mutex_);
  size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace treadle
