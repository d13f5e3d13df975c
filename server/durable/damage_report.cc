#include "server/durable/damage_report.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

void LogNames(const LogSink& log, const char* event, const char* what,
              const std::vector<std::string>& names) {
  constexpr size_t kMaxNames = 20;
  if (names.empty()) return;
  std::string message = what;
  for (size_t i = 0; i < std::min(names.size(), kMaxNames); ++i) {
    message += (i == 0 ? "" : ", ") + names[i];
  }
  if (names.size() > kMaxNames) message += Str(" and ", names.size() - kMaxNames, " more");
  log({.severity = Severity::kWarning,
       .name = event,
       .message = std::move(message),
       .fields = {{"requests", std::ssize(names)}}});
}

}  // namespace

void DamageReport::Miss(const std::string& path, uint64_t count) {
  if (count == 0) return;
  bytes += static_cast<int64_t>(count);
  files.push_back(Str(path, " (", count, " bytes)"));
}

void DamageReport::Tell(const LogSink& log) const {
  if (!files.empty()) {
    std::string message = "stored requests are damaged, these cannot be read: ";
    for (const std::string& file : files) {
      message += (&file == files.data() ? "" : ", ") + file;
    }
    log({.severity = Severity::kWarning,
         .name = "durable_damaged",
         .message = std::move(message),
         .fields = {{"bytes", bytes}}});
  }
  LogNames(log, "durable_requests_lost", "requests that were lost, and cannot be resumed: ", lost);
  LogNames(log, "durable_answers_cut",
           "answers that were damaged, and of which the rest is computed again: ", cut);
}

}  // namespace treadle
