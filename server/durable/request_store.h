// Accepted requests and what was produced of them, on disk ahead of delivery, so that a client gets
// the rest of its stream after it was cut off, or the server was.
//
// A session accepts its request here, appends what the loop produced, and tells its client when
// that is written. A writer thread puts whatever waits into one transaction. A second thread brings
// it to the disk: at once for a request that was just accepted (its first piece is not told
// before), else every kSyncEvery. What a loss of power kept from the disk is computed again, and is
// the same.
//
// When the disk fails, or the files are deleted, new requests are refused. Accepted requests go on;
// a session that resumes one computes what was not written, or is damaged (request_journal.h),
// again.
//
// A request that is not attached to a session is kept for `keep`, and all of them take at most
// `space` bytes: then the oldest go first. Opening computes nothing, and begins every request's
// time anew.
//
// Thread safety: any thread; nothing waits for the disk but Open, Claim and the destructor.
// Callbacks come on the store's threads and must not block.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/background.h"
#include "base/sync.h"
#include "server/durable/request_journal.h"
#include "server/durable/stored_messages.h"
#include "server/observe/log_event.h"

namespace treadle {

class RequestStore {
 public:
  struct Options {
    std::string fingerprint;  // of the model: other models' requests cannot go on
    std::chrono::milliseconds keep{600'000};
    int64_t space = int64_t{1} << 30;
    LogSink log = [](const LogEvent&) {};
  };
  using Done = std::function<void(const absl::Status&)>;

  static constexpr std::chrono::milliseconds kSyncEvery{100};

  static absl::StatusOr<std::unique_ptr<RequestStore>> Open(std::unique_ptr<RequestJournal> journal,
                                                            Options options);
  // Writes and syncs what waits. No Stream may be left.
  ~RequestStore();

 private:
  struct Entry;

 public:
  // A request that is attached to a session; the destructor detaches it. Methods from one thread at
  // a time.
  class Stream {
   public:
    Stream(RequestStore& store, std::shared_ptr<Entry> entry);
    ~Stream();

    // Once, of a reserved id, and first. `failed` is called if it cannot be written; nothing is
    // stored then.
    void Accept(StoredRequest request, Done failed);
    // `done` comes once the piece may be told, after those of earlier pieces: ok, or why the
    // request was not accepted.
    void Append(const StreamBatch& piece, Done done);

   private:
    RequestStore& store_;
    const std::shared_ptr<Entry> entry_;
  };

  // A request's owner, and how to ask its session to let go of it because another call wants to
  // resume it.
  struct Holder {
    std::string id;
    std::string owner;
    std::function<void()> cut_off;
  };
  // For a new request. AlreadyExists; ResourceExhausted if those that cannot be dropped fill the
  // space.
  absl::StatusOr<std::unique_ptr<Stream>> Reserve(Holder holder) ABSL_LOCKS_EXCLUDED(mutex_);

  struct Resumed {
    StoredRequest request = {};
    StreamBatch answer = {};  // so far
    std::unique_ptr<Stream> stream;
  };
  // NotFound if no such request of this owner is stored; Aborted while it is attached to another
  // session, which was asked to let go; FailedPrecondition if this model cannot continue it;
  // DataLoss if it is damaged.
  absl::StatusOr<Resumed> Claim(Holder holder) ABSL_LOCKS_EXCLUDED(mutex_, journal_mutex_);

 private:
  using Clock = std::chrono::steady_clock;

  // Guarded by mutex_, but for `row`, which is constant.
  struct Entry {
    RequestJournal::Row row;
    int64_t bytes = 0;
    bool attached = true;
    uint64_t commit = 0;              // that has it; 0: an earlier process's, or kNotWritten
    absl::Status refused;             // why it was not accepted
    bool broken = false;              // a piece could not be written, and no further one is
    Clock::time_point detached = {};  // since when nobody has it
    std::function<void()> cut_off;
  };
  static constexpr uint64_t kNotWritten = ~uint64_t{0};
  // Owner and id: what one owner calls a request is nothing to another one.
  using Name = std::pair<std::string, std::string>;
  struct Write {
    std::shared_ptr<Entry> entry;
    std::string bytes;
    bool accept = false;
    Done done;
  };
  using Told = std::vector<std::pair<Done, absl::Status>>;  // who is told what, without the mutex
  using Entries = std::vector<std::shared_ptr<Entry>>;

  RequestStore(Options options, std::unique_ptr<RequestJournal> journal);
  void ReadRows() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Load(Entry& entry, Resumed& resumed) ABSL_LOCKS_EXCLUDED(journal_mutex_);
  void Enqueue(Write write) ABSL_LOCKS_EXCLUDED(mutex_);
  void Detach(Entry& entry) ABSL_LOCKS_EXCLUDED(mutex_);
  void Forget(const Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The writer's. Returns when to sweep next.
  Clock::time_point WriteQueue() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status WriteDown(const std::vector<Write>& writes) ABSL_LOCKS_EXCLUDED(journal_mutex_);
  void Drop(Entries entries) ABSL_LOCKS_EXCLUDED(mutex_, journal_mutex_);
  Told Conclude(std::vector<Write> writes, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  Entries TakeExpired() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The syncer's. Returns when to sync next.
  Clock::time_point Sync() ABSL_LOCKS_EXCLUDED(mutex_);
  Told ConcludeSync(uint64_t commit, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  void NoteHealth(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;

  Mutex journal_mutex_;  // of all that the journal does but Sync
  const std::unique_ptr<RequestJournal> journal_;

  Mutex mutex_;
  std::map<Name, std::shared_ptr<Entry>> entries_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_number_ ABSL_GUARDED_BY(mutex_) = 1;
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;            // of all entries
  std::vector<Write> queue_ ABSL_GUARDED_BY(mutex_);     // one for each session, and its acceptance
  std::vector<Write> unsynced_ ABSL_GUARDED_BY(mutex_);  // written; told once that is on the disk
  Entries accepted_ ABSL_GUARDED_BY(mutex_);             // whose acceptance is not on the disk yet
  Entries unwanted_ ABSL_GUARDED_BY(mutex_);             // forgotten, to be dropped
  uint64_t commits_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t synced_ ABSL_GUARDED_BY(mutex_) = 0;  // commits that are on the disk
  bool urgent_ ABSL_GUARDED_BY(mutex_) = false;  // among those that are not is an acceptance
  bool healthy_ ABSL_GUARDED_BY(mutex_) = true;  // the last write succeeded
  bool writer_ended_ ABSL_GUARDED_BY(mutex_) = false;

  Clock::time_point sweep_;                     // the writer's
  Clock::time_point next_sync_;                 // the syncer's
  std::optional<PulseThread> syncer_, writer_;  // last: they use the others
};

}  // namespace treadle
