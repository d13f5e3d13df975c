// How the folder is read when it is opened, and when its files were lost.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <system_error>
#include <utility>

#include "base/mapped_file.h"
#include "base/number.h"
#include "base/quoted.h"
#include "base/status.h"
#include "server/durable/request_journal.h"

namespace treadle {
namespace {

constexpr uint32_t kMaxSegments = 1 << 28;  // of a FramePlace
constexpr std::string_view kPrefix = "requests-", kSuffix = ".log";

void ReadHead(std::string_view head, std::string& id, std::string& owner) {
  uint32_t bytes = 0;
  if (head.size() < sizeof bytes) return;
  std::memcpy(&bytes, head.data(), sizeof bytes);
  head.remove_prefix(sizeof bytes);
  id = head.substr(0, bytes);
  owner = head.substr(id.size());
}

std::string FirstBytes(const std::string& path) {
  const auto file = MappedFile::Open(path);
  return std::string(file.ok() ? (*file)->text().substr(0, SegmentHeader::kBytes) : "");
}

}  // namespace

absl::StatusOr<std::unique_ptr<RequestJournal>> RequestJournal::Open(const std::string& folder,
                                                                     Options options) {
  std::unique_ptr<RequestJournal> journal(new RequestJournal(folder, std::move(options)));
  TREADLE_RETURN_IF_ERROR(journal->Load());
  TREADLE_RETURN_IF_ERROR(journal->BeginSegment());
  journal->Collect();
  const std::string older = folder + "/requests.sqlite";
  if (access(older.c_str(), F_OK) == 0) {
    journal->options_.log({.severity = Severity::kWarning,
                           .name = "durable_other_version",
                           .message = older + " was written by another version: its requests"
                                              " cannot be resumed, and it is left as it is"});
  }
  return journal;
}

std::string RequestJournal::PathOf(uint64_t segment) const {
  char number[24];
  std::snprintf(number, sizeof number, "%08llu", static_cast<unsigned long long>(segment));
  return Str(folder_, "/", kPrefix, number, kSuffix);
}

absl::Status RequestJournal::Load() {
  std::error_code error;
  const bool created = std::filesystem::create_directories(folder_, error);
  if (error) return absl::UnavailableError(Str(folder_, ": ", error.message()));
  if (created) TREADLE_RETURN_IF_ERROR(SyncFolder(folder_ + "/.."));
  TREADLE_RETURN_IF_ERROR(TakeLock());
  TREADLE_ASSIGN_OR_RETURN(const std::vector<uint64_t> segments, ListSegments());
  TREADLE_RETURN_IF_ERROR(ChooseStore(segments));

  const std::map<uint64_t, RequestRecord> before = std::exchange(records_, {});
  segments_.clear();
  current_.reset();
  loaded_ = false;
  DamageReport damage;
  for (const uint64_t segment : segments) {
    TREADLE_RETURN_IF_ERROR(ReadSegment(segment, segment == segments.back(), damage));
  }
  Settle(damage);
  for (const auto& [number, record] : before) {
    if (!records_.contains(number)) damage.lost.push_back(Quoted(record.id));
  }
  damage.Tell(options_.log);
  loaded_ = true;
  return absl::OkStatus();
}

absl::Status RequestJournal::TakeLock() {
  if (lock_ != nullptr && lock_->CheckName().ok()) return absl::OkStatus();
  TREADLE_ASSIGN_OR_RETURN(std::shared_ptr<NamedFile> lock,
                           NamedFile::Open(folder_ + "/lock", O_RDWR | O_CREAT));
  if (!lock->Lock()) {
    return absl::FailedPreconditionError(
        Str(folder_, " is in use by another process, expected a folder for each server"));
  }
  lock_ = std::move(lock);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint64_t>> RequestJournal::ListSegments() {
  std::vector<uint64_t> segments;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder_, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    std::string name = entry->path().filename();
    if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) continue;
    name = name.substr(kPrefix.size(), name.size() - kPrefix.size() - kSuffix.size());
    const auto number = NumberIn<uint32_t>(name);
    if (number && *number > 0 && *number < kMaxSegments) segments.push_back(*number);
  }
  if (error) return absl::UnavailableError(Str(folder_, ": ", error.message()));
  std::ranges::sort(segments);
  if (!segments.empty()) last_segment_ = std::max(last_segment_, segments.back());
  return segments;
}

