#include "server/durable/request_journal.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <optional>

#include "base/mapped_file.h"
#include "base/quoted.h"
#include "base/status.h"

namespace treadle {
namespace {

std::string HeadOf(const std::string& id, const std::string& owner) {
  const auto bytes = static_cast<uint32_t>(id.size());
  return std::string(reinterpret_cast<const char*>(&bytes), sizeof bytes) + id + owner;
}

// Null if the file is gone or empty: its frames are lost. Unavailable if it may be read later.
absl::StatusOr<std::unique_ptr<MappedFile>> OpenThere(const std::string& path) {
  auto file = MappedFile::Open(path);
  if (file.ok()) return file;
  struct stat info {};
  if ((stat(path.c_str(), &info) != 0 && errno == ENOENT) || absl::IsInvalidArgument(file.status()))
    return nullptr;
  return absl::UnavailableError(file.status().message());
}

}  // namespace

// Frames of one segment after another.
class RequestJournal::Reader {
 public:
  explicit Reader(const RequestJournal& journal) : journal_(journal) {}

  // Valid until the next. Nothing if it is damaged.
  absl::StatusOr<std::optional<Frame>> Read(uint64_t number, const RequestRecord& record,
                                            uint32_t index) {
    const FramePlace place = record.frames[index];
    if (place.segment != segment_) {
      segment_ = place.segment;
      auto file = OpenThere(journal_.PathOf(segment_));
      if (!file.ok()) {
        segment_ = 0;
        return file.status();
      }
      file_ = *std::move(file);
    }
    if (file_ == nullptr) return std::nullopt;
    std::optional<Frame> frame = FrameAt(journal_.store_, file_->text(), place.at);
    const bool same = frame && frame->number == number && frame->index == index &&
                      frame->attempt == record.AttemptOf(index);
    if (!same) frame.reset();
    return frame;
  }

