#include "server/access/file_watcher.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <span>
#include <utility>

#include "base/sha256.h"
#include "base/status.h"

namespace treadle {
namespace {

constexpr std::chrono::seconds kPeriod{1};

bool ReadableOnce(const std::string& path) {
  struct stat about {};
  return !path.empty() && stat(path.c_str(), &about) == 0 && !S_ISREG(about.st_mode);
}

// Files hold secrets, so they are not kept.
std::string DigestOf(const std::vector<FileWatcher::Content>& contents) {
  Sha256 sum;
  for (const FileWatcher::Content& content : contents) {
    const std::string text = content.ok() ? *content : std::string(content.status().message());
    const std::string head = Str(content.ok(), " ", text.size(), " ");
    sum.Add(std::as_bytes(std::span(head)));
    sum.Add(std::as_bytes(std::span(text)));
  }
  return sum.Finish();
}

}  // namespace

absl::StatusOr<std::unique_ptr<FileWatcher>> FileWatcher::Open(std::vector<std::string> paths,
                                                               Take take, Told told) {
  std::unique_ptr<FileWatcher> watcher(
      new FileWatcher(std::move(paths), std::move(take), std::move(told)));
  const std::vector<Content> first = watcher->ReadAll();
  TREADLE_RETURN_IF_ERROR(watcher->take_(first));
  if (std::ranges::any_of(watcher->paths_, ReadableOnce)) return watcher;
  watcher->taken_ = DigestOf(first);
  watcher->pulse_.emplace([self = watcher.get(), looks = false]() mutable {
    if (std::exchange(looks, true)) self->Look();  // first a period later
    return std::chrono::steady_clock::now() + kPeriod;
  });
  return watcher;
}

FileWatcher::Content FileWatcher::Read(const std::string& path) {
  if (path.empty()) return std::string();
  const std::unique_ptr<std::FILE, decltype(&std::fclose)> file(std::fopen(path.c_str(), "re"),
                                                                &std::fclose);
  if (!file) return absl::UnavailableError(std::strerror(errno));
  std::string text;
  char buffer[4096];
  for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, file.get())) > 0;) {
    text.append(buffer, n);
  }
  if (std::ferror(file.get()) != 0) return absl::UnavailableError(std::strerror(errno));
  return text;
}

std::vector<FileWatcher::Content> FileWatcher::ReadAll() const {
  std::vector<Content> contents;
  for (const std::string& path : paths_) contents.push_back(Read(path));
  return contents;
}

void FileWatcher::Look() {
  const std::vector<Content> contents = ReadAll();
  std::string digest = DigestOf(contents);
  if (digest == taken_) return;
  taken_ = std::move(digest);
  told_(take_(contents));
}

}  // namespace treadle
