// The adapters that a server knows by name, and which of them are in memory.
//
// A name stands for files; requests that name it hold its contents, which stay in memory until the
// last of them has ended. As many are loaded as there is room for; where another is asked, the one
// that was asked least recently and that nobody holds makes room. Where all are held, who asks
// waits, and the one asked least recently is given to nobody else until its holders have ended: so
// everybody's turn comes. Loading runs on a thread of its own, while iterations run.
//
// A name may be given to other files: requests that hold the old contents keep them.
//
// Thread safety: any thread, but Start and Stop from the owner's. Holds keep the registry, and may
// go on any thread; Stop comes before the last of them goes.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "base/sync.h"
#include "engine/engine.h"
#include "models/adapters/adapter_file.h"

namespace treadle {

// A loaded adapter, for as long as it is kept.
struct AdapterHold {
  uint64_t id = 0;   // SequenceStart::adapter
  std::string hash;  // AdapterFile::hash
  std::shared_ptr<const void> hold;
  int32_t virtual_tokens = 0;  // AdapterFile::virtual_tokens
};

class AdapterRegistry : public std::enable_shared_from_this<AdapterRegistry> {
 public:
  using Clock = std::chrono::steady_clock;
  struct Options {
    std::vector<std::string> taken;  // names that no adapter can have: the model's own
    std::string folder;       // its folders and .gguf files are adapters of that name; empty: none
    int64_t max_loaded = 16;  // at once
    int64_t memory = 0;       // bytes of all that are loaded; 0: no bound but their number
    DType floats = DType::kF32;  // Backend::low_rank_type of those that load them
    int64_t max_waiting = 1024;  // requests that wait for one to be loaded
  };
  // An adapter that has a name.
  struct Named {
    std::string name, path;
    std::string hash;  // empty: its files were not read yet
    int64_t rank = 0;  // likewise 0
    bool loaded = false;
    int64_t holders = 0;   // requests that run with it, or wait to run
    int64_t requests = 0;  // that have asked for it
  };
  struct Counts {
    int64_t loaded = 0, loads = 0, evictions = 0, waiting = 0;
  };

  // config: of the model that adapters are for.
  AdapterRegistry(ModelConfig config, Options options)
      : config_(std::move(config)), options_(std::move(options)) {}
  ~AdapterRegistry() { Stop(); }

  // `engine` loads them, and outlives Stop. ResourceExhausted if there is no thread to be had.
  absl::Status Start(Engine& engine);
  // Waiting requests get Unavailable. Idempotent.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

  // Gives the name to an adapter, whose files are read and checked. AdapterFile::Open's errors;
  // InvalidArgument for a name that cannot be one.
  absl::Status Add(const std::string& name, const std::string& path) ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes the name away. NotFound.
  absl::Status Remove(std::string_view name) ABSL_LOCKS_EXCLUDED(mutex_);
  bool Has(std::string_view name) const ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<Named> List() const ABSL_LOCKS_EXCLUDED(mutex_);
  Counts counts() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The names that requests have, and those that some wait for.
  std::vector<std::string> Running() const ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<std::string> Waiting() const ABSL_LOCKS_EXCLUDED(mutex_);

  // The adapter of that name, if it is loaded and nobody is before the caller.
  std::optional<AdapterHold> TryHold(const std::string& name) ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls `done` once it is, on the registry's thread: NotFound, what loading it says,
  // DeadlineExceeded, or ResourceExhausted if too many wait.
  using Done = std::function<void(absl::StatusOr<AdapterHold>)>;
  void Hold(const std::string& name, Clock::time_point deadline, Done done)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    std::string path;
    std::shared_ptr<const AdapterFile> file;  // null: not read yet
    bool found = false;                       // in the folder, not given
    int64_t requests = 0;
  };
  struct Loaded {
    std::shared_ptr<const AdapterFile> file;
    int64_t holders = 0;
    uint64_t asked = 0;  // the last time, by asked_
  };
  struct Waiter {
    std::string name;
    Clock::time_point deadline;
    Done done;
  };
  Entry* Find(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The path of the folder's adapter of that name; empty: there is none.
  std::string InFolder(std::string_view name) const;
  // Nothing unless the entry's adapter is loaded, and given to whoever asks.
  std::optional<AdapterHold> Give(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LetGo(uint64_t id) ABSL_LOCKS_EXCLUDED(mutex_);
  // Lets the thread look at those who wait once more.
  void Tell() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends one wait, if one can end now. These and the next release the lock for a while.
  bool EndOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The answer to a waiter; nothing: it goes on waiting.
  std::optional<absl::StatusOr<AdapterHold>> Try(const std::string& name, bool& needs_room)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Read(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Load(std::shared_ptr<const AdapterFile> file) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasRoom(const AdapterFile& file, bool beside_held) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t LeastRecent(bool held) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ModelConfig config_;
  const Options options_;
  Engine* engine_ = nullptr;  // constant after Start

  mutable Mutex mutex_;
  CondVar changed_;
  std::map<std::string, Entry, std::less<>> names_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, Loaded> loaded_ ABSL_GUARDED_BY(mutex_);
  std::deque<Waiter> waiting_ ABSL_GUARDED_BY(mutex_);
  uint64_t barred_ ABSL_GUARDED_BY(mutex_) = 0;  // is given to nobody, so that it can make room
  uint64_t asked_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t loads_ ABSL_GUARDED_BY(mutex_) = 0, evictions_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool news_ ABSL_GUARDED_BY(mutex_) = false;  // since the thread last looked
  std::thread thread_;                         // last: it uses the others
};

}  // namespace treadle
