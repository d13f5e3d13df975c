#include "server/observe/log.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "base/status.h"
#include "base/sync.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr size_t kLongestString = 4096;

void Cut(std::string& text) {
  if (text.size() > kLongestString) text.resize(kLongestString);
}

// Cuts what is too long; gives what the event takes in the queue.
int64_t Bound(LogEvent& event) {
  Cut(event.message);
  size_t bytes = sizeof event + event.name.size() + event.message.size();
  for (LogField& field : event.fields) {
    bytes += sizeof field + field.key.size();
    if (auto* text = std::get_if<std::string>(&field.value)) {
      Cut(*text);
      bytes += text->size();
    }
  }
  return static_cast<int64_t>(bytes);
}

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

// Where lines end up: a descriptor that was there already (stderr), or a file by its path.
//
// A file is appended to. Before each line its path is looked at, so that one that was renamed or
// removed (logrotate) is opened anew without a signal. A line is written whole or, in a file, not
// at all: a part that came through before a disk was full is cut off again.
//
// Thread safety: none; Write from one thread, which blocks SIGXFSZ and SIGPIPE.
class LogFile {
 public:
  // Without a path: a duplicate of `fd`; if there is none, every write fails.
  LogFile(std::string path, int fd)
      : path_(std::move(path)), fd_(path_.empty() ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1) {}
  ~LogFile() {
    if (fd_ >= 0) close(fd_);
  }
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  // Requires a path. InvalidArgument names it, and why it cannot be opened.
  absl::Status Open() {
    struct stat there {};
    struct stat ours {};
    if (fd_ >= 0 && stat(path_.c_str(), &there) == 0 && fstat(fd_, &ours) == 0 &&
        there.st_dev == ours.st_dev && there.st_ino == ours.st_ino) {
      return absl::OkStatus();
    }
    if (fd_ >= 0) close(fd_);
    // O_NONBLOCK is for a FIFO that nobody reads, where open would wait.
    fd_ = open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK,
               0640);
    if (fd_ < 0) {
      return InvalidArgument("log file '", path_, "': ", std::strerror(errno),
                             ", expected a file that can be written");
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
        const absl::Status failed =
            absl::UnavailableError(Str("log file '", path_, "': ", std::strerror(errno)));
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

  const std::string path_;
  int fd_;  // -1: to be opened, or none
};

}  // namespace

struct Log::State {
  explicit State(const Options& log_options)
      : options(log_options),
        file(log_options.file, log_options.standard),
        standard("", log_options.standard) {}

  void Run() ABSL_LOCKS_EXCLUDED(mutex) {
    std::vector<LogEvent> batch;
    while (true) {
      int64_t overflowed = 0;
      {
        MutexLock lock(mutex);
        done += batch.size();
        progress.NotifyAll();
        batch.clear();
        while (queue.empty() && !stopping) woken.Wait(mutex);
        if (queue.empty()) {
          ended = true;
          progress.NotifyAll();
          return;
        }
        batch.swap(queue);
        queued_bytes = 0;
        overflowed = std::exchange(overflow, 0);
      }
      for (const LogEvent& event : batch) Emit(event);
      missing += overflowed;  // came when the queue held the whole batch
      if (missing > 0) SayMissing();
    }
  }

