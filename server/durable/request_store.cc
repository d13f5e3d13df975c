#include "server/durable/request_store.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "base/quoted.h"
#include "base/status.h"
#include "server/observe/refusals.h"

namespace treadle {
namespace {

constexpr std::chrono::seconds kSweepEvery{1};

void TellAll(const auto& told) {
  for (const auto& [done, status] : told) done(status);
}

}  // namespace

RequestStore::Stream::Stream(RequestStore& store, std::shared_ptr<Entry> entry)
    : store_(store), entry_(std::move(entry)) {}

RequestStore::Stream::~Stream() { store_.Detach(*entry_); }

void RequestStore::Stream::Accept(StoredRequest request, Done failed) {
  request.fingerprint = store_.options_.fingerprint;
  store_.Enqueue(
      {.entry = entry_, .bytes = ToBytes(request), .accept = true, .done = std::move(failed)});
}

void RequestStore::Stream::Append(const StreamBatch& piece, Done done) {
  store_.Enqueue({.entry = entry_, .bytes = ToBytes(piece), .done = std::move(done)});
}

absl::StatusOr<std::unique_ptr<RequestStore>> RequestStore::Open(
    std::unique_ptr<RequestJournal> journal, Options options) {
  std::unique_ptr<RequestStore> store(new RequestStore(std::move(options), std::move(journal)));
  store->ReadRows();
  store->sweep_ = Clock::now() + kSweepEvery;
  store->syncer_.emplace([store = store.get()] { return store->Sync(); });
  store->writer_.emplace([store = store.get()] { return store->WriteQueue(); });
  return store;
}

RequestStore::RequestStore(Options options, std::unique_ptr<RequestJournal> journal)
    : options_(std::move(options)), journal_(std::move(journal)) {}

RequestStore::~RequestStore() {
  writer_.reset();
  {
    MutexLock lock(mutex_);
    writer_ended_ = true;
  }
  syncer_->Nudge();
}

void RequestStore::ReadRows() {
  MutexLock lock(mutex_);
  next_number_ = journal_->next_number();
  for (RequestJournal::Row& row : journal_->Rows()) {
    auto entry = std::make_shared<Entry>();
    entry->bytes = row.bytes;
    entry->attached = false;
    entry->detached = Clock::now();
    entry->row = std::move(row);
    bytes_ += entry->bytes;
    auto& named = entries_[{entry->row.owner, entry->row.id}];
    // Two of one name: the earlier one was deleted, and the frame that said so is damaged.
    if (named != nullptr) {
      bytes_ -= named->bytes;
      unwanted_.push_back(std::move(named));
    }
    named = std::move(entry);
  }
  options_.log({.name = "durable_opened",
                .message = "stored requests, which can be resumed:",
                .fields = {{"requests", std::ssize(entries_)}, {"bytes", bytes_}},
                .text = LogEvent::Text::kMessageAndFields});
}

absl::StatusOr<std::unique_ptr<RequestStore::Stream>> RequestStore::Reserve(Holder holder) {
  MutexLock lock(mutex_);
  const Name name(holder.owner, holder.id);
  if (entries_.contains(name)) {
    return absl::AlreadyExistsError(
        Str("a request with the id ", Quoted(holder.id),
            " is stored (--durable), expected another id, or to resume that request"));
  }
  const auto droppable = [](const auto& each) { return !each.second->attached; };
  if (bytes_ >= options_.space && std::ranges::none_of(entries_, droppable)) {
    return Because(RefusalReason::kStorage,
                   ResourceExhausted("requests under way fill the space of stored ones: ", bytes_,
                                     " bytes, at most ", options_.space, " (--durable-space)"));
  }
  auto entry = std::make_shared<Entry>();
  entry->row = {.number = next_number_++, .id = holder.id, .owner = std::move(holder.owner)};
  entry->commit = kNotWritten;
  entry->cut_off = std::move(holder.cut_off);
  entries_[name] = entry;
  return std::make_unique<Stream>(*this, std::move(entry));
}

absl::StatusOr<RequestStore::Resumed> RequestStore::Claim(Holder holder) {
  std::shared_ptr<Entry> entry;
  std::function<void()> cut_off;
  bool taken;
  {
    MutexLock lock(mutex_);
    const auto found = entries_.find({holder.owner, holder.id});
    if (found == entries_.end()) {
      const int64_t seconds = options_.keep.count() / 1000;
      return NotFound("no request with the id ", Quoted(holder.id),
                      " is stored: it was not accepted, was another caller's, or ended more than ",
                      seconds, " s ago (--durable-keep)");
    }
    entry = found->second;
    taken = entry->attached || entry->commit == kNotWritten;
    if (taken) {
      cut_off = entry->cut_off;
    } else {
      entry->attached = true;
      entry->broken = false;  // what is written goes on from where it ends
      entry->cut_off = std::move(holder.cut_off);
    }
  }
  if (cut_off) cut_off();
  if (taken) {
    return absl::AbortedError(Str("the request ", Quoted(holder.id),
                                  " is still another call's, which was told to let go of it"));
  }
  Resumed resumed{.stream = std::make_unique<Stream>(*this, entry)};
  const absl::Status status = Load(*entry, resumed);
  if (absl::IsNotFound(status)) {  // its files were deleted
    MutexLock lock(mutex_);
    Forget(*entry);
  }
  if (absl::IsUnavailable(status) || absl::IsDataLoss(status)) {
    return Because(RefusalReason::kStorage, status);
  }
  TREADLE_RETURN_IF_ERROR(status);
  return resumed;
}

absl::Status RequestStore::Load(Entry& entry, Resumed& resumed) {
  MutexLock lock(journal_mutex_);
  TREADLE_ASSIGN_OR_RETURN(const std::string bytes, journal_->Request(entry.row.number));
  TREADLE_ASSIGN_OR_RETURN(resumed.request, RequestFromBytes(bytes));
  resumed.request.id = entry.row.id;
  resumed.request.owner = entry.row.owner;
  if (resumed.request.fingerprint != options_.fingerprint) {
    return absl::FailedPreconditionError(
        Str("the request ", Quoted(entry.row.id), " was accepted by a server of ",
            resumed.request.fingerprint, ", this one is ", options_.fingerprint,
            ": another model or version cannot continue it exactly"));
  }
  return journal_->ForEachPiece(
      entry.row.number, [&](std::string_view piece) { return AddPiece(piece, resumed.answer); });
}

void RequestStore::Enqueue(Write write) {
  MutexLock lock(mutex_);
  if (!write.entry->broken && !write.bytes.empty()) {
    const int64_t bytes = std::ssize(write.bytes) + int64_t{kFrameBytes};
    write.entry->bytes += bytes;
    bytes_ += bytes;
  }
  queue_.push_back(std::move(write));
  if (queue_.size() == 1) writer_->Nudge();
}

void RequestStore::Detach(Entry& entry) {
  MutexLock lock(mutex_);
  entry.attached = false;
  entry.cut_off = {};
  entry.detached = Clock::now();
  if (entry.bytes == 0) Forget(entry);  // it was never accepted
}

void RequestStore::Forget(const Entry& entry) {
  const auto found = entries_.find({entry.row.owner, entry.row.id});
  if (found == entries_.end() || found->second.get() != &entry) return;
  bytes_ -= entry.bytes;
  entries_.erase(found);
}

// The writer.

RequestStore::Clock::time_point RequestStore::WriteQueue() {
  std::vector<Write> writes;
  std::optional<Entries> dropped;
  {
    MutexLock lock(mutex_);
    writes.swap(queue_);
    // Nothing is written behind a gap, nor of what was not accepted.
    for (Write& write : writes) {
      if (write.entry->broken || !write.entry->refused.ok()) write.bytes.clear();
    }
    if (Clock::now() >= sweep_ || bytes_ > options_.space) {
      sweep_ = Clock::now() + kSweepEvery;
      dropped = TakeExpired();
    }
  }
  if (!writes.empty()) {
    const absl::Status status = WriteDown(writes);
    TellAll(Conclude(std::move(writes), status));
  }
  if (dropped) Drop(*std::move(dropped));
  return sweep_;
}

absl::Status RequestStore::WriteDown(const std::vector<Write>& writes) {
  MutexLock lock(journal_mutex_);
  const auto write_all = [&]() -> absl::Status {
    TREADLE_RETURN_IF_ERROR(journal_->Begin());
    for (const Write& write : writes) {
      if (write.bytes.empty()) continue;
      const RequestJournal::Row& row = write.entry->row;
      if (write.accept) {
        journal_->Insert(row, write.bytes);
      } else {
        journal_->Append(row.number, write.bytes);
      }
    }
    return journal_->Commit();
  };
  const absl::Status status = write_all();
  if (!status.ok()) journal_->Rollback();
  return status;
}

RequestStore::Told RequestStore::Conclude(std::vector<Write> writes, const absl::Status& status) {
  Told told;
  MutexLock lock(mutex_);
  NoteHealth(status);
  ++commits_;
  for (Write& write : writes) {
    Entry& entry = *write.entry;
    if (write.accept && status.ok()) {
      entry.commit = commits_;
      accepted_.push_back(write.entry);
      urgent_ = true;
    } else if (write.accept) {
      entry.refused = status;
      Forget(entry);
      told.emplace_back(std::move(write.done), status);
    } else {
      if (!status.ok()) entry.broken = true;
      if (entry.refused.ok() && entry.commit > synced_) {
        unsynced_.push_back(std::move(write));
      } else {
        told.emplace_back(std::move(write.done), entry.refused);
      }
    }
  }
  if (urgent_ || commits_ == synced_ + 1) syncer_->Nudge();
  return told;
}

RequestStore::Entries RequestStore::TakeExpired() {
  Entries detached;
  for (const auto& [name, entry] : entries_) {
    if (!entry->attached) detached.push_back(entry);
  }
  std::ranges::sort(detached, {}, [](const auto& entry) { return entry->detached; });
  Entries expired = std::exchange(unwanted_, {});
  const Clock::time_point latest = Clock::now() - options_.keep;
  for (auto& entry : detached) {
    if (entry->detached > latest && bytes_ <= options_.space) break;
    Forget(*entry);
    expired.push_back(std::move(entry));
  }
  return expired;
}

// Called where there is nothing to drop, too: a commit looks after the files.
void RequestStore::Drop(Entries entries) {
  absl::Status status;
  {
    MutexLock lock(journal_mutex_);
    status = journal_->Begin();
    if (status.ok()) {
      for (const auto& entry : entries) journal_->Delete(entry->row.number);
      status = journal_->Commit();
    }
    if (!status.ok()) journal_->Rollback();
  }
  if (status.ok()) return;
  MutexLock lock(mutex_);
  NoteHealth(status);
  std::ranges::move(entries, std::back_inserter(unwanted_));  // another try
}

// The syncer.

RequestStore::Clock::time_point RequestStore::Sync() {
  uint64_t commit;
  {
    MutexLock lock(mutex_);
    if (commits_ == synced_) return PulseThread::kNever;
    if (!urgent_ && !writer_ended_ && Clock::now() < next_sync_) return next_sync_;
    commit = commits_;
    urgent_ = false;
  }
  next_sync_ = Clock::now() + kSyncEvery;
  TellAll(ConcludeSync(commit, journal_->Sync()));
  return next_sync_;
}

RequestStore::Told RequestStore::ConcludeSync(uint64_t commit, const absl::Status& status) {
  Told told;
  MutexLock lock(mutex_);
  synced_ = commit;
  if (!status.ok()) NoteHealth(status);
  // A request without a piece is refused, too: its first piece will tell.
  for (std::shared_ptr<Entry>& entry : std::exchange(accepted_, {})) {
    if (entry->commit > commit) {
      accepted_.push_back(std::move(entry));
    } else if (!status.ok()) {
      entry->refused = status;
      Forget(*entry);
      unwanted_.push_back(std::move(entry));
    }
  }
  std::vector<Write> later;
  for (Write& write : unsynced_) {
    Entry& entry = *write.entry;
    if (entry.commit > commit) {
      later.push_back(std::move(write));
      continue;
    }
    told.emplace_back(std::move(write.done), entry.refused);
  }
  unsynced_ = std::move(later);
  return told;
}

void RequestStore::NoteHealth(const absl::Status& status) {
  if (std::exchange(healthy_, status.ok()) == status.ok()) return;
  if (status.ok()) {
    options_.log({.name = "durable_resumed", .message = "requests are stored again"});
  } else {
    options_.log(
        {.severity = Severity::kError,
         .name = "durable_failed",
         .message = Str("requests cannot be stored, new ones are refused: ", status.message())});
  }
}

}  // namespace treadle
