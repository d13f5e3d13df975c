#include "server/observe/line_writer.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/sync.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

// Signals are other threads' business, and those that a write may raise become its error.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t before_;
};

// Where lines end up: a descriptor that was there already (stderr), or a file by its path, which is
// looked at before each line.
//
// Thread safety: none; Write from one thread, which blocks SIGXFSZ and SIGPIPE.
class LineFile {
 public:
  // Without a path: a duplicate of `fd`; if there is none, every write fails.
  LineFile(const LineWriter::Options& options, std::string path)
      : name_(Str(options.what, " '", path, "': ")),
        path_(std::move(path)),
        mode_(options.mode),
        fd_(path_.empty() ? fcntl(options.standard, F_DUPFD_CLOEXEC, 0) : -1) {}
  ~LineFile() {
    if (fd_ >= 0) close(fd_);
  }
  LineFile(const LineFile&) = delete;
  LineFile& operator=(const LineFile&) = delete;

  // Requires a path. InvalidArgument names it, and why it cannot be opened.
  absl::Status Open(bool anew = false) {
    struct stat there {};
    struct stat ours {};
    if (fd_ >= 0 && stat(path_.c_str(), &there) == 0 && fstat(fd_, &ours) == 0 &&
        there.st_dev == ours.st_dev && there.st_ino == ours.st_ino) {
      return absl::OkStatus();
    }
    if (fd_ >= 0) close(fd_);
    // O_NONBLOCK is for a FIFO that nobody reads, where open would wait.
    const int flags = O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
    fd_ = open(path_.c_str(), flags | (anew ? O_TRUNC : 0), mode_);
    if (fd_ < 0) {
      return InvalidArgument(name_, std::strerror(errno), ", expected a file that can be written");
    }
    fcntl(fd_, F_SETFL, O_APPEND);
    return absl::OkStatus();
  }

  // May block as long as what it writes to does. An error leaves it as it was: the next line tries
  // again.
  absl::Status Write(std::string_view line) {
    if (!path_.empty()) TREADLE_RETURN_IF_ERROR(Open());
    size_t written = 0;
    while (written < line.size()) {
      const ssize_t n = write(fd_, line.data() + written, line.size() - written);
      if (n >= 0) {
        written += static_cast<size_t>(n);
      } else if (errno == EAGAIN) {  // whoever shares stderr made it so
        pollfd writable{fd_, POLLOUT, 0};
        poll(&writable, 1, -1);
      } else if (errno != EINTR) {
        const absl::Status failed = absl::UnavailableError(Str(name_, std::strerror(errno)));
        if (written > 0) CutOff(written);
        return failed;
      }
    }
    return absl::OkStatus();
  }

 private:
  void CutOff(size_t bytes) {
    struct stat about {};
    if (fstat(fd_, &about) != 0 || !S_ISREG(about.st_mode)) return;
    // If even this fails, a part of a line stays in the file.
    [[maybe_unused]] const int result = ftruncate(fd_, about.st_size - static_cast<off_t>(bytes));
  }

  const std::string name_;  // as messages begin
  const std::string path_;
  const mode_t mode_;
  int fd_;  // -1: to be opened, or none
};

}  // namespace

struct LineWriter::State {
  explicit State(Options writer_options)
      : options(std::move(writer_options)), file(options, options.file), standard(options, "") {}

  void Run() ABSL_LOCKS_EXCLUDED(mutex) {
    while (true) {
      std::vector<std::string> batch;
      int64_t overflowed = 0;
      {
        MutexLock lock(mutex);
        while (queue.empty() && !stopping) woken.Wait(mutex);
        if (queue.empty()) break;
        batch.swap(queue);
        queued_bytes = 0;
        overflowed = std::exchange(overflow, 0);
      }
      for (size_t i = 0; i < batch.size(); ++i) {
        Emit(batch[i]);
        if (i + 1 == batch.size() && overflowed > 0) {  // came when the queue held the whole batch
          missing += overflowed;
          if (!failing) Emit("");
        }
        MutexLock lock(mutex);
        ++done;
        progress.NotifyAll();
      }
    }
    MutexLock lock(mutex);
    ended = true;
    progress.NotifyAll();
  }

