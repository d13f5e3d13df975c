// Pages of the K/V cache in files of a folder: the prefix cache's second tier, which outlives
// memory and process.
//
// FOLDER/lock      held by the process that has the folder
// FOLDER/contents  what decides the bits of its pages; a folder with other contents is refused
// FOLDER/DIGITS    a page: head, the ids of its tokens, its bytes (page_files.cc)
//
// A page is named by the SHA-256 of all that its bytes depend on: the contents, the salt, and the
// ids of its tokens and of all before them, as a chain from page to page. A file counts only if it
// is whole: its size, its checksum, its name and its ids are compared when it is read, and one that
// differs is deleted and counted as a miss. So files may be torn, damaged, exchanged or deleted at
// any time. Least recently used files make room for new ones.
//
// One thread reads and writes, and what is read goes first. Its queue is bounded: what finds no
// room is not stored, and nobody waits. Files hold what users said, and are their user's alone.
//
// Thread safety: all methods from any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/background.h"
#include "base/sync.h"

namespace treadle {

using PageBytes = std::vector<std::byte>;

struct PageName {
  std::string key;  // 64 digits
  std::vector<int32_t> ids;
};

// Pages that are being read, in order.
class PageFetch {
 public:
  // Nothing more will be read.
  bool over() const ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    return over_;
  }
  // The bytes of the first pages, as many as have been read. Whoever drops the fetch ends it.
  std::vector<PageBytes> Take() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    return std::exchange(read_, {});
  }

 private:
  friend class PageFiles;
  PageFetch(std::vector<PageName> pages, std::function<void()> done)
      : pages_(std::move(pages)), done_(std::move(done)) {}

  const std::vector<PageName> pages_;
  const std::function<void()> done_;
  mutable Mutex mutex_;
  std::vector<PageBytes> read_ ABSL_GUARDED_BY(mutex_);
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
};

class PageFiles {
 public:
  struct Options {
    std::string folder;
    int64_t max_bytes = 0;  // of files, in whole blocks of the disk
    std::string model;      // its name, for messages
    std::string contents;   // all that decides a page's bits and how they lie
    int64_t page_size = 0;  // tokens
    int64_t page_bytes = 0;
    int64_t max_queued = 256 << 20;                     // bytes of pages that wait to be written
    std::function<void(const std::string&)> warn = {};  // of each kind of trouble, once
    std::function<double()> seconds = {};               // a clock; empty: the steady one
  };
  // Makes the folder and measures what reading takes, if it has pages. FailedPrecondition if
  // another process has it, or it has something else than pages of these contents; InvalidArgument
  // if no page fits; Unavailable for what the system refuses. Errors name the folder.
  static absl::StatusOr<std::unique_ptr<PageFiles>> Open(Options options);
  // Writes what is queued, within kFinishWithin.
  ~PageFiles();
  PageFiles(const PageFiles&) = delete;
  PageFiles& operator=(const PageFiles&) = delete;

  static constexpr std::chrono::seconds kFinishWithin{10};

  // The whole pages of a prefix.
  std::vector<PageName> NamesOf(std::string_view salt, std::span<const int32_t> ids) const;

  // The page is used: false if it is not there, and is not going to be.
  bool Use(const std::string& key);
  // Queues a page, or drops it.
  void Store(PageName name, PageBytes bytes);
  // Whether the queue has room for a page.
  bool HasRoom() const;
  // The number of pages that are there, up to the first that is not.
  size_t Held(std::span<const PageName> pages) const;
  // Reads them in order, up to the first that cannot be had; calls `done` then, from any thread.
  std::shared_ptr<PageFetch> Fetch(std::vector<PageName> pages, std::function<void()> done);
  // Deletes all pages.
  void Clear();

  // Seconds that computing a token takes now; stored with pages, so that the next process knows.
  void NoteComputing(double seconds_per_token);
  // Whether reading a page takes less time than computing its tokens, as far as both are known. A
  // measure that says no is forgotten slowly: disks may become faster.
  bool PaysToRead();
  // Seconds of either for a page; 0: not known.
  struct Costs {
    double read = 0, compute = 0;
  };
  Costs costs() const;

  struct Counters {
    int64_t pages = 0, bytes = 0;  // of files that are there
    int64_t stores = 0;            // pages written
    int64_t dropped = 0;           // pages not written: the queue was full, or the disk refused
    int64_t hits = 0;              // tokens of prompts that were had from files
    int64_t misses = 0;            // files that were damaged or gone when they were to be read
  };
  Counters counters() const;
  // So many pages that were read have been used; were not stored, for want of room.
  void NoteHits(int64_t pages) ABSL_LOCKS_EXCLUDED(mutex_);
  void NoteDropped(int64_t pages) ABSL_LOCKS_EXCLUDED(mutex_);

  // False if the queue was not empty at the deadline.
  bool WaitIdle(std::chrono::steady_clock::time_point deadline);

  int64_t page_size() const { return options_.page_size; }
  int64_t page_bytes() const { return options_.page_bytes; }

 private:
  using Keys = std::list<std::string>;  // most recently used first
  struct Page {
    PageName name;
    PageBytes bytes;
  };

  PageFiles(Options options, int lock);
  absl::Status CheckContents() const;
  absl::Status List();
  void Measure();

  void Work();
  void Read(PageFetch& fetch, const std::function<bool()>& wanted);
  PageBytes ReadPage(const std::string& key, const std::vector<int32_t>* ids);
  void Write(const Page& page);
  void DeletePages(size_t left);
  void Warn(bool& told, const std::string& what) const;
  std::string PathOf(const std::string& key) const { return options_.folder + "/" + key; }
  void Add(std::string key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const int lock_;
  const std::string root_;   // digits of the contents' sum
  const size_t file_bytes_;  // of each page's file
  const size_t most_pages_;

  // The thread's.
  bool told_damage_ = false, told_write_ = false;

  mutable Mutex mutex_;
  CondVar idle_;
  Keys keys_ ABSL_GUARDED_BY(mutex_);  // of files that are there
  std::unordered_map<std::string_view, Keys::iterator> by_key_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<PageFetch>> fetches_ ABSL_GUARDED_BY(mutex_);
  std::deque<Page> stores_ ABSL_GUARDED_BY(mutex_);
  std::unordered_set<std::string> queued_ ABSL_GUARDED_BY(mutex_);  // keys to be stored
  bool clear_ ABSL_GUARDED_BY(mutex_) = false;
  bool working_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<std::chrono::steady_clock::time_point> stop_at_ ABSL_GUARDED_BY(mutex_);
  Counters counters_ ABSL_GUARDED_BY(mutex_);
  double read_seconds_ ABSL_GUARDED_BY(mutex_) = 0;       // of a page
  double computing_seconds_ ABSL_GUARDED_BY(mutex_) = 0;  // of a token

  std::optional<PulseThread> pulse_;  // last
};

}  // namespace treadle
