#include "server/gateway/kv_event_call.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "engine/kv/kv_events.h"
#include "server/gateway/gateway_common.pb.h"
#include "server/grpc/wire_format.h"

namespace treadle {
namespace {

using namespace smg::grpc::common;  // NOLINT: messages of this protocol alone

constexpr int64_t kTokensAtOnce = 32 << 10;  // in a message, less than 4 MiB

absl::Status MaySubscribe(const CallEnvironment& environment, const ApiKey* key, long others) {
  if (environment.stack.kv_events() == nullptr) {
    return Unimplemented(
        "SubscribeKvEvents: this server tells nobody what its prefix cache holds, expected one "
        "with --kv-events on");
  }
  if (key != nullptr && !key->terms().is_operator) {
    return absl::PermissionDeniedError(
        "SubscribeKvEvents shows what every owner asks, expected an operator's key");
  }
  if (others < kMaxKvSubscribers) return absl::OkStatus();
  return ResourceExhausted("SubscribeKvEvents: ", kMaxKvSubscribers,
                           " calls are under way, as many as there may be");
}

// The messages of one subscriber.
class KvEventStream {
 public:
  KvEventStream(KvEventLog& log, RequestPool& pool, int64_t page_size, uint64_t sequence_number)
      : log_(log), pool_(pool), page_size_(page_size), sequence_number_(sequence_number) {}

  bool Next(ByteBuffer& bytes) {
    const size_t most = static_cast<size_t>(std::max<int64_t>(1, kTokensAtOnce / page_size_));
    const KvEventLog::Part part = log_.Read(cursor_, most);
    if (log_.wanted()) pool_.Wake();
    if (!part.resync && part.events.empty()) return false;
    KvEventBatch batch;
    batch.set_sequence_number(++sequence_number_);
    batch.set_timestamp(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
    if (part.resync) New(batch).mutable_cleared();
    uint64_t last = 0;  // block that the batch's last event has stored
    for (const auto& event : part.events) {
      Add(*event, last, batch);
      last = event->ids.empty() ? 0 : event->hash;
    }
    bytes = Serialize(batch);
    return true;
  }

 private:
  KvCacheEvent& New(KvEventBatch& batch) {
    KvCacheEvent& event = *batch.add_events();
    event.set_event_id(++event_id_);
    return event;
  }

  // Goes on with the batch's last event where it can.
  void Add(const KvBlockEvent& event, uint64_t last, KvEventBatch& batch) {
    const int size = batch.events_size();
    KvCacheEvent* const before = size == 0 ? nullptr : batch.mutable_events(size - 1);
    if (event.ids.empty()) {
      KvCacheEvent& to = before && before->has_removed() ? *before : New(batch);
      to.mutable_removed()->add_block_hashes(std::bit_cast<int64_t>(event.hash));
      return;
    }
    const bool follows = last != 0 && event.parent == last;
    KvBlocksStored& stored = *(follows ? *before : New(batch)).mutable_stored();
    if (!follows && event.parent != 0) {
      stored.set_parent_block_hash(std::bit_cast<int64_t>(event.parent));
    }
    KvBlock& block = *stored.add_blocks();
    block.set_block_hash(std::bit_cast<int64_t>(event.hash));
    block.set_block_size(static_cast<int32_t>(page_size_));
    for (const int32_t id : event.ids) block.add_token_ids(static_cast<uint32_t>(id));
  }

  KvEventLog& log_;
  RequestPool& pool_;
  const int64_t page_size_;
  KvEventLog::Cursor cursor_;
  uint64_t sequence_number_;
  uint64_t event_id_ = 0;
};

}  // namespace

StreamReactor* StartSubscribeKvEvents(CallEnvironment& environment,
                                      const std::shared_ptr<void>& subscribers,
                                      const RpcContext& context, const ByteBuffer& request) {
  const SessionEnvironment& sessions = environment.sessions;
  const absl::StatusOr<std::shared_ptr<ApiKey>> key = sessions.Authorize(Authorization(context));
  if (!key.ok()) return StartFollow(environment, key.status(), {});
  const std::shared_ptr<void> own = subscribers;
  SubscribeKvEventsRequest message;
  absl::Status status = MaySubscribe(environment, key->get(), own.use_count() - 2);
  if (status.ok()) status = ParseShort(request, message);
  if (!status.ok()) return StartFollow(environment, sessions.refusals->Add(status), {});
  auto stream = std::make_shared<KvEventStream>(
      *environment.stack.kv_events(), environment.stack.pool(),
      environment.stack.model().paging.page_size, message.start_sequence_number());
  return StartFollow(environment, absl::OkStatus(),
                     [stream, own](ByteBuffer& bytes) { return stream->Next(bytes); });
}

}  // namespace treadle