  // Below: the thread's. An empty line only says what is missing.
  void Emit(const std::string& line) {
    const std::string note = missing > 0 && options.missing ? options.missing(missing) : "";
    if (!Put(note + line)) {
      if (line.empty()) return;
      ++missing;
      dropped.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    if (missing > 0 && options.resumed) options.resumed(missing);
    missing = 0;
  }
  bool Put(const std::string& text) {
    const absl::Status status = file.Write(text);
    const bool failed_before = std::exchange(failing, !status.ok());
    if (failing && !failed_before && options.failed) {
      // Where there is no stderr either, there is nobody to tell.
      standard.Write(options.failed(status)).IgnoreError();
    }
    return status.ok();
  }

  const Options options;
  std::atomic<uint64_t> dropped = 0;

  Mutex mutex;
  CondVar woken;
  CondVar progress;
  std::vector<std::string> queue ABSL_GUARDED_BY(mutex);
  int64_t queued_bytes ABSL_GUARDED_BY(mutex) = 0;
  int64_t overflow ABSL_GUARDED_BY(mutex) = 0;  // dropped since the queue was taken
  uint64_t accepted ABSL_GUARDED_BY(mutex) = 0;
  uint64_t done ABSL_GUARDED_BY(mutex) = 0;  // of the accepted ones
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  bool ended ABSL_GUARDED_BY(mutex) = false;

  // Confined to the thread.
  LineFile file;
  LineFile standard;     // for what is wrong with the file
  int64_t missing = 0;   // lines that were dropped since the last one that came out
  bool failing = false;  // the last write

  std::thread thread;  // the owner's
};

absl::StatusOr<std::unique_ptr<LineWriter>> LineWriter::Open(Options options) {
  const bool anew = options.anew;
  const auto state = std::make_shared<State>(std::move(options));
  if (!state->options.file.empty()) TREADLE_RETURN_IF_ERROR(state->file.Open(anew));
  try {
    const BlockSignals inherited;
    state->thread = std::thread([state] { state->Run(); });
  } catch (const std::system_error& error) {
    return ResourceExhausted("thread of the ", state->options.what, ": ", error.what());
  }
  return std::unique_ptr<LineWriter>(new LineWriter(state));
}

LineWriter::~LineWriter() { Close(); }

bool LineWriter::Write(std::string line) {
  State& state = *state_;
  const auto bytes = static_cast<int64_t>(sizeof line + line.size());
  MutexLock lock(state.mutex);
  if (state.queued_bytes + bytes > state.options.queue_bytes || state.stopping) {
    ++state.overflow;
    state.dropped.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  state.queued_bytes += bytes;
  ++state.accepted;
  state.queue.push_back(std::move(line));
  if (state.queue.size() == 1) state.woken.NotifyOne();
  return true;
}

bool LineWriter::Flush(std::chrono::milliseconds timeout) {
  const auto deadline = SteadyClock::now() + timeout;
  MutexLock lock(state_->mutex);
  const uint64_t count = state_->accepted;
  while (state_->done < count && state_->progress.WaitUntil(state_->mutex, deadline)) {
  }
  return state_->done >= count;
}

uint64_t LineWriter::Close() {
  if (!state_->thread.joinable()) return dropped();  // closed already
  const auto deadline = SteadyClock::now() + state_->options.flush_timeout;
  bool ended = false;
  uint64_t left = 0;
  {
    MutexLock lock(state_->mutex);
    state_->stopping = true;
    state_->woken.NotifyOne();
    while (!state_->ended && state_->progress.WaitUntil(state_->mutex, deadline)) {
    }
    ended = state_->ended;
    left = state_->accepted - state_->done;
  }
  // A thread that hangs keeps the state, and nobody waits for it.
  ended ? state_->thread.join() : state_->thread.detach();
  return dropped() + left;
}

uint64_t LineWriter::dropped() const { return state_->dropped.load(std::memory_order_relaxed); }

}  // namespace treadle
