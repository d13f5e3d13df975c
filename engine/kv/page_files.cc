#include "engine/kv/page_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/checksum.h"
#include "base/mapped_file.h"
#include "base/sha256.h"
#include "base/status.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr size_t kKeyDigits = 64;
constexpr size_t kBlock = 4096;  // of a disk
constexpr char kLock[] = "lock", kContents[] = "contents", kUnfinished[] = "unfinished";
constexpr int kMeasured = 8;  // files, when the folder is opened

// A file: this, the ids of the page's tokens, its bytes.
struct Head {
  char magic[8] = {'T', 'R', 'E', 'A', 'D', 'P', 'G', 2};  // the last one counts formats
  uint64_t checksum = 0;                                   // of what follows
  char key[kKeyDigits];
  double computing_seconds = 0;  // of a token, when it was stored; 0: not known
};
static_assert(sizeof(Head) == 88);
constexpr size_t kUnsummed = offsetof(Head, key);

uint64_t ChecksumOf(const Head& head, std::span<const int32_t> ids, const PageBytes& bytes) {
  const auto* const at = reinterpret_cast<const std::byte*>(&head);
  uint64_t sum = Checksum(0, at + kUnsummed, sizeof head - kUnsummed);
  sum = Checksum(sum, reinterpret_cast<const std::byte*>(ids.data()), ids.size_bytes());
  return Checksum(sum, bytes.data(), bytes.size());
}

std::string SumOf(std::initializer_list<std::string_view> parts) {
  Sha256 sum;
  for (const std::string_view part : parts) sum.Add(std::as_bytes(std::span(part)));
  return sum.Finish();
}

bool IsKey(std::string_view name) {
  return name.size() == kKeyDigits && name.find_first_not_of("0123456789abcdef") == name.npos;
}

absl::Status SystemError(const std::string& path) {
  return absl::UnavailableError(Str(path, ": ", std::strerror(errno)));
}

