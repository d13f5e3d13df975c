#include "server/cli/workers/socket_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;

constexpr char kUnlocked[] = "lock.new";  // the lock, until it is locked
constexpr char kRandom[] = "XXXXXX";      // after the prefix; mkdtemp's
constexpr mode_t kMode = 0700;            // likewise

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }

 private:
  const int fd_;
};

// Whether a worker or the owner of its folder makes such a file.
bool IsOurs(int folder, const std::string& name) {
  struct stat about {};
  if (fstatat(folder, name.c_str(), &about, AT_SYMLINK_NOFOLLOW) != 0) return false;
  if (S_ISSOCK(about.st_mode)) return name.find_first_not_of("0123456789") == std::string::npos;
  return S_ISREG(about.st_mode) && (name == SocketFolder::kLock || name == kUnlocked);
}

// The files in the folder; nothing if it cannot be read or one of them is not ours.
std::optional<std::vector<std::string>> FilesIn(int folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> open(
      fdopendir(openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)), closedir);
  if (!open) return std::nullopt;
  std::vector<std::string> names;
  while (const dirent* entry = readdir(open.get())) {
    const std::string name = entry->d_name;
    if (name == "." || name == "..") continue;
    if (!IsOurs(folder, name)) return std::nullopt;
    names.push_back(name);
  }
  return names;
}

bool Listens(const std::string& path) {
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  if (path.size() >= sizeof address.sun_path) return true;  // that cannot be found out
  std::ranges::copy(path, address.sun_path);
  const File client(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  return connect(client.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 ||
         errno != ECONNREFUSED;
}

// Removes the folder of this name, if nobody owns it.
bool RemoveIfAbandoned(const File& parent, const std::string& path, const std::string& name) {
  const File folder(
      openat(parent.fd(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat about {};
  if (!folder.open() || fstat(folder.fd(), &about) != 0 || about.st_uid != geteuid() ||
      (about.st_mode & 07777) != kMode) {
    return false;
  }
  // From here until the folder is gone, its lock is ours.
  const File lock(
      openat(folder.fd(), SocketFolder::kLock, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (lock.open() ? flock(lock.fd(), LOCK_EX | LOCK_NB) != 0 : errno != ENOENT) return false;
  const auto files = FilesIn(folder.fd());
  if (!files) return false;
  if (!lock.open()) {
    const std::chrono::seconds age(time(nullptr) - about.st_mtime);
    const auto listens = [&](const std::string& file) { return Listens(path + "/" + file); };
    if (age < SocketFolder::kOld || std::ranges::any_of(*files, listens)) return false;
  }
  for (const std::string& file : *files) unlinkat(folder.fd(), file.c_str(), 0);
  return unlinkat(parent.fd(), name.c_str(), AT_REMOVEDIR) == 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SocketFolder>> SocketFolder::Create(const fs::path& parent) {
  std::string path = parent / (std::string(kPrefix) + kRandom);
  if (mkdtemp(path.data()) == nullptr) {  // for this user only
    return absl::UnavailableError(Str("cannot make a directory for the workers' sockets at ", path,
                                      ": ", std::strerror(errno)));
  }
  std::unique_ptr<SocketFolder> folder(new SocketFolder(std::move(path)));
  folder->Lock();
  return folder;
}

// The file gets its name once it is locked: whoever finds it can rely on the lock.
void SocketFolder::Lock() {
  const std::string unlocked = path_ + "/" + kUnlocked, locked = path_ + "/" + kLock;
  lock_ = open(unlocked.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (lock_ < 0) return;
  if (flock(lock_, LOCK_EX | LOCK_NB) != 0 || rename(unlocked.c_str(), locked.c_str()) != 0) {
    unlink(unlocked.c_str());
  }
}

SocketFolder::~SocketFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  if (lock_ >= 0) close(lock_);
}

std::vector<std::string> SocketFolder::RemoveAbandoned(const fs::path& parent) {
  std::vector<std::string> removed;
  const File opened(open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!opened.open()) return removed;
  std::error_code error;
  for (fs::directory_iterator entry(parent, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (name.starts_with(kPrefix) && name.size() == sizeof kPrefix + sizeof kRandom - 2 &&
        RemoveIfAbandoned(opened, entry->path(), name)) {
      removed.push_back(entry->path());
    }
  }
  return removed;
}

}  // namespace treadle
