#include "server/cli/bench/load_run.h"

#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/number.h"
#include "base/status.h"
#include "bench/load/http_caller.h"
#include "bench/load/load_html.h"
#include "bench/load/rate_search.h"
#include "bench/load/spec_decode.h"
#include "models/checkpoints/checkpoint.h"
#include "models/text/tokenizer.h"
#include "server/cli/command.h"
#include "server/cli/progress.h"

namespace treadle {
namespace {

using Json = nlohmann::ordered_json;

absl::StatusOr<double> ParseRate(const std::string& text) {
  if (text == "inf") return 0;  // all at once
  const std::optional<double> rate = NumberIn<double>(text);
  if (rate && std::isfinite(*rate) && *rate > 0) return *rate;
  return InvalidArgument("--request-rate is '", text,
                         "', expected requests per second above 0, or inf");
}

// Texts as tokens, by the tokenizer of a model's file or folder.
absl::StatusOr<decltype(TraceFileOptions::encode)> OpenEncoder(const std::string& path) {
  if (path.empty()) return nullptr;
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint, Checkpoint::Open(path));
  if (checkpoint->tokenizer() == nullptr) {
    return InvalidArgument("--tokenizer: ", path, " has no tokenizer");
  }
  TREADLE_ASSIGN_OR_RETURN(std::shared_ptr<const Tokenizer> tokenizer,
                           Tokenizer::Create(*checkpoint->tokenizer()));
  return [tokenizer](std::string_view text) {
    return tokenizer->Encode(text, {.add_special = false});
  };
}

absl::StatusOr<Replayed> TraceAt(const LoadRunOptions& options, const std::string& rate,
                                 uint64_t seed) {
  Replayed one{rate, seed};
  SyntheticTrace synthetic = options.trace;
  synthetic.seed = seed;
  if (rate != "recorded") {
    TREADLE_ASSIGN_OR_RETURN(synthetic.request_rate, ParseRate(rate));
  }
  if (options.trace_file.empty()) {
    one.trace = MakeTrace(synthetic);
    return one;
  }
  TraceFileOptions recorded = options.recorded;
  recorded.limit = synthetic.num_requests;
  recorded.seed = seed;
  TREADLE_ASSIGN_OR_RETURN(one.trace, ReadTrace(options.trace_file, recorded));
  if (rate != "recorded") Schedule(synthetic, one.trace);
  return one;
}

absl::Status CheckSteadyState(const LoadRunOptions& options, const Replayed& one) {
  double last = 0;
  for (const TraceEntry& entry : one.trace) {
    if (entry.after < 0) last = std::max(last, entry.arrival);
  }
  if (options.report.steady_from <= 0 || last > options.report.steady_from) return {};
  return InvalidArgument("--steady-state ", options.report.steady_from,
                         ": the last request arrives after ", last,
                         " s, expected a longer run (--num-prompts)");
}

// The server's counters of guesses; nothing if it has none, or no metrics.
std::optional<SpecDecode> AskGuesses(const LoadRunOptions& options) {
  if (options.metrics_url.empty()) return std::nullopt;
  const auto metrics = AskMetrics(options.metrics_url);
  return metrics.ok() ? ReadSpecDecode(*metrics) : std::nullopt;
}

absl::Status ReplayOne(const LoadRunOptions& options, LoadTarget& target, Replayed& one) {
  TREADLE_RETURN_IF_ERROR(CheckSteadyState(options, one));
  LoadReplayOptions replay = options.replay;
  // Another rate has other prompts: a server would find those of the last one in its cache.
  replay.seed = one.seed;
  for (const char c : one.rate) replay.seed = replay.seed * 1'000'003 + static_cast<uint8_t>(c);
  replay.progress = ShowProgress("requests");
  const std::optional<SpecDecode> before = AskGuesses(options);
  TREADLE_ASSIGN_OR_RETURN(one.result, Replay(one.trace, target, replay));
  const std::optional<SpecDecode> after = AskGuesses(options);
  one.guesses = Json::object();
  if (before && after) AddSpecDecode(*before, *after, one.guesses);
  return absl::OkStatus();
}

Json AboutRun(const LoadRunOptions& options, const LoadTarget::Limits& limits,
              const Replayed& one) {
  const auto number = NumberIn<double>(one.rate);
  const double burstiness = options.trace.burstiness;
  const bool sampled = options.trace_file.empty();
  Json about;
  about["date"] = absl::FormatTime("%Y%m%d-%H%M%S", absl::Now(), absl::LocalTimeZone());
  about["endpoint_type"] = about["backend"] = options.protocol;
  about["label"] = options.label.empty() ? options.protocol : options.label;
  about["model_id"] = limits.model;
  about["tokenizer_id"] = options.tokenizer.empty() ? Json() : Json(options.tokenizer);
  about["num_prompts"] = one.trace.size();
  about["request_rate"] = number && std::isfinite(*number) ? Json(*number) : Json(one.rate);
  about["burstiness"] = std::isinf(burstiness) ? Json("inf") : Json(burstiness);
  about["max_concurrency"] =
      options.replay.max_concurrency > 0 ? Json(options.replay.max_concurrency) : Json();
  about["target"] = options.target;
  about["seed"] = one.seed;
  about["end_of_sequence"] = options.replay.ignore_eos ? "ignored" : "ends";
  if (sampled) {
    about["input_len"] = options.input;
    about["output_len"] = options.output;
  } else {
    about["trace"] = options.trace_file;
  }
  if (options.report.steady_from > 0) about["steady_state_from"] = options.report.steady_from;
  about["temperature"] = options.replay.temperature;
  // The parameters of sampling that the server uses where none are sent.
  about["server_sampling_defaults"] = Json::parse(limits.sampling_defaults, nullptr, false);
  if (about["server_sampling_defaults"].is_discarded()) {
    about["server_sampling_defaults"] = "not told by this protocol";
  }
  return about;
}

// The runs that were replayed, and the report of them.
class Reports {
 public:
  Reports(const LoadRunOptions& options, LoadTarget::Limits limits)
      : options_(options), limits_(std::move(limits)) {}