  // Below: the thread's.
  void Emit(const LogEvent& event) {
    if ((missing == 0 || SayMissing()) && Put(event)) return;
    ++missing;
    dropped.fetch_add(1, std::memory_order_relaxed);
  }
  bool SayMissing() {
    LogEvent event{.severity = Severity::kWarning,
                   .name = "log_lines_dropped",
                   .message = Str(missing, " log lines were dropped"),
                   .fields = {{"lines", missing}},
                   .time = absl::Now()};
    if (!Put(event)) return false;
    missing = 0;
    return true;
  }
  bool Put(const LogEvent& event) {
    const absl::Status status = file.Write(Line(event));
    const bool failed_before = std::exchange(failing, !status.ok());
    if (!failing || failed_before || options.file.empty()) return status.ok();
    const LogEvent complaint{.severity = Severity::kWarning,
                             .name = "log_file_failed",
                             .message = Str(std::string(status.message()),
                                            "; lines are dropped until it can be written"),
                             .fields = {{"file", options.file}},
                             .time = absl::Now()};
    // Where there is no stderr either, there is nobody to tell.
    standard.Write(Line(complaint)).IgnoreError();
    return false;
  }
  std::string Line(const LogEvent& event) const {
    return options.format == LogFormat::kJson ? ToJson(event) : ToText(event);
  }

  const Options options;
  std::atomic<uint64_t> dropped = 0;

  Mutex mutex;
  CondVar woken;
  CondVar progress;
  std::vector<LogEvent> queue ABSL_GUARDED_BY(mutex);
  int64_t queued_bytes ABSL_GUARDED_BY(mutex) = 0;
  int64_t overflow ABSL_GUARDED_BY(mutex) = 0;  // dropped since the queue was taken
  uint64_t accepted ABSL_GUARDED_BY(mutex) = 0;
  uint64_t done ABSL_GUARDED_BY(mutex) = 0;  // of the accepted ones
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  bool ended ABSL_GUARDED_BY(mutex) = false;

  // Confined to the thread.
  LogFile file;
  LogFile standard;      // for what is wrong with the file
  int64_t missing = 0;   // lines that were dropped since the last one that came out
  bool failing = false;  // the last write

  std::thread thread;  // the owner's
};

absl::StatusOr<std::unique_ptr<Log>> Log::Open(const Options& options) {
  const auto state = std::make_shared<State>(options);
  if (!options.file.empty()) TREADLE_RETURN_IF_ERROR(state->file.Open());
  try {
    const BlockSignals inherited;
    state->thread = std::thread([state] { state->Run(); });
  } catch (const std::system_error& error) {
    return ResourceExhausted("thread of the log: ", error.what());
  }
  return std::unique_ptr<Log>(new Log(state));
}

Log::~Log() {
  const auto deadline = SteadyClock::now() + state_->options.flush_timeout;
  bool ended = false;
  {
    MutexLock lock(state_->mutex);
    state_->stopping = true;
    state_->woken.NotifyOne();
    while (!state_->ended && state_->progress.WaitUntil(state_->mutex, deadline)) {
    }
    ended = state_->ended;
  }
  // A thread that hangs keeps the state, and nobody waits for it.
  ended ? state_->thread.join() : state_->thread.detach();
}

void Log::Write(LogEvent event) {
  State& state = *state_;
  if (event.severity < state.options.level) return;
  if (event.time == absl::InfinitePast()) event.time = absl::Now();
  const int64_t bytes = Bound(event);
  MutexLock lock(state.mutex);
  if (state.queued_bytes + bytes > state.options.queue_bytes || state.stopping) {
    ++state.overflow;
    state.dropped.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  state.queued_bytes += bytes;
  ++state.accepted;
  state.queue.push_back(std::move(event));
  if (state.queue.size() == 1) state.woken.NotifyOne();
}

bool Log::Flush(std::chrono::milliseconds timeout) {
  const auto deadline = SteadyClock::now() + timeout;
  MutexLock lock(state_->mutex);
  const uint64_t count = state_->accepted;
  while (state_->done < count && state_->progress.WaitUntil(state_->mutex, deadline)) {
  }
  return state_->done >= count;
}

uint64_t Log::dropped() const { return state_->dropped.load(std::memory_order_relaxed); }

const Log::Options& Log::options() const { return state_->options; }

LogSink WarningsToStderr() {
  return [](const LogEvent& event) {
    if (event.severity >= Severity::kWarning) std::fputs(ToText(event).c_str(), stderr);
  };
}

}  // namespace treadle
