#include "server/cli/simulate/recording.h"

#include <memory>

#include "base/mapped_file.h"
#include "base/status.h"
#include "bench/simulate/recorded_plans.h"
#include "engine/record/replay.h"
#include "models/checkpoints/checkpoint.h"
#include "server/configuration_sources.h"

namespace treadle {

absl::StatusOr<std::string> ReplayPlans(const std::string& path, const std::string& policy) {
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<MappedFile> file, MappedFile::Open(path));
  TREADLE_ASSIGN_OR_RETURN(const RecordingSummary summary, Summarize(file->text()));
  const RecordedSetup& setup = summary.setup;
  TREADLE_ASSIGN_OR_RETURN(const ServeOptions options, OptionsFrom(setup.configuration));
  if (options.max_batch_size == 0 || options.max_batch_tokens == 0 ||
      options.speculate != Speculate::kOff) {
    return InvalidArgument(path, ": was recorded with ",
                           options.max_batch_size == 0     ? "--max-batch-size auto"
                           : options.max_batch_tokens == 0 ? "--max-batch-tokens auto"
                                                           : "--speculate on or auto",
                           ", whose choices it does not have; expected a server with "
                           "--max-batch-size N --max-batch-tokens N --speculate off");
  }
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint,
                           Checkpoint::Open(options.model));
  const auto stages = static_cast<int>(setup.end_layers.size());
  const RecordedScheduling scheduling{
      .policy = policy.empty() ? options.policy : policy,
      .limits = {.max_batch_size = options.max_batch_size,
                 .max_batch_tokens = options.max_batch_tokens,
                 .stages = stages,
                 .depth = stages == 1 ? static_cast<int>(options.engine_depth) : stages,
                 .max_context = setup.max_context,
                 .microbatch_size = options.microbatch_size},
      .paging = KvPaging::Of(checkpoint->config(), options.page_size, setup.max_batch_tokens),
      .pages = setup.kv_pages,
      .prefix_cache = options.prefix_cache};
  TREADLE_ASSIGN_OR_RETURN(const PlanComparison found, ComparePlans(file->text(), scheduling));
  const std::string counts = Str(found.plans, " of ", found.recorded, " plans of ", found.requests,
                                 " requests are made again, in the same order");
  if (found.difference.empty()) return counts + "\n";
  return absl::FailedPreconditionError(Str(counts, "; ", found.difference));
}

}  // namespace treadle