  const LoadReport& Add(Replayed one) {
    Entry& entry = *entries_.emplace_back(std::make_unique<Entry>());
    entry.one = std::move(one);
    entry.report = Analyze(entry.one.result, options_.report);
    entry.about = AboutRun(options_, limits_, entry.one);
    entry.said = ToJson(entry.report, entry.one.result, false, options_.report, entry.about);
    entry.said.update(entry.one.guesses);
    return entry.report;
  }

  absl::StatusOr<std::string> Write(const std::string& conclusion) const {
    std::string details;
    std::vector<LoadRun> runs;
    for (const auto& entry : entries_) {
      Json whole = ToJson(entry->report, entry->one.result, true, options_.report, entry->about);
      whole.update(entry->one.guesses);
      details += whole.dump() + "\n";
      runs.push_back({Title(entry->one), entry->said, &entry->report, &entry->one.result});
    }
    TREADLE_RETURN_IF_ERROR(WriteTo("--save-result", options_.save_result, details));
    TREADLE_RETURN_IF_ERROR(WriteTo("--html", options_.html, ToHtml(runs, conclusion)));
    return Printed();
  }

 private:
  struct Entry {
    Replayed one;
    LoadReport report;
    Json about, said;
  };

  std::string Title(const Replayed& one) const {
    return Str(one.rate == "recorded" ? "recorded arrivals" : one.rate + " requests/s",
               options_.seeds > 1 ? Str(", seed ", one.seed) : std::string());
  }

  std::string Printed() const {
    std::string printed;
    const auto seeds = static_cast<size_t>(options_.seeds);
    for (size_t i = 0; i < entries_.size(); ++i) {
      const Entry& entry = *entries_[i];
      if (!options_.json && entries_.size() > 1) printed += Title(entry.one) + "\n";
      printed += options_.json ? entry.said.dump() + "\n" : ToTable(entry.report, options_.report);
      if (seeds < 2 || (i + 1) % seeds != 0) continue;
      std::vector<Json> same;
      for (size_t k = i + 1 - seeds; k <= i; ++k) same.push_back(entries_[k]->said);
      const Json means = MeanOverSeeds(same);
      printed += options_.json ? means.dump() + "\n" : ToTable(means);
    }
    if (!options_.json && !entries_.empty()) {
      const Json& said = entries_[0]->said;
      printed += Str(
          "sampling: temperature ", options_.replay.temperature,
          "; the server's defaults for the rest: ", said["server_sampling_defaults"].dump(), "\n");
    }
    return printed;
  }

