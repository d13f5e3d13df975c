#include "server/serving_stack.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

PageCounts PartOf(const PageCounts& pages, double part) {
  PageCounts some;
  for (const PageKind kind : kPageKinds) {
    some[kind] = static_cast<int64_t>(static_cast<double>(pages[kind]) * part);
  }
  return some;
}

// As long as the cache has pages: a snapshot is then made at most once per as many changes.
std::unique_ptr<KvEventLog> MakeEventLog(const PageCounts& pages) {
  constexpr int64_t kLeast = 1024;
  return std::make_unique<KvEventLog>(
      static_cast<size_t>(std::max({kLeast, pages[PageKind::kWhole], pages[PageKind::kWindow]})));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServingStack>> ServingStack::Create(
    ServedModel model, std::unique_ptr<Engine> engine, const SchedulingOptions& options,
    std::unique_ptr<DraftModel> draft) {
  if (options.max_batch_size < 1 || options.max_batch_tokens <= options.max_batch_size) {
    return InvalidArgument("max batch tokens is ", options.max_batch_tokens, " and max batch size ",
                           options.max_batch_size,
                           ", expected a size of at least 1 and more tokens than that");
  }
  if (options.max_queue < 1) {
    return InvalidArgument("max queue is ", options.max_queue, ", expected at least 1");
  }
  if (options.compute_padding) {
    const BatchLimits limits{.max_batch_tokens = options.max_batch_tokens,
                             .max_context = model.max_context};
    const PageCounts padding = model.paging.PagesFor(PaddingRows(limits));
    PageCounts left = model.kv_pages;
    left -= padding;
    if (!model.paging.PagesFor(model.max_context).FitsIn(left)) {
      return ResourceExhausted("the K/V cache has ", model.kv_pages, " pages, and ",
                               PaddingRows(limits), " rows of padding take ", padding,
                               ": a request of ", model.max_context,
                               " tokens has no room beside them; expected more (--kv-memory), or "
                               "--padding count");
    }
  }
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<Policy> policy, Policy::Create(options.policy));
  return std::unique_ptr<ServingStack>(new ServingStack(
      std::move(model), std::move(engine), std::move(policy), options, std::move(draft)));
}

ServingStack::ServingStack(ServedModel model, std::unique_ptr<Engine> engine,
                           std::unique_ptr<Policy> policy, const SchedulingOptions& options,
                           std::unique_ptr<DraftModel> draft)
    : model_(std::move(model)),
      options_(options),
      engine_(std::move(engine)),
      draft_(std::move(draft)),
      policy_(std::move(policy)),
      kv_events_(options.kv_events ? MakeEventLog(model_.kv_pages) : nullptr),
      kv_(model_.kv_pages, model_.paging, PartOf(model_.kv_pages, options.prefix_cache),
          kv_events_.get(), options.page_files.get()),
      pool_(options.max_queue) {
  if (options_.max_candidates == 0) options_.max_candidates = options_.max_batch_size;
  const ServingLoop::Options loop_options = {
      .limits = {.max_batch_size = options.max_batch_size,
                 .max_batch_tokens = options.max_batch_tokens,
                 .max_context = model_.max_context,
                 .microbatch_size = options.microbatch_size},
      .position_share = options.position_share,
      .draft_model = draft_.get(),
      .max_ttft = options.max_ttft,
      .recover = options.recover,
      .compute_padding = options.compute_padding,
      .give_up = options.give_up};
  loop_ = std::make_unique<ServingLoop>(*engine_, kv_, pool_, *policy_, ledger_,
                                        TimeSource::Steady(), loop_options);
}

absl::Status ServingStack::Start() {
  if (model_.adapters) TREADLE_RETURN_IF_ERROR(model_.adapters->Start(*engine_));
  if (draft_) TREADLE_RETURN_IF_ERROR(draft_->Start());
  if (!options_.measure) return loop_->Start();
  return loop_->Start([this](LoopCore& core) {
    const absl::Status status = core.Calibrate({.paging = model_.paging,
                                                .pages = model_.kv_pages,
                                                .vocab = model_.vocab,
                                                .max_context = model_.max_context},
                                               options_.batch);
    options_.max_batch_size = core.limits().max_batch_size;
    options_.max_batch_tokens = core.limits().max_batch_tokens;
    if (!options_.batch.any()) return;
    chosen_ = Str("at most ", options_.max_batch_size, " sequences and ", options_.max_batch_tokens,
                  " tokens in one iteration");
    if (!status.ok()) {
      chosen_ += Str(", for nothing could be measured: ", status.message());
      return;
    }
    const AutoBatch& batch = options_.batch;
    const auto ms = [](double seconds) { return std::llround(seconds * 1e3); };
    const auto rows = static_cast<double>(options_.max_batch_size);
    const auto positions = rows * static_cast<double>(batch.context);
    chosen_ += Str(": by ", core.cost().noted(), " iterations, one of that many sequences takes ",
                   ms(core.cost().Of({rows, positions, rows})), " ms, of twice as many ",
                   ms(core.cost().Of({2 * rows, 2 * positions, 2 * rows})),
                   " ms, and of that many tokens ",
                   ms(FullIteration(core.cost(), core.limits(), batch.context)),
                   " ms (--target-itl is ", ms(batch.target_itl), " ms)");
  });
}

void ServingStack::Stop(absl::Status status) {
  loop_->Stop(std::move(status));
  if (model_.adapters) model_.adapters->Stop();
}

ServingStack::~ServingStack() { Stop(absl::UnavailableError("the server is stopping")); }

ServingStack::Pages ServingStack::pages() const {
  uint64_t next = std::max<uint64_t>(ledger_.end(), 1) - 1;
  uint64_t lost = 0;
  const auto records = ledger_.Read(next, 1, lost);
  if (!records.empty()) return {records.back()->free_pages, records.back()->total_pages};
  const KvCapacity all{model_.paging, model_.kv_pages, model_.kv_pages};
  const int64_t pages = all.total_pages[all.Scarcest()];
  return {pages, pages};
}

bool ServingStack::Drain(Clock::time_point deadline) {
  pool_.Drain();
  return loop_->WaitDrained(deadline);
}

}  // namespace treadle
