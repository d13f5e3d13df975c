#include "server/cli/simulate/measured.h"

#include <memory>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "scheduler/cost/calibration.h"
#include "scheduler/request/request_pool.h"
#include "server/cli/open_model.h"

namespace treadle {

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
    IterationWork work = WorkOf(plan);
    const double grown = 1 + static_cast<double>(padding) / work.rows;
    work.rows *= grown;
    work.positions *= grown;
    return cost->Of(work) / stages;
  };
  machine.text = absl::StrFormat(
      "%s; %s\nan iteration takes %.3f ms, %.4f ms a row, %.2f ns a position that it reads and "
      "%.4f ms a sample, by %d iterations here\n",
      opened.served.name, opened.served.backend, 1e3 * cost->per_iteration(), 1e3 * cost->per_row(),
      1e9 * cost->per_position(), 1e3 * cost->per_sample(), cost->noted());
  opened.engine.reset();
  return machine;
}

}  // namespace treadle