// The store's id is in the lock and in every segment; the lock's outranks the others, and the
// first that is not damaged will do.
absl::Status RequestJournal::ChooseStore(const std::vector<uint64_t>& segments) {
  uint64_t found = 0;
  std::vector<std::string> paths = {lock_->path()};
  for (const uint64_t segment : segments) paths.push_back(PathOf(segment));
  bool locked = false;  // the lock has it
  for (const std::string& path : paths) {
    const auto header = SegmentHeader::In(FirstBytes(path));
    if (!header.ok()) {
      return absl::FailedPreconditionError(Str(path, " ", header.status().message()));
    }
    if (!*header) continue;
    if (found == 0) found = (*header)->store;
    locked = locked || path == lock_->path();
    next_number_ = std::max(next_number_, (*header)->next_number);
  }
  if (store_ != 0 && found != 0 && found != store_) {
    return absl::UnavailableError(folder_ + " was replaced by the folder of another server");
  }
  if (store_ == 0) store_ = found;
  std::random_device random;
  while (store_ == 0) store_ = uint64_t{random()} << 32 | random();
  if (locked) return absl::OkStatus();
  TREADLE_RETURN_IF_ERROR(lock_->WriteAt(0, SegmentHeader{.store = store_}.ToBytes()));
  return lock_->Sync();
}

absl::Status RequestJournal::ReadSegment(uint64_t segment, bool last, DamageReport& damage) {
  const std::string path = PathOf(segment);
  const auto file = MappedFile::Open(path);
  if (!file.ok() && !absl::IsInvalidArgument(file.status())) {  // else it is empty
    return absl::UnavailableError(file.status().message());
  }
  const std::string_view bytes = file.ok() ? (*file)->text() : std::string_view();
  Segment& read = segments_[segment];
  read.bytes = bytes.size();
  const auto header = SegmentHeader::In(bytes);
  if (header.ok() && *header && (*header)->bytes_before != 0 && segments_.size() > 1) {
    const auto before = segments_.find(segment - 1);
    const uint64_t there = before == segments_.end() ? 0 : before->second.bytes;
    const uint64_t expected = (*header)->bytes_before;
    damage.Miss(PathOf(segment - 1), expected - std::min(expected, there));
  }
  if (bytes.size() < SegmentHeader::kBytes) {
    if (!last) {
      damage.Miss(path, bytes.size());
    } else if (unlink(path.c_str()) == 0) {  // a process ended when it had begun it
      segments_.erase(segment);
    }
    return absl::OkStatus();
  }
  size_t last_at = 0;
  Frame last_frame;
  SegmentScan scan = ScanSegment(store_, bytes, [&](size_t at, const Frame& frame) {
    Take(frame, {.segment = segment, .at = at});
    last_at = at;
    last_frame = frame;
  });
  if (!header.ok() || !*header) scan.dropped += SegmentHeader::kBytes;
  if (!last || !scan.torn) {
    scan.dropped += bytes.size() - scan.end;
  } else {
    // An id without its request was not whole either.
    if (last_at != 0 && last_frame.index == kHead) {
      scan.end = last_at;
      records_.erase(last_frame.number);
    }
    std::error_code error;
    if (scan.end < bytes.size()) std::filesystem::resize_file(path, scan.end, error);
    read.bytes = scan.end;
  }
  damage.Miss(path, scan.dropped);
  return absl::OkStatus();
}

void RequestJournal::Take(const Frame& frame, FramePlace place) {
  next_number_ = std::max(next_number_, frame.number + 1);
  if (frame.index == kGone) {
    gone_.insert(frame.number);
    return;
  }
  RequestRecord& record = records_[frame.number];
  if (record.Take(frame, place) && frame.index == kHead) {
    ReadHead(frame.payload, record.id, record.owner);
  }
}

void RequestJournal::Settle(DamageReport& damage) {
  for (const uint64_t number : std::exchange(gone_, {})) records_.erase(number);
  needed_bytes_ = 0;
  std::vector<std::pair<uint64_t, uint32_t>> damaged;
  for (auto& [number, record] : records_) {
    needed_bytes_ += record.bytes;
    const auto missing = std::ranges::find(record.frames, FramePlace{});
    const auto whole = static_cast<uint32_t>(missing - record.frames.begin());
    if (missing != record.frames.end() || whole < kFirstPiece) damaged.emplace_back(number, whole);
    for (const FramePlace& place : record.frames) {
      if (place.segment != 0) ++segments_[place.segment].needed;
    }
  }
  for (const auto& [number, index] : damaged) Lose(number, index, damage);
}

}  // namespace treadle
