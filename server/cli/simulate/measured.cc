#include "server/cli/simulate/measured.h"

#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "bench/simulate/recorded_cost.h"
#include "scheduler/cost/calibration.h"
#include "scheduler/request/request_pool.h"
#include "server/cli/open_model.h"

namespace treadle {
namespace {

// `padding` rows read as many positions as the others.
IterationWork PaddedWork(const IterationPlan& plan, int64_t padding) {
  IterationWork work = WorkOf(plan);
  const double grown = 1 + static_cast<double>(padding) / work.rows;
  work.rows *= grown;
  work.positions *= grown;
  return work;
}

std::string Costs(const IterationCost& cost) {
  return absl::StrFormat(
      "an iteration takes %.3f ms, %.4f ms a row, %.2f ns a position that it reads and %.4f ms a "
      "sample",
      1e3 * cost.per_iteration(), 1e3 * cost.per_row(), 1e9 * cost.per_position(),
      1e3 * cost.per_sample());
}

}  // namespace

absl::StatusOr<MeasuredMachine> MeasureHere(const ServeOptions& serve) {
  constexpr double kBudget = 10;  // seconds
  TREADLE_ASSIGN_OR_RETURN(OpenedModel opened, OpenModel(serve));
  const SchedulingOptions scheduling = SchedulingFrom(serve, opened);
  const auto cost = std::make_shared<IterationCost>(scheduling.position_share);
  {
    RequestPool bell(1);  // which the engine rings
    TREADLE_RETURN_IF_ERROR(opened.engine->Start([&bell] { bell.Wake(); }));
    Calibration how{.paging = opened.served.paging,
                    .pages = opened.served.kv_pages,
                    .vocab = opened.served.vocab,
                    .max_batch_tokens = scheduling.max_batch_tokens,
                    .max_context = opened.served.max_context,
                    .budget = kBudget};
    how.wait = [&bell](Clock::time_point until) { bell.WaitForNews(until); };
    TREADLE_RETURN_IF_ERROR(Calibrate(*opened.engine, how, *cost).status());
  }
  MeasuredMachine machine;
  SimulationOptions& simulation = machine.simulation;
  simulation.policy = scheduling.policy;
  simulation.limits = {.max_batch_size = scheduling.max_batch_size,
                       .max_batch_tokens = scheduling.max_batch_tokens,
                       .stages = opened.engine->stages(),
                       .depth = opened.engine->depth(),
                       .max_context = opened.served.max_context,
                       .microbatch_size = scheduling.microbatch_size};
  simulation.paging = opened.served.paging;
  simulation.pages = opened.served.kv_pages;
  // Stages share an iteration's time equally: it was measured from the first to the last.
  simulation.seconds = [cost, stages = simulation.limits.stages](const IterationPlan& plan,
                                                                 int64_t padding, int) {
    return cost->Of(PaddedWork(plan, padding)) / stages;
  };
  machine.text = Str(opened.served.name, "; ", opened.served.backend, "\n", Costs(*cost), ", by ",
                     cost->noted(), " iterations here\n");
  opened.engine.reset();
  return machine;
}

absl::StatusOr<MeasuredMachine> MeasuredBy(const std::string& ledger, const ServeOptions& serve,
                                           const Checkpoint& checkpoint, uint64_t seed) {
  TREADLE_ASSIGN_OR_RETURN(RecordedCost read, RecordedCost::Read(ledger, seed));
  const auto cost = std::make_shared<RecordedCost>(std::move(read));
  const ModelConfig& config = checkpoint.config();
  MeasuredMachine machine;
  SimulationOptions& simulation = machine.simulation;
  simulation.policy = serve.policy;
  simulation.limits = {.max_batch_size = serve.max_batch_size,
                       .max_batch_tokens = serve.max_batch_tokens,
                       .depth = static_cast<int>(serve.engine_depth),
                       .max_context = serve.max_context > 0 ? serve.max_context : config.context};
  simulation.paging = KvPaging::Of(config, serve.page_size, serve.max_batch_tokens);
  simulation.pages = simulation.paging.PagesFor(simulation.limits.max_context);
  for (const PageKind kind : kPageKinds) simulation.pages[kind] *= serve.max_batch_size;
  simulation.seconds = [cost](const IterationPlan& plan, int64_t padding, int) {
    return cost->Next(PaddedWork(plan, padding));
  };
  machine.text = Str(checkpoint.path(), "\n", Costs(cost->fit()), ", by ", cost->iterations(),
                     " iterations of ", ledger, "\n");
  return machine;
}

}  // namespace treadle
