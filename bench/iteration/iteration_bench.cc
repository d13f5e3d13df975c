#include "bench/iteration/iteration_bench.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <nlohmann/json.hpp>
#include <random>
#include <semaphore>
#include <span>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "engine/kv/kv_slot_manager.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;
constexpr std::chrono::seconds kResultDeadline{300};

double Seconds(SteadyClock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

// Submits plans back to back and waits for results.
class Driver {
 public:
  explicit Driver(Engine& engine) : engine_(engine) {}

  absl::Status Start() {
    return engine_.Start([this] { news_.release(); });
  }

  absl::Status Submit(IterationPlan plan) {
    while (!engine_.HasRoom()) TREADLE_RETURN_IF_ERROR(AwaitResult());
    plan.epoch = engine_.epoch();
    plan.iteration = iteration_++;
    engine_.Submit(std::move(plan));
    ++in_flight_;
    return absl::OkStatus();
  }

  int stages() const { return engine_.stages(); }

  absl::Status Finish() {
    while (in_flight_ > 0) TREADLE_RETURN_IF_ERROR(AwaitResult());
    return absl::OkStatus();
  }

  // The gaps of all iterations whose results have come.
  double gaps() const { return gaps_; }
  // The experts that they used, and in how many layers.
  const ExpertUse& use() const { return use_; }

 private:
  // Blocks until the engine has news, and takes it.
  absl::Status AwaitResult() {
    if (!news_.try_acquire_for(kResultDeadline)) {
      return absl::DeadlineExceededError("an iteration gave no result");
    }
    for (const IterationResult& result : engine_.TakeResults()) {
      --in_flight_;
      gaps_ += result.timings.gap;
      use_.layers += result.experts.layers;
      use_.used += result.experts.used;
    }
    return engine_.status();
  }

  Engine& engine_;
  uint64_t iteration_ = 0;
  int in_flight_ = 0;
  double gaps_ = 0;
  ExpertUse use_;
  std::counting_semaphore<> news_{0};
};

struct Times {
  double prefill = 0;
  double decode = 0;
  double gaps = 0;     // in decode
  double experts = 0;  // in decode, that each layer used; 0: there are none
};

// One batch from prompt to last token; `first_id` numbers its sequences, which have `adapters` in
// turns.
absl::StatusOr<Times> RunBatch(Driver& driver, KvSlotManager& kv,
                               const IterationBenchOptions& options,
                               std::span<const uint64_t> adapters, int32_t prompt_tokens,
                               int32_t batch_size, SequenceId first_id, std::mt19937_64& random) {
  IterationPlan plan;
  std::vector<SequencePages> pages;
  const int64_t slots = int64_t{prompt_tokens} + options.new_tokens;
  for (int32_t i = 0; i < batch_size; ++i) {
    auto reserved = kv.Admit(prompt_tokens, slots, 1);
    if (!reserved) {
      return ResourceExhausted("batch size ", batch_size, ": ", options.paging.PagesFor(slots),
                               " K/V pages needed for each, ", kv.Capacity().total_pages, " exist");
    }
    SequenceStart start;
    start.sequence = first_id + i;
    start.prompt_length = prompt_tokens;
    start.pages = reserved->front();
    start.sampling.temperature = 0;
    if (!adapters.empty()) start.adapter = adapters[static_cast<size_t>(i) % adapters.size()];
    plan.starts.push_back(std::move(start));
    pages.push_back(std::move(reserved->front()));
  }

  const auto begin = SteadyClock::now();
  int64_t room = options.max_batch_tokens;
  for (int32_t i = 0; i < batch_size; ++i) {
    for (int32_t position = 0; position < prompt_tokens;) {
      if (room == 0) {
        TREADLE_RETURN_IF_ERROR(driver.Submit(std::move(plan)));
        plan = {};
        room = options.max_batch_tokens;
      }
      Step step;
      step.sequence = first_id + i;
      step.first_position = position;
      step.num_tokens = static_cast<int32_t>(std::min<int64_t>(room, prompt_tokens - position));
      for (int32_t t = 0; t < step.num_tokens; ++t) {
        step.tokens.push_back(static_cast<int32_t>(random() % options.vocab));
      }
      position += step.num_tokens;
      room -= step.num_tokens;
      if (position == prompt_tokens) step.outputs = {{.row = step.num_tokens - 1, .sample = true}};
      plan.steps.push_back(std::move(step));
    }
  }
  TREADLE_RETURN_IF_ERROR(driver.Submit(std::move(plan)));
  TREADLE_RETURN_IF_ERROR(driver.Finish());
  const auto prefilled = SteadyClock::now();
  const double gaps = driver.gaps();
  const ExpertUse before = driver.use();

  // A sequence is in one plan at a time, unless its next token is the previous sample.
  const int32_t parts = std::min<int32_t>(driver.stages(), batch_size);
  for (int32_t token = 1; token < options.new_tokens; ++token) {
    for (int32_t part = 0; part < parts; ++part) {
      plan = {};
      for (int32_t i = part; i < batch_size; i += parts) {
        Step step;
        step.sequence = first_id + i;
        step.first_position = prompt_tokens + token - 1;
        step.num_tokens = 1;
        step.outputs = {{.sample = true}};
        if (driver.stages() > 1) step.tokens = {static_cast<int32_t>(random() % options.vocab)};
        plan.steps.push_back(std::move(step));
      }
      TREADLE_RETURN_IF_ERROR(driver.Submit(std::move(plan)));
    }
    if (parts < driver.stages() || options.one_at_a_time) TREADLE_RETURN_IF_ERROR(driver.Finish());
  }
  TREADLE_RETURN_IF_ERROR(driver.Finish());
  const auto end = SteadyClock::now();
  const double used = static_cast<double>(driver.use().used - before.used);
  const Times times = {
      Seconds(prefilled - begin), Seconds(end - prefilled), driver.gaps() - gaps,
      used / static_cast<double>(std::max<int64_t>(driver.use().layers - before.layers, 1))};

  plan = {};
  for (int32_t i = 0; i < batch_size; ++i) {
    plan.releases.push_back(first_id + i);
    kv.Release(pages[i]);
  }
  TREADLE_RETURN_IF_ERROR(driver.Submit(std::move(plan)));
  TREADLE_RETURN_IF_ERROR(driver.Finish());
  return times;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Bytes that an increment iteration reads; see IterationBenchRow.
double DecodeBytes(const IterationBenchOptions& options, int32_t prompt_tokens,
                   int32_t batch_size) {
  const int64_t positions = prompt_tokens + options.new_tokens / 2;
  const int64_t seen = std::min<int64_t>(positions, options.paging.window);
  const PageCounts& bytes = options.kv_bytes_per_token;
  const int64_t kv = positions * bytes[PageKind::kWhole] + seen * bytes[PageKind::kWindow];
  return static_cast<double>(options.weight_bytes) + static_cast<double>(batch_size * kv);
}

// The medians of several runs.
IterationBenchRow RowOf(const IterationBenchOptions& options, int32_t prompt_tokens,
                        int32_t batch_size, std::span<const Times> runs) {
  const auto median = [&](double Times::*member) {
    std::vector<double> values;
    for (const Times& times : runs) values.push_back(times.*member);
    return Median(std::move(values));
  };
  const double prefill = median(&Times::prefill), decode = median(&Times::decode);
  const double experts = median(&Times::experts);
  const double decode_iteration = decode / (options.new_tokens - 1);
  return {.batch_size = batch_size,
          .prompt_tokens = prompt_tokens,
          .new_tokens = options.new_tokens,
          .prefill_tokens_per_second = static_cast<double>(batch_size) * prompt_tokens / prefill,
          .decode_tokens_per_second = batch_size / decode_iteration,
          .prefill_seconds = prefill,
          .decode_iteration_seconds = decode_iteration,
          .decode_gap_seconds = median(&Times::gaps) / (options.new_tokens - 1),
          .total_seconds = prefill + decode,
          .decode_gigabytes_per_second =
              experts > 0
                  ? 0
                  : DecodeBytes(options, prompt_tokens, batch_size) / decode_iteration * 1e-9,
          .decode_experts = experts};
}

}  // namespace

absl::StatusOr<std::vector<IterationBenchRow>> RunIterationBench(
    Engine& engine, const IterationBenchOptions& options) {
  const int32_t shortest =
      options.prompt_tokens.empty() ? 0 : std::ranges::min(options.prompt_tokens);
  if (shortest < 1 || options.new_tokens < 2 || options.repeats < 1) {
    return InvalidArgument("prompt tokens ", shortest, ", new tokens ", options.new_tokens,
                           ", repeats ", options.repeats, ": expected at least 1, 2 and 1");
  }
  for (int32_t batch_size : options.batch_sizes) {
    if (batch_size < 1 || batch_size > options.max_batch_tokens) {
      return InvalidArgument("batch size ", batch_size, ": expected 1 to max batch tokens (",
                             options.max_batch_tokens, ")");
    }
  }
  Driver driver(engine);
  TREADLE_RETURN_IF_ERROR(driver.Start());
  KvSlotManager kv(options.total_pages, options.paging);
  std::mt19937_64 random(1);
  SequenceId next_id = 1;
  std::vector<IterationBenchRow> rows;
  const size_t sides = options.adapters.empty() ? 1 : 2;
  const double all_batches =
      static_cast<double>(options.prompt_tokens.size() * options.batch_sizes.size() *
                          (options.repeats + size_t{1}) * sides);
  double batches = 0;
  for (const int32_t prompt_tokens : options.prompt_tokens) {
    for (const int32_t batch_size : options.batch_sizes) {
      std::array<std::vector<Times>, 2> runs;  // without adapters, and with them
      for (int repeat = 0; repeat <= options.repeats; ++repeat) {  // the first warms up
        for (size_t with = 0; with < sides; ++with) {
          TREADLE_ASSIGN_OR_RETURN(
              const Times times,
              RunBatch(driver, kv, options, with > 0 ? options.adapters : std::vector<uint64_t>(),
                       prompt_tokens, batch_size, next_id, random));
          next_id += batch_size;
          if (options.progress) options.progress(++batches / all_batches);
          if (repeat > 0) runs[with].push_back(times);
        }
      }
      for (size_t with = 0; with < sides; ++with) {
        rows.push_back(RowOf(options, prompt_tokens, batch_size, runs[with]));
        if (with == 0) continue;
        rows.back().adapters = std::min(batch_size, static_cast<int32_t>(options.adapters.size()));
      }
    }
  }
  return rows;
}

nlohmann::ordered_json ToJson(const std::vector<IterationBenchRow>& rows) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const IterationBenchRow& row : rows) {
    json.push_back({{"batch_size", row.batch_size},
                    {"prompt_tokens", row.prompt_tokens},
                    {"new_tokens", row.new_tokens},
                    {"adapters", row.adapters},
                    {"prefill_tokens_per_second", row.prefill_tokens_per_second},
                    {"decode_tokens_per_second", row.decode_tokens_per_second},
                    {"prefill_seconds", row.prefill_seconds},
                    {"decode_iteration_seconds", row.decode_iteration_seconds},
                    {"decode_gap_seconds", row.decode_gap_seconds},
                    {"total_seconds", row.total_seconds}});
    if (row.decode_gigabytes_per_second > 0) {
      json.back()["decode_gigabytes_per_second"] = row.decode_gigabytes_per_second;
    }
    if (row.decode_experts > 0) json.back()["decode_experts_per_layer"] = row.decode_experts;
  }
  return json;
}

std::string ToTable(const std::vector<IterationBenchRow>& rows) {
  std::string table =
      "batch  prompt  new  prefill tokens/s  decode tokens/s  decode iteration ms   gap ms  total s"
      "  decode GB/s\n";
  for (const IterationBenchRow& row : rows) {
    absl::StrAppendFormat(&table, "%5d  %6d  %3d  %16.1f  %15.1f  %19.3f  %7.3f  %7.3f  %11.1f\n",
                          row.batch_size, row.prompt_tokens, row.new_tokens,
                          row.prefill_tokens_per_second, row.decode_tokens_per_second,
                          row.decode_iteration_seconds * 1e3, row.decode_gap_seconds * 1e3,
                          row.total_seconds, row.decode_gigabytes_per_second);
    table.pop_back();
    if (row.adapters > 0) absl::StrAppendFormat(&table, "  %d adapters", row.adapters);
    if (row.decode_experts > 0) {
      absl::StrAppendFormat(&table, "  %.1f experts of a layer", row.decode_experts);
    }
    table.push_back('\n');
  }
  return table;
}

}  // namespace treadle