bool ReadAll(int fd, void* to, size_t bytes) {
  auto* at = static_cast<std::byte*>(to);
  while (bytes > 0) {
    const ssize_t n = read(fd, at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

bool WriteAll(int fd, const void* from, size_t bytes) {
  const auto* at = static_cast<const std::byte*>(from);
  while (bytes > 0) {
    const ssize_t n = write(fd, at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

class File {
 public:
  // No descriptor, and errno says why, if it is not a regular file: a pipe must not make us wait.
  File(const std::string& path, int flags)
      : fd_(open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK, 0600)) {
    struct stat info {};
    if (fd_ < 0 || (fstat(fd_, &info) == 0 && S_ISREG(info.st_mode))) return;
    close(std::exchange(fd_, -1));
    errno = EINVAL;
  }
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

size_t FileBytes(const PageFiles::Options& options) {
  const auto ids = static_cast<size_t>(options.page_size) * sizeof(int32_t);
  const size_t bytes = sizeof(Head) + ids + static_cast<size_t>(options.page_bytes);
  return (bytes + kBlock - 1) / kBlock * kBlock;
}

// An average in which the last ones count most.
void Average(double seconds, double& average) {
  average = average == 0 ? seconds : average + (seconds - average) / 8;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PageFiles>> PageFiles::Open(Options options) {
  TREADLE_CHECK(options.page_size > 0 && options.page_bytes > 0);
  if (const size_t bytes = FileBytes(options); options.max_bytes < static_cast<int64_t>(bytes)) {
    return InvalidArgument(options.folder, " may have ", options.max_bytes,
                           " bytes, expected at least ", bytes, ", a page of ", options.page_size,
                           " tokens");
  }
  std::error_code error;
  if (std::filesystem::create_directories(options.folder, error)) {
    std::filesystem::permissions(options.folder, std::filesystem::perms::owner_all, error);
  }
  if (error) return absl::UnavailableError(Str(options.folder, ": ", error.message()));
  File lock(options.folder + "/" + kLock, O_RDWR | O_CREAT);
  if (lock.fd() < 0) return SystemError(options.folder + "/" + kLock);
  if (flock(lock.fd(), LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(
        Str(options.folder, " is in use by another process, expected a folder for each server"));
  }
  std::unique_ptr<PageFiles> files(new PageFiles(std::move(options), lock.Release()));
  TREADLE_RETURN_IF_ERROR(files->CheckContents());
  TREADLE_RETURN_IF_ERROR(files->List());
  files->Measure();
  try {
    files->pulse_.emplace([&all = *files] {
      all.Work();
      return PulseThread::kNever;
    });
  } catch (const std::system_error& failed) {
    return ResourceExhausted("thread of ", files->options_.folder, ": ", failed.what());
  }
  return files;
}

PageFiles::PageFiles(Options options, int lock)
    : options_([&] {
        if (!options.seconds) {
          options.seconds = [] {
            return std::chrono::duration<double>(SteadyClock::now().time_since_epoch()).count();
          };
        }
        return std::move(options);
      }()),
      lock_(lock),
      root_(SumOf({options_.contents})),
      file_bytes_(FileBytes(options_)),
      most_pages_(static_cast<size_t>(options_.max_bytes) / file_bytes_) {}

PageFiles::~PageFiles() {
  {
    MutexLock lock(mutex_);
    stop_at_ = SteadyClock::now() + kFinishWithin;
  }
  pulse_.reset();
  close(lock_);
}

// A new folder gets the file; one that has it must have the same.
absl::Status PageFiles::CheckContents() const {
  const std::string path = PathOf(kContents);
  const std::string expected =
      Str("treadle prefix cache\nmodel ", options_.model, "\n", root_, "\n");
  if (const auto file = MappedFile::Open(path); !absl::IsNotFound(file.status())) {
    const std::string found(file.ok() ? (*file)->text() : "");
    if (found == expected) return absl::OkStatus();
    std::string model = found.substr(0, found.rfind('\n', found.size() - 2));
    model = model.substr(std::min(model.size(), model.find("\nmodel ") + 1));
    return absl::FailedPreconditionError(
        Str(options_.folder, " has pages of another model, version or setting (",
            model.empty() ? "an unknown one" : model, "), expected those of model ", options_.model,
            " as it is served now: take another folder, or delete this one"));
  }
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(options_.folder, error)) {
    const std::string name = entry.path().filename();
    if (name == kLock || name == kUnfinished) continue;
    return absl::FailedPreconditionError(Str(options_.folder, " has other files, such as ", name,
                                             ", expected a folder for the prefix cache alone"));
  }
  if (error) return absl::UnavailableError(Str(options_.folder, ": ", error.message()));
  const std::string unfinished = PathOf(kUnfinished);
  const File file(unfinished, O_WRONLY | O_CREAT | O_TRUNC);
  if (file.fd() < 0 || !WriteAll(file.fd(), expected.data(), expected.size()) ||
      rename(unfinished.c_str(), path.c_str()) != 0) {
    return SystemError(path);
  }
  return absl::OkStatus();
}

absl::Status PageFiles::List() {
  std::vector<std::pair<std::filesystem::file_time_type, std::string>> found;
  std::error_code error, gone;
  for (const auto& entry : std::filesystem::directory_iterator(options_.folder, error)) {
    std::string name = entry.path().filename();
    if (IsKey(name)) found.emplace_back(entry.last_write_time(gone), std::move(name));
  }
  if (error) return absl::UnavailableError(Str(options_.folder, ": ", error.message()));
  std::ranges::sort(found);
  {
    MutexLock lock(mutex_);
    for (auto& [time, name] : found) Add(std::move(name));
  }
  DeletePages(most_pages_);
  return absl::OkStatus();
}

// Reads the newest pages from the disk, not from the system's memory.
void PageFiles::Measure() {
  std::vector<std::string> newest;
  {
    MutexLock lock(mutex_);
    for (const std::string& key : keys_) {
      if (newest.size() == kMeasured) break;
      newest.push_back(key);
    }
  }
  for (const std::string& key : newest) {
    const File file(PathOf(key), O_RDONLY);
    if (file.fd() >= 0) posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
  }
  for (const std::string& key : newest) ReadPage(key, nullptr);
}

std::vector<PageName> PageFiles::NamesOf(std::string_view salt,
                                         std::span<const int32_t> ids) const {
  const auto page = static_cast<size_t>(options_.page_size);
  std::vector<PageName> names;
  std::string key = SumOf({root_, salt});
  for (; ids.size() >= page; ids = ids.subspan(page)) {
    const auto own = ids.first(page);
    key = SumOf({key, {reinterpret_cast<const char*>(own.data()), own.size_bytes()}});
    names.push_back({key, {own.begin(), own.end()}});
  }
  return names;
}

bool PageFiles::Use(const std::string& key) {
  MutexLock lock(mutex_);
  if (const auto found = by_key_.find(key); found != by_key_.end()) {
    keys_.splice(keys_.begin(), keys_, found->second);
    return true;
  }
  return queued_.contains(key);
}

bool PageFiles::HasRoom() const {
  MutexLock lock(mutex_);
  return std::ssize(stores_) * options_.page_bytes < options_.max_queued;
}

void PageFiles::Store(PageName name, PageBytes bytes) {
  TREADLE_CHECK(std::ssize(bytes) == options_.page_bytes);
  TREADLE_CHECK(std::ssize(name.ids) == options_.page_size);
  MutexLock lock(mutex_);
  if (std::ssize(stores_) * options_.page_bytes >= options_.max_queued) {
    ++counters_.dropped;
    return;
  }
  if (!queued_.insert(name.key).second) return;
  stores_.push_back({std::move(name), std::move(bytes)});
  pulse_->Nudge();
}

size_t PageFiles::Held(std::span<const PageName> pages) const {
  MutexLock lock(mutex_);
  size_t held = 0;
  while (held < pages.size() && by_key_.contains(pages[held].key)) ++held;
  return held;
}

std::shared_ptr<PageFetch> PageFiles::Fetch(std::vector<PageName> pages,
                                            std::function<void()> done) {
  std::shared_ptr<PageFetch> fetch(new PageFetch(std::move(pages), std::move(done)));
  MutexLock lock(mutex_);
  fetches_.push_back(fetch);
  pulse_->Nudge();
  return fetch;
}

void PageFiles::Clear() {
  MutexLock lock(mutex_);
  for (const Page& page : stores_) queued_.erase(page.name.key);
  stores_.clear();
  clear_ = true;
  pulse_->Nudge();
}

void PageFiles::NoteComputing(double seconds_per_token) {
  if (seconds_per_token <= 0) return;
  MutexLock lock(mutex_);
  Average(seconds_per_token, computing_seconds_);
}

bool PageFiles::PaysToRead() {
  constexpr double kForgotten = 0.98;
  MutexLock lock(mutex_);
  const double computing = computing_seconds_ * static_cast<double>(options_.page_size);
  if (computing == 0 || read_seconds_ < computing) return true;
  read_seconds_ *= kForgotten;
  return false;
}

void PageFiles::NoteHits(int64_t pages) {
  MutexLock lock(mutex_);
  counters_.hits += pages * options_.page_size;
}

void PageFiles::NoteDropped(int64_t pages) {
  MutexLock lock(mutex_);
  counters_.dropped += pages;
}

PageFiles::Costs PageFiles::costs() const {
  MutexLock lock(mutex_);
  return {read_seconds_, computing_seconds_ * static_cast<double>(options_.page_size)};
}

PageFiles::Counters PageFiles::counters() const {
  MutexLock lock(mutex_);
  Counters counters = counters_;
  counters.pages = std::ssize(keys_);
  counters.bytes = counters.pages * static_cast<int64_t>(file_bytes_);
  return counters;
}

bool PageFiles::WaitIdle(SteadyClock::time_point deadline) {
  MutexLock lock(mutex_);
  while (working_ || clear_ || !fetches_.empty() || !stores_.empty()) {
    if (!idle_.WaitUntil(mutex_, deadline)) return false;
  }
  return true;
}

// The thread: clears, reads, writes, in this order, until nothing waits.
void PageFiles::Work() {
  while (true) {
    std::shared_ptr<PageFetch> fetch;
    std::optional<Page> store;
    bool clear = false;
    {
      MutexLock lock(mutex_);
      working_ = false;
      const bool idle = !clear_ && fetches_.empty() && stores_.empty();
      if (idle) idle_.NotifyAll();
      if (idle || (stop_at_ && SteadyClock::now() >= *stop_at_)) return;
      working_ = true;
      clear = std::exchange(clear_, false);
      if (!clear && !fetches_.empty()) {
        fetch = std::move(fetches_.front());
        fetches_.pop_front();
      } else if (!clear) {
        store = std::move(stores_.front());
        stores_.pop_front();
      }
    }
    if (clear) DeletePages(0);
    if (fetch) Read(*fetch, [&] { return fetch.use_count() > 1; });
    if (!store) continue;
    Write(*store);
    MutexLock lock(mutex_);
    queued_.erase(store->name.key);
  }
}

void PageFiles::Read(PageFetch& fetch, const std::function<bool()>& wanted) {
  for (const PageName& page : fetch.pages_) {
    if (!wanted() || Held({&page, 1}) == 0) break;
    PageBytes bytes = ReadPage(page.key, &page.ids);
    if (bytes.empty()) break;
    MutexLock lock(fetch.mutex_);
    fetch.read_.push_back(std::move(bytes));
  }
  {
    MutexLock lock(fetch.mutex_);
    fetch.over_ = true;
  }
  fetch.done_();
}

// Empty, and the file is deleted, if it is not what was stored. `ids`: that it must have, or null.
PageBytes PageFiles::ReadPage(const std::string& key, const std::vector<int32_t>* ids) {
  const double began = options_.seconds();
  const std::string path = PathOf(key);
  Head head;
  std::vector<int32_t> own(static_cast<size_t>(options_.page_size));
  PageBytes bytes(static_cast<size_t>(options_.page_bytes));
  const File file(path, O_RDONLY);
  char more = 0;
  const bool whole =
      file.fd() >= 0 && ReadAll(file.fd(), &head, sizeof head) &&
      ReadAll(file.fd(), own.data(), own.size() * sizeof own[0]) &&
      ReadAll(file.fd(), bytes.data(), bytes.size()) && !ReadAll(file.fd(), &more, 1) &&
      std::memcmp(head.magic, Head().magic, sizeof head.magic) == 0 &&
      head.checksum == ChecksumOf(head, own, bytes) &&
      key == std::string_view(head.key, kKeyDigits) && (ids == nullptr || own == *ids);
  if (whole) {
    futimens(file.fd(), nullptr);  // used now; a refusal only makes the order worse
    MutexLock lock(mutex_);
    if (const auto found = by_key_.find(key); found != by_key_.end()) {
      keys_.splice(keys_.begin(), keys_, found->second);
    }
    Average(options_.seconds() - began, read_seconds_);
    if (computing_seconds_ == 0) computing_seconds_ = head.computing_seconds;
    return bytes;
  }
  Warn(told_damage_, path + " is damaged or gone, as may be others: its page is computed again");
  if (file.fd() >= 0) unlink(path.c_str());
  MutexLock lock(mutex_);
  ++counters_.misses;
  if (const auto found = by_key_.find(key); found != by_key_.end()) {
    const auto at = found->second;
    by_key_.erase(found);
    keys_.erase(at);
  }
  return {};
}

void PageFiles::Write(const Page& page) {
  DeletePages(most_pages_ - 1);
  Head head;
  std::memcpy(head.key, page.name.key.data(), kKeyDigits);
  {
    MutexLock lock(mutex_);
    head.computing_seconds = computing_seconds_;
  }
  head.checksum = ChecksumOf(head, page.name.ids, page.bytes);
  const std::string unfinished = PathOf(kUnfinished), path = PathOf(page.name.key);
  const File file(unfinished, O_WRONLY | O_CREAT | O_TRUNC);
  const auto& ids = page.name.ids;
  const bool written = file.fd() >= 0 && WriteAll(file.fd(), &head, sizeof head) &&
                       WriteAll(file.fd(), ids.data(), ids.size() * sizeof ids[0]) &&
                       WriteAll(file.fd(), page.bytes.data(), page.bytes.size()) &&
                       rename(unfinished.c_str(), path.c_str()) == 0;
  if (!written) {
    Warn(told_write_, Str(path, ": ", std::strerror(errno), ": pages are not stored"));
    unlink(unfinished.c_str());
  }
  MutexLock lock(mutex_);
  ++(written ? counters_.stores : counters_.dropped);
  if (written) Add(page.name.key);
}

void PageFiles::Add(std::string key) {
  if (by_key_.contains(key)) return;
  keys_.push_front(std::move(key));
  by_key_.emplace(keys_.front(), keys_.begin());
}

// The least recently used ones, down to so many.
void PageFiles::DeletePages(size_t left) {
  while (true) {
    std::string key;
    {
      MutexLock lock(mutex_);
      if (keys_.size() <= left) return;
      by_key_.erase(keys_.back());
      key = std::move(keys_.back());
      keys_.pop_back();
    }
    unlink(PathOf(key).c_str());
  }
}

void PageFiles::Warn(bool& told, const std::string& what) const {
  if (!std::exchange(told, true) && options_.warn) options_.warn(what);
}

}  // namespace treadle
