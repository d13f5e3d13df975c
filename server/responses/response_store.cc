#include "server/responses/response_store.h"

#include <utility>

namespace treadle {
namespace {

size_t BytesOf(const KeptResponse& response) {
  size_t bytes = sizeof(KeptResponse) + 2 * response.id.size() + response.body.size();
  for (const ChatMessage& message : response.messages) {
    bytes += sizeof(ChatMessage) + message.content.value_or("").size() + message.name.size() +
             message.reasoning.size();
    for (const ToolCall& call : message.tool_calls) {
      bytes += sizeof(ToolCall) + call.id.size() + call.name.size() + call.arguments.size();
    }
  }
  return bytes;
}

}  // namespace

void ResponseStore::Keep(KeptResponse response) {
  const size_t bytes = BytesOf(response);
  if (bytes > limits_.bytes) return;
  MutexLock lock(mutex_);
  Shrink(bytes, response.kept_at);
  const std::string id = response.id;
  kept_.push_back(std::make_shared<const KeptResponse>(std::move(response)));
  by_id_[id] = std::prev(kept_.end());
  bytes_ += bytes;
}

std::shared_ptr<const KeptResponse> ResponseStore::Find(const std::string& id,
                                                        const std::string& owner,
                                                        Clock::time_point now) {
  MutexLock lock(mutex_);
  const auto place = Place(id, owner, now);
  return place == kept_.end() ? nullptr : *place;
}

bool ResponseStore::Delete(const std::string& id, const std::string& owner, Clock::time_point now) {
  MutexLock lock(mutex_);
  const auto place = Place(id, owner, now);
  if (place == kept_.end()) return false;
  Drop(place);
  return true;
}

ResponseStore::Kept::iterator ResponseStore::Place(const std::string& id, const std::string& owner,
                                                   Clock::time_point now) {
  Shrink(0, now);
  const auto found = by_id_.find(id);
  const bool there = found != by_id_.end() && (*found->second)->owner == owner;
  return there ? found->second : kept_.end();
}

void ResponseStore::Shrink(size_t room, Clock::time_point now) {
  while (!kept_.empty() &&
         (bytes_ + room > limits_.bytes || now - kept_.front()->kept_at >= limits_.age)) {
    Drop(kept_.begin());
  }
}

void ResponseStore::Drop(Kept::iterator response) {
  bytes_ -= BytesOf(**response);
  by_id_.erase((*response)->id);
  kept_.erase(response);
}

}  // namespace treadle