  const LoadRunOptions& options_;
  const LoadTarget::Limits limits_;
  std::vector<std::unique_ptr<Entry>> entries_;
};

// The highest rate at which enough requests are within the bounds, over all seeds.
// `late`: gets in how many runs the client itself was late.
absl::StatusOr<double> Search(const LoadRunOptions& options, LoadTarget& target, double start,
                              Reports& reports, int& late) {
  return FindHighestRate(start, [&](double rate) -> absl::StatusOr<bool> {
    int64_t good = 0, all = 0;
    for (int64_t k = 0; k < options.seeds; ++k) {
      TREADLE_ASSIGN_OR_RETURN(Replayed one,
                               TraceAt(options, absl::StrFormat("%.4g", rate),
                                       options.trace.seed + static_cast<uint64_t>(k)));
      TREADLE_RETURN_IF_ERROR(ReplayOne(options, target, one));
      const LoadReport& report = reports.Add(std::move(one));
      good += report.good;
      all += report.completed + report.failed;
      late += report.client_was_late ? 1 : 0;
    }
    std::fprintf(
        stderr, "%.4g requests/s: %.1f %% within the target\n", rate,
        100.0 * static_cast<double>(good) / static_cast<double>(std::max<int64_t>(all, 1)));
    return static_cast<double>(good) >= options.search * static_cast<double>(all);
  });
}

}  // namespace

absl::StatusOr<std::string> AskMetrics(const std::string& address) {
  TREADLE_ASSIGN_OR_RETURN(HttpUrl url, ParseHttpUrl(address));
  const std::string path = std::exchange(url.path, "");
  TREADLE_ASSIGN_OR_RETURN(const auto caller, HttpCaller::Open(url, nullptr, ""));
  return caller->Get(path, std::chrono::seconds(10));
}

absl::StatusOr<std::vector<Replayed>> TracesOf(LoadRunOptions& options) {
  TREADLE_ASSIGN_OR_RETURN(options.trace.input, ParseLengthRange(options.input));
  TREADLE_ASSIGN_OR_RETURN(options.trace.output, ParseLengthRange(options.output));
  if (options.rates.empty()) {
    options.rates = {options.trace_file.empty() || options.search > 0 ? "1" : "recorded"};
  }
  TREADLE_ASSIGN_OR_RETURN(options.recorded.encode, OpenEncoder(options.tokenizer));
  std::vector<Replayed> replays;
  for (const std::string& rate : options.rates) {
    for (int64_t k = 0; k < options.seeds; ++k) {
      TREADLE_ASSIGN_OR_RETURN(
          replays.emplace_back(),
          TraceAt(options, rate, options.trace.seed + static_cast<uint64_t>(k)));
      TREADLE_RETURN_IF_ERROR(CheckSteadyState(options, replays.back()));
    }
  }
  if (options.search > 0 && (options.rates.size() > 1 || options.rates[0] == "inf")) {
    return InvalidArgument("--search begins at one --request-rate, which is not inf");
  }
  if (options.search > 0 && options.report.goodput.empty()) {
    return InvalidArgument("--search needs --goodput: what the requests must be within");
  }
  return replays;
}

absl::StatusOr<std::string> RunLoad(const LoadRunOptions& options, LoadTarget& target,
                                    std::vector<Replayed> first) {
  TREADLE_ASSIGN_OR_RETURN(LoadTarget::Limits limits, target.GetLimits(std::chrono::seconds(10)));
  if (options.warmups > 0) {
    const std::vector<TraceEntry> warmup(static_cast<size_t>(options.warmups), kWarmUp);
    TREADLE_RETURN_IF_ERROR(Replay(warmup, target, options.replay).status());
  }
  Reports reports(options, std::move(limits));
  if (options.search <= 0) {
    for (Replayed& one : first) {
      TREADLE_RETURN_IF_ERROR(ReplayOne(options, target, one));
      reports.Add(std::move(one));
    }
    return reports.Write("");
  }
  TREADLE_ASSIGN_OR_RETURN(const double start, ParseRate(first[0].rate));
  int late = 0;
  TREADLE_ASSIGN_OR_RETURN(const double rate, Search(options, target, start, reports, late));
  std::string conclusion =
      absl::StrFormat("highest rate with %g %% of the requests within the target: %.4g requests/s",
                      100 * options.search, rate);
  if (late > 0) {
    conclusion +=
        absl::StrFormat("; the client itself was late in %d runs, so it may be higher", late);
  }
  TREADLE_ASSIGN_OR_RETURN(const std::string printed, reports.Write(conclusion));
  if (!options.json) return printed + conclusion + "\n";
  return printed +
         Json({{"max_request_rate", rate},
               {"share_within_goodput", options.search},
               {"runs_where_client_was_late", late}})
             .dump() +
         "\n";
}

}  // namespace treadle
