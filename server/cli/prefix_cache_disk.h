// The prefix cache's second tier, by --prefix-cache-disk. Thread safety: none.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "engine/kv/page_files.h"
#include "server/cli/open_model.h"
#include "server/configuration.h"
#include "server/observe/log_event.h"
#include "server/observe/metrics.h"

namespace treadle {

// Null without the flag. Tells in one line what is there, and what reading it costs. Errors are
// those of PageFiles::Open.
absl::StatusOr<std::shared_ptr<PageFiles>> OpenPageFiles(const ServeOptions& options,
                                                         const OpenedModel& opened,
                                                         const LogSink& log);
void AddPageFiles(const std::shared_ptr<PageFiles>& files, Metrics& metrics);

}  // namespace treadle
