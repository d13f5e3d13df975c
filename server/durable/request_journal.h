// The files of stored requests: FOLDER/requests-NNNNNNNN.log, segments of a log that is only
// appended to (stored_frame.h), and FOLDER/lock, which the process that has the folder holds, and
// which has the store's id, too.
//
// Data that Commit has taken survives the end of the process; after Sync, that of the machine,
// too. The files are this process's alone while they are open, and their user's alone. Opening
// begins a new segment, as does one that is full; the oldest is deleted once no frame in it is
// needed. A frame is needed while its request is stored; where too few are, they are copied to the
// end. Memory has 8 bytes for each piece.
//
// Damage: every frame is verified when the folder is opened, and again whenever it is read. Damaged
// bytes are skipped up to the next whole frame. An answer ends where its first piece is missing;
// the log (a warning) says how many bytes were lost, and which requests lost something that is not
// the end of their answer. A request of which only the answer is damaged can go on.
//
// Files that are deleted, moved or replaced: Commit and Sync fail with Unavailable if the path of
// what they wrote no longer names it. The next Begin reads the folder again, makes it anew if it is
// missing, and forgets what is not there.
//
// Thread safety: Sync from any thread; all else from one at a time. Errors of the disk are
// Unavailable and name the file and the reason.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync.h"
#include "server/durable/damage_report.h"
#include "server/durable/named_file.h"
#include "server/durable/request_record.h"
#include "server/durable/stored_frame.h"
#include "server/observe/log_event.h"

namespace treadle {

class RequestJournal {
 public:
  struct Options {
    LogSink log = [](const LogEvent&) {};
    uint64_t segment_bytes = 16 << 20;
  };
  // Creates the folder and the files where they are missing. FailedPrecondition if another process
  // has the folder, or a program with another format wrote it.
  static absl::StatusOr<std::unique_ptr<RequestJournal>> Open(const std::string& folder,
                                                              Options options);

  struct Row {
    uint64_t number = 0;
    std::string id;
    std::string owner;
    int64_t bytes = 0;  // of its frames; Insert does not read it
  };
  std::vector<Row> Rows() const;  // by number
  // A number that was never a request's.
  uint64_t next_number() const { return next_number_; }

  // Begin, what belongs together, Commit or Rollback. Commit fails as a whole. It also deletes and
  // copies segments.
  absl::Status Begin();
  absl::Status Commit();
  void Rollback();

  void Insert(const Row& row, std::string_view request);
  // Nothing happens if the request was lost, or if its files were replaced since it was last read:
  // what is behind a gap is not stored.
  void Append(uint64_t number, std::string_view piece);
  void Delete(uint64_t number);

  // NotFound if it is not stored, DataLoss if it is damaged. Unavailable, here and below, if a file
  // that is there cannot be opened now.
  absl::StatusOr<std::string> Request(uint64_t number);
  // In order, up to the first that is damaged: that and what is behind it is dropped, and what is
  // appended next comes in its place.
  absl::Status ForEachPiece(uint64_t number,
                            const std::function<absl::Status(std::string_view)>& take);

  // Puts all that was committed before on the disk, in files that have their names.
  absl::Status Sync() ABSL_LOCKS_EXCLUDED(unsynced_mutex_);

 private:
  struct Segment {
    uint64_t bytes = 0;
    uint64_t needed = 0;  // frames
  };
  struct Written {
    uint64_t number = 0;
    int64_t bytes = 0;
  };
  class Reader;

  RequestJournal(std::string folder, Options options)
      : folder_(std::move(folder)), options_(std::move(options)) {}
  std::string PathOf(uint64_t segment) const;

  // Reads the folder.
  absl::Status Load();
  absl::Status TakeLock();
  absl::StatusOr<std::vector<uint64_t>> ListSegments();
  absl::Status ChooseStore(const std::vector<uint64_t>& segments);
  absl::Status ReadSegment(uint64_t segment, bool last, DamageReport& damage);
  void Take(const Frame& frame, FramePlace place);
  void Settle(DamageReport& damage);
  // The frame at `index`, and with it all behind, is gone.
  void Lose(uint64_t number, uint32_t index, DamageReport& damage);

  absl::Status BeginSegment() ABSL_LOCKS_EXCLUDED(unsynced_mutex_);
  void Write(uint64_t number, RequestRecord& record, std::string_view payload);
  absl::Status WritePending();
  void Collect();
  void CopyOldest();

  const std::string folder_;
  const Options options_;

  uint64_t store_ = 0;  // its id; 0: not known yet
  uint64_t next_number_ = 1;
  bool loaded_ = false;                        // what follows is what the folder has
  std::shared_ptr<NamedFile> lock_, current_;  // null: to be opened
  std::map<uint64_t, Segment> segments_;       // by number; the last one is written
  uint64_t last_segment_ = 0;                  // the highest number there was
  std::map<uint64_t, RequestRecord> records_;  // by number
  int64_t needed_bytes_ = 0;                   // of their frames, at most
  std::set<uint64_t> gone_;  // requests that were deleted; empty but while the folder is read

  std::string pending_;           // frames between Begin and Commit
  std::vector<Written> written_;  // the frames of requests among them
  std::vector<uint64_t> deleted_;

  Mutex unsynced_mutex_;
  std::vector<std::shared_ptr<NamedFile>> unsynced_ ABSL_GUARDED_BY(unsynced_mutex_);
};

}  // namespace treadle
