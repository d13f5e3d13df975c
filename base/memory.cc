#include "base/memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>

namespace treadle {
namespace {

// How a version of control groups names its files (the kernel's cgroup-v2.rst and
// cgroup-v1/memory.rst).
struct GroupFiles {
  const char* folder;
  const char* limit;  // a number, or "max"
  const char* usage;
  const char* reclaimable;  // key in memory.stat, of the group and those below it
};
constexpr GroupFiles kVersion1 = {"sys/fs/cgroup/memory", "memory.limit_in_bytes",
                                  "memory.usage_in_bytes", "total_inactive_file"};
constexpr GroupFiles kVersion2 = {"sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};

std::optional<uint64_t> NumberIn(const std::string& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

// The number behind `key` in a file of lines "key number ...".
std::optional<uint64_t> NumberOf(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    uint64_t number = 0;
    if (words >> name >> number && name == key) return number;
  }
  return std::nullopt;
}

// Bytes that the group at `path` and those above it leave.
uint64_t LeftIn(const std::string& root, const GroupFiles& files, std::string path) {
  uint64_t left = std::numeric_limits<uint64_t>::max();
  while (true) {
    const std::string folder = root + files.folder + path + "/";
    const auto limit = NumberIn(folder + files.limit);
    const auto usage = NumberIn(folder + files.usage);
    if (limit && usage) {
      const uint64_t cached = NumberOf(folder + "memory.stat", files.reclaimable).value_or(0);
      const uint64_t used = *usage - std::min(cached, *usage);
      left = std::min(left, *limit - std::min(used, *limit));
    }
    if (path.empty()) return left;
    path.erase(path.rfind('/'));
  }
}

}  // namespace

MemoryAvailable AvailableMemory(const std::string& root) {
  constexpr uint64_t kUnknown = 1 << 30;
  const auto kilobytes = NumberOf(root + "proc/meminfo", "MemAvailable:");
  MemoryAvailable available{.bytes = kilobytes ? *kilobytes * 1024 : kUnknown};
  // Lines "0::/path" of version 2, and "4:memory:/path" of version 1.
  std::ifstream groups(root + "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool version2 = controllers == ",,";
    if (!version2 && controllers.find(",memory,") == controllers.npos) continue;
    std::string path = line.substr(second + 1);
    if (!path.starts_with('/')) continue;
    if (path == "/") path.clear();
    const uint64_t left = LeftIn(root, version2 ? kVersion2 : kVersion1, std::move(path));
    if (left < available.bytes) available = {.bytes = left, .limited = true};
  }
  return available;
}

}  // namespace treadle
