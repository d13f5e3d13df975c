// Damage to stored requests, for the log: warnings with the bytes, files and requests.
//
// Thread safety: confined to one thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/observe/log_event.h"

namespace treadle {

struct DamageReport {
  int64_t bytes = 0;                    // that cannot be read
  std::vector<std::string> files = {};  // where they are
  std::vector<std::string> lost = {};   // requests that cannot be resumed
  std::vector<std::string> cut = {};    // requests whose answers end early

  void Miss(const std::string& path, uint64_t count);
  // Nothing where nothing is damaged.
  void Tell(const LogSink& log) const;
};

}  // namespace treadle