 private:
  const RequestJournal& journal_;
  uint64_t segment_ = 0;
  std::unique_ptr<MappedFile> file_;
};

// Reading.

void RequestJournal::Lose(uint64_t number, uint32_t index, DamageReport& damage) {
  RequestRecord& record = records_.at(number);
  for (size_t i = index; i < record.frames.size(); ++i) {
    if (record.frames[i].segment != 0) --segments_[record.frames[i].segment].needed;
  }
  if (index >= kFirstPiece) {
    damage.cut.push_back(Str(Quoted(record.id), " from piece ", index - kFirstPiece + 1));
    record.Cut(index, static_cast<uint32_t>(last_segment_ + 1));
  } else if (index == kRequest) {
    damage.lost.push_back(Quoted(record.id));
    record.frames.resize(kRequest);
  } else {
    damage.lost.push_back(Str("request number ", number));
    needed_bytes_ -= record.bytes;
    records_.erase(number);
  }
}

std::vector<RequestJournal::Row> RequestJournal::Rows() const {
  std::vector<Row> rows;
  for (const auto& [number, record] : records_) {
    rows.push_back({number, record.id, record.owner, record.bytes});
  }
  return rows;
}

absl::StatusOr<std::string> RequestJournal::Request(uint64_t number) {
  const auto found = records_.find(number);
  if (found == records_.end()) return NotFound("the request was lost with the files it was in");
  const RequestRecord& record = found->second;
  if (record.frames.size() > kRequest) {
    Reader reader(*this);
    TREADLE_ASSIGN_OR_RETURN(const std::optional<Frame> frame,
                             reader.Read(number, record, kRequest));
    if (frame) return std::string(frame->payload);
    DamageReport damage;
    Lose(number, kRequest, damage);
    damage.Tell(options_.log);
  }
  return absl::DataLossError(Str("what is stored of the request ", Quoted(record.id),
                                 " is damaged: it cannot be resumed"));
}

absl::Status RequestJournal::ForEachPiece(
    uint64_t number, const std::function<absl::Status(std::string_view)>& take) {
  const auto found = records_.find(number);
  if (found == records_.end()) return NotFound("the request was lost with the files it was in");
  RequestRecord& record = found->second;
  record.appendable = true;
  Reader reader(*this);
  for (uint32_t index = kFirstPiece; index < record.frames.size(); ++index) {
    TREADLE_ASSIGN_OR_RETURN(const std::optional<Frame> frame, reader.Read(number, record, index));
    if (!frame) {
      DamageReport damage;
      Lose(number, index, damage);
      damage.Tell(options_.log);
      break;
    }
    TREADLE_RETURN_IF_ERROR(take(frame->payload));
  }
  return absl::OkStatus();
}

// Writing.

absl::Status RequestJournal::Begin() {
  TREADLE_CHECK(pending_.empty());
  if (!loaded_ || !lock_->CheckName().ok() || (current_ != nullptr && current_->lost())) {
    if (const absl::Status status = Load(); !status.ok()) {
      return absl::UnavailableError(status.message());
    }
    options_.log({.severity = Severity::kWarning,
                  .name = "durable_files_lost",
                  .message = folder_ + " was deleted or replaced while it was in use, or failed,"
                                       " and was read again"});
  }
  const bool full =
      current_ != nullptr && segments_.rbegin()->second.bytes >= options_.segment_bytes;
  return current_ == nullptr || full ? BeginSegment() : absl::OkStatus();
}

absl::Status RequestJournal::BeginSegment() {
  if (current_ != nullptr) TREADLE_RETURN_IF_ERROR(current_->Sync());
  const std::string path = PathOf(last_segment_ + 1);
  TREADLE_ASSIGN_OR_RETURN(std::shared_ptr<NamedFile> file,
                           NamedFile::Open(path, O_RDWR | O_CREAT | O_EXCL));
  const auto before = segments_.find(last_segment_);
  const SegmentHeader header{.store = store_,
                             .next_number = next_number_,
                             .bytes_before = before == segments_.end() ? 0 : before->second.bytes};
  absl::Status status = file->WriteAt(0, header.ToBytes());
  if (status.ok()) status = file->Sync();
  if (status.ok()) status = SyncFolder(folder_);
  if (!status.ok()) {
    unlink(path.c_str());
    return status;
  }
  segments_[++last_segment_] = {.bytes = SegmentHeader::kBytes};
  current_ = file;
  MutexLock lock(unsynced_mutex_);
  unsynced_.push_back(std::move(file));
  return absl::OkStatus();
}

void RequestJournal::Write(uint64_t number, RequestRecord& record, std::string_view payload) {
  const auto& [segment, written] = *segments_.rbegin();
  const Frame frame{.number = number,
                    .index = static_cast<uint32_t>(record.frames.size()),
                    .attempt = record.attempts.back().number,
                    .first = record.attempts.back().first,
                    .payload = payload};
  record.frames.push_back({.segment = segment, .at = written.bytes + pending_.size()});
  record.bytes += static_cast<int64_t>(frame.bytes());
  written_.push_back({number, static_cast<int64_t>(frame.bytes())});
  AppendFrame(store_, frame, pending_);
}

void RequestJournal::Insert(const Row& row, std::string_view request) {
  RequestRecord& record = records_[row.number];
  TREADLE_CHECK(record.frames.empty());
  record.id = row.id;
  record.owner = row.owner;
  record.appendable = true;
  next_number_ = std::max(next_number_, row.number + 1);
  Write(row.number, record, HeadOf(row.id, row.owner));
  Write(row.number, record, request);
}

void RequestJournal::Append(uint64_t number, std::string_view piece) {
  const auto found = records_.find(number);
  if (found != records_.end() && found->second.appendable) Write(number, found->second, piece);
}

void RequestJournal::Delete(uint64_t number) {
  if (!records_.contains(number)) return;
  AppendFrame(store_, {.number = number, .index = kGone, .payload = {}}, pending_);
  deleted_.push_back(number);
}

absl::Status RequestJournal::Commit() {
  const bool collect = pending_.empty() || !deleted_.empty();
  TREADLE_RETURN_IF_ERROR(WritePending());
  for (const Written& frame : std::exchange(written_, {})) {
    ++segments_.rbegin()->second.needed;
    needed_bytes_ += frame.bytes;
  }
  for (const uint64_t number : std::exchange(deleted_, {})) {
    const auto record = records_.extract(number);
    if (record.empty()) continue;
    needed_bytes_ -= record.mapped().bytes;
    for (const FramePlace& place : record.mapped().frames) --segments_[place.segment].needed;
  }
  if (collect) Collect();
  return absl::OkStatus();
}

void RequestJournal::Rollback() {
  for (const Written& frame : written_) {
    const auto record = records_.find(frame.number);
    record->second.frames.pop_back();
    record->second.bytes -= frame.bytes;
    if (record->second.frames.empty()) records_.erase(record);
  }
  pending_.clear();
  written_.clear();
  deleted_.clear();
}

absl::Status RequestJournal::WritePending() {
  Segment& segment = segments_.rbegin()->second;
  TREADLE_RETURN_IF_ERROR(current_->WriteAt(segment.bytes, pending_));
  TREADLE_RETURN_IF_ERROR(current_->CheckName());
  segment.bytes += pending_.size();
  pending_.clear();
  return absl::OkStatus();
}

absl::Status RequestJournal::Sync() {
  std::vector<std::shared_ptr<NamedFile>> files;
  {
    MutexLock lock(unsynced_mutex_);
    files = unsynced_;
  }
  absl::Status status;
  for (const auto& file : files) status.Update(file->Sync());
  MutexLock lock(unsynced_mutex_);
  std::erase_if(unsynced_, [&, written = unsynced_.back()](const auto& file) {
    return file != written && std::ranges::count(files, file) > 0;
  });
  return status;
}

// Deleting.

void RequestJournal::Collect() {
  const auto oldest = [this] { return segments_.begin(); };
  bool deleted = false;
  while (segments_.size() > 1 && oldest()->second.needed == 0) {
    // First the frames that say that its requests are deleted, and copies of its frames.
    if (!deleted && !current_->Sync().ok()) return;
    if (unlink(PathOf(oldest()->first).c_str()) != 0 && errno != ENOENT) break;
    segments_.erase(oldest());
    deleted = true;
  }
  if (deleted) SyncFolder(folder_).IgnoreError();
  uint64_t bytes = 0;
  for (const auto& [number, segment] : segments_) bytes += segment.bytes;
  const uint64_t needed = static_cast<uint64_t>(std::max<int64_t>(needed_bytes_, 0));
  if (segments_.size() > 1 && bytes > 2 * needed + 4 * options_.segment_bytes) CopyOldest();
}

void RequestJournal::CopyOldest() {
  const uint64_t from = segments_.begin()->first, to = segments_.rbegin()->first;
  const auto file = OpenThere(PathOf(from));
  if (!file.ok()) return;
  const uint64_t begin = segments_[to].bytes;
  std::vector<std::pair<FramePlace*, FramePlace>> moved;
  ScanSegment(store_, *file ? (*file)->text() : "", [&](size_t at, const Frame& frame) {
    const auto record = records_.find(frame.number);
    if (record == records_.end() || frame.index >= record->second.frames.size()) return;
    FramePlace& place = record->second.frames[frame.index];
    if (place != FramePlace{.segment = from, .at = at}) return;
    moved.emplace_back(&place, FramePlace{.segment = to, .at = begin + pending_.size()});
    AppendFrame(store_, frame, pending_);
  });
  if (!WritePending().ok()) return pending_.clear();
  for (const auto& [place, now] : moved) *place = now;
  segments_[to].needed += moved.size();
  segments_[from].needed -= moved.size();
  if (segments_[from].needed == 0) return;
  // The rest cannot be read any more.
  std::vector<std::pair<uint64_t, uint32_t>> damaged;
  for (const auto& [number, record] : records_) {
    const auto missing = std::ranges::find_if(
        record.frames, [from](const FramePlace& place) { return place.segment == from; });
    if (missing == record.frames.end()) continue;
    damaged.emplace_back(number, static_cast<uint32_t>(missing - record.frames.begin()));
  }
  DamageReport damage;
  for (const auto& [number, index] : damaged) Lose(number, index, damage);
  damage.Tell(options_.log);
}

}  // namespace treadle
