#include "server/configuration.h"

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <limits>

#include "kernels/status.h"
#include "scheduler/policy.h"
#include "server/address.h"

namespace treadle {
namespace {

struct Unit {
  const char* suffix;
  double factor;
};

// A number >= 0 with one of the units' suffixes.
absl::StatusOr<double> ParseWithUnit(const std::string& text, std::initializer_list<Unit> units,
                                     const char* expected) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  const std::string suffix(stop, end);
  for (const Unit& unit : units) {
    if (error == std::errc() && suffix == unit.suffix && std::isfinite(value) && value >= 0 &&
        value * unit.factor < 9e18) {
      return value * unit.factor;
    }
  }
  return InvalidArgument("is '", text, "', expected ", expected);
}

using Read = std::function<absl::Status(ServeOptions&, const std::string&)>;
using Show = std::function<std::string(const ServeOptions&)>;

Read ReadInteger(int64_t ServeOptions::*field, int64_t low, int64_t high) {
  return [=](ServeOptions& options, const std::string& text) {
    int64_t value = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || stop != end || value < low || value > high) {
      return InvalidArgument("is '", text, "', expected a whole number from ", low, " to ", high);
    }
    options.*field = value;
    return absl::OkStatus();
  };
}
Show ShowInteger(int64_t ServeOptions::*field, std::string if_zero = "0") {
  return [=](const ServeOptions& options) {
    return options.*field == 0 ? if_zero : std::to_string(options.*field);
  };
}

Read ReadText(std::string ServeOptions::*field) {
  return [=](ServeOptions& options, const std::string& text) {
    options.*field = text;
    return absl::OkStatus();
  };
}
Show ShowText(std::string ServeOptions::*field) {
  return [=](const ServeOptions& options) {
    return (options.*field).empty() ? "none" : options.*field;
  };
}

Read ReadChoice(std::string ServeOptions::*field, std::vector<std::string> choices) {
  return [=](ServeOptions& options, const std::string& text) {
    std::string all;
    for (const std::string& choice : choices) {
      if (choice == text) {
        options.*field = text;
        return absl::OkStatus();
      }
      all += (all.empty() ? "" : " or ") + choice;
    }
    return InvalidArgument("is '", text, "', expected ", all);
  };
}

Read ReadDuration(std::chrono::milliseconds ServeOptions::*field) {
  return [=](ServeOptions& options, const std::string& text) {
    auto parsed = ParseDuration(text);
    if (parsed.ok()) options.*field = *parsed;
    return parsed.status();
  };
}
Show ShowDuration(std::chrono::milliseconds ServeOptions::*field) {
  return [=](const ServeOptions& options) {
    const int64_t ms = (options.*field).count();
    return ms % 1000 == 0 ? Str(ms / 1000, "s") : Str(ms, "ms");
  };
}

absl::Status ReadListen(ServeOptions& options, const std::string& text) {
  options.listen = text;
  return ParseAddress(text).status();
}
absl::Status ReadMetricsListen(ServeOptions& options, const std::string& text) {
  options.metrics_listen = text.empty() ? "none" : text;
  return options.metrics_listen == "none" ? absl::OkStatus() : ParseAddress(text).status();
}
absl::Status ReadKvMemory(ServeOptions& options, const std::string& text) {
  options.kv_memory = 0;
  if (text == "auto") return absl::OkStatus();
  auto parsed = ParseSize(text);
  if (!parsed.ok() || *parsed == 0) {
    return InvalidArgument("is '", text, "', expected auto or a size such as 2G");
  }
  options.kv_memory = *parsed;
  return absl::OkStatus();
}
absl::Status ReadRequestBytes(ServeOptions& options, const std::string& text) {
  auto parsed = ParseSize(text);
  if (!parsed.ok() || *parsed < 1024 || *parsed > std::numeric_limits<int32_t>::max()) {
    return InvalidArgument("is '", text, "', expected a size from 1K to 2047M");
  }
  options.max_request_bytes = *parsed;
  return absl::OkStatus();
}
absl::Status ReadPageSize(ServeOptions& options, const std::string& text) {
  TREADLE_RETURN_IF_ERROR(ReadInteger(&ServeOptions::page_size, 16, 4096)(options, text));
  if ((options.page_size & (options.page_size - 1)) == 0) return absl::OkStatus();
  return InvalidArgument("is '", text, "', expected a power of two from 16 to 4096");
}
absl::Status ReadPolicy(ServeOptions& options, const std::string& text) {
  options.policy = text;
  const auto policy = Policy::Create(text);
  if (policy.ok()) return absl::OkStatus();
  return InvalidArgument("is '", text, "': ", std::string(policy.status().message()));
}
absl::Status ReadWeights(ServeOptions& options, const std::string& text) {
  auto plan = WeightPlan::Parse(text);
  if (!plan.ok()) return InvalidArgument("has ", std::string(plan.status().message()));
  options.weights = *std::move(plan);
  return absl::OkStatus();
}
absl::Status ReadOutlierThreshold(ServeOptions& options, const std::string& text) {
  constexpr float kLargest = 1e6f;
  float value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || !(value >= 0 && value <= kLargest)) {
    return InvalidArgument("is '", text, "', expected a number from 0 to ", kLargest);
  }
  options.outlier_threshold = value;
  return absl::OkStatus();
}
absl::Status ReadPin(ServeOptions& options, const std::string& text) {
  if (text != "on" && text != "off") return InvalidArgument("is '", text, "', expected on or off");
  options.pin_threads = text == "on";
  return absl::OkStatus();
}

std::string ShowBytes(int64_t bytes) {
  constexpr int64_t kMebi = 1 << 20;
  return bytes % kMebi == 0 ? Str(bytes / kMebi, "M") : std::to_string(bytes);
}

}  // namespace

absl::StatusOr<int64_t> ParseSize(const std::string& text) {
  TREADLE_ASSIGN_OR_RETURN(
      const double bytes,
      ParseWithUnit(text, {{"", 1}, {"K", 0x1p10}, {"M", 0x1p20}, {"G", 0x1p30}, {"T", 0x1p40}},
                    "a size such as 512M or 2G"));
  return static_cast<int64_t>(bytes);
}

absl::StatusOr<std::chrono::milliseconds> ParseDuration(const std::string& text) {
  TREADLE_ASSIGN_OR_RETURN(const double ms,
                           ParseWithUnit(text, {{"ms", 1}, {"s", 1e3}, {"m", 6e4}, {"h", 3.6e6}},
                                         "a time such as 30s, 500ms or 2m"));
  if (ms > 1e11) return InvalidArgument("is '", text, "', expected at most three years");
  return std::chrono::milliseconds(static_cast<int64_t>(ms));
}

const std::vector<ServeFlag>& ServeFlags() {
  using O = ServeOptions;
  constexpr int64_t kMany = 1'000'000'000;
  static const std::vector<ServeFlag> flags = {
      {"--model", "model: a .gguf file or a Hugging Face folder", true, ReadText(&O::model),
       ShowText(&O::model)},
      {"--listen", "gRPC address, host:port; port 0 takes a free one", false, ReadListen,
       ShowText(&O::listen)},
      {"--metrics-listen", "address of http://.../metrics; none: no such server", false,
       ReadMetricsListen, ShowText(&O::metrics_listen)},
      {"--max-batch-size", "sequences in one iteration, at most", true,
       ReadInteger(&O::max_batch_size, 1, 65536), ShowInteger(&O::max_batch_size)},
      {"--max-batch-tokens", "tokens in one iteration, at most; longer prompts are split", true,
       ReadInteger(&O::max_batch_tokens, 2, 1 << 20), ShowInteger(&O::max_batch_tokens)},
      {"--max-queue", "waiting requests, at most; more get RESOURCE_EXHAUSTED", false,
       ReadInteger(&O::max_queue, 1, kMany), ShowInteger(&O::max_queue)},
      {"--max-context", "prompt and generated tokens of one sequence; 0: what the model allows",
       true, ReadInteger(&O::max_context, 0, kMany), ShowInteger(&O::max_context, "the model's")},
      {"--kv-memory", "bytes for the K/V cache (2G, 512M), or auto", true, ReadKvMemory,
       [](const O& o) { return o.kv_memory == 0 ? "auto" : ShowBytes(o.kv_memory); }},
      {"--kv-dtype", "type of the K/V cache: f16 or f32", true,
       ReadChoice(&O::kv_dtype, {"f16", "f32"}), ShowText(&O::kv_dtype)},
      {"--page-size", "tokens in one K/V page: a power of two from 16", true, ReadPageSize,
       ShowInteger(&O::page_size)},
      {"--weights",
       "convert matrices while loading: nf4, int8, fp8, q4_0, kbit-int4:64 ...; parts of the model "
       "by name: 'nf4,lm_head=int8,blk.0.=keep'",
       true, ReadWeights,
       [](const O& o) { return o.weights.empty() ? "as stored" : o.weights.text(); }},
      {"--outlier-threshold",
       "int8 weights: activations this large multiply as floats; 0: none do; default: what the "
       "checkpoint says, else 6",
       true, ReadOutlierThreshold,
       [](const O& o) {
         return o.outlier_threshold ? Str(*o.outlier_threshold) : "the model's, else 6";
       }},
      {"--outlier-rule",
       "int8 weights: outliers per-row, or columns per-call (the paper's; answers depend on the "
       "batch)",
       true, ReadChoice(&O::outlier_rule, {"per-row", "per-call"}), ShowText(&O::outlier_rule)},
      {"--compute", "arithmetic of quantized weights: auto, exact, int8 or int16", true,
       ReadChoice(&O::compute, {"auto", "exact", "int8", "int16"}), ShowText(&O::compute)},
      {"--policy", "fcfs (iteration-level) or request-level (the baseline)", false, ReadPolicy,
       ShowText(&O::policy)},
      {"--threads", "compute threads; 0: one per CPU of this process", true,
       ReadInteger(&O::threads, 0, 4096), ShowInteger(&O::threads, "one per CPU")},
      {"--pin-threads", "bind each compute thread to one CPU: on or off", true, ReadPin,
       [](const O& o) { return o.pin_threads ? "on" : "off"; }},
      {"--engine-depth", "iterations in flight at once: 1 or 2", true,
       ReadInteger(&O::engine_depth, 1, 2), ShowInteger(&O::engine_depth)},
      {"--default-max-new-tokens", "for requests that give none; clipped to the context", false,
       ReadInteger(&O::default_max_new_tokens, 1, kMany), ShowInteger(&O::default_max_new_tokens)},
      {"--drain-timeout", "after SIGTERM, accepted requests may take this long", false,
       ReadDuration(&O::drain_timeout), ShowDuration(&O::drain_timeout)},
      {"--stream-stall-timeout", "a client that reads nothing for this long is cancelled", false,
       ReadDuration(&O::stream_stall_timeout), ShowDuration(&O::stream_stall_timeout)},
      {"--iteration-deadline", "an iteration that takes longer is given up, with all in it", true,
       ReadDuration(&O::iteration_deadline), ShowDuration(&O::iteration_deadline)},
      {"--max-request-bytes", "size of one request message, at most", false, ReadRequestBytes,
       [](const O& o) { return ShowBytes(o.max_request_bytes); }},
      {"--ledger-file", "write the iteration ledger there, one JSON line per iteration", false,
       ReadText(&O::ledger_file), ShowText(&O::ledger_file)},
  };
  return flags;
}

void AddServeFlags(CLI::App& command, ServeOptions& options, bool engine_only) {
  for (const ServeFlag& flag : ServeFlags()) {
    if (engine_only && !flag.engine) continue;
    CLI::Option* option = command.add_option_function<std::string>(
        flag.name,
        [&flag, &options](const std::string& text) {
          const absl::Status status = flag.read(options, text);
          if (!status.ok()) {
            throw CLI::ValidationError(flag.name, std::string(status.message()));
          }
        },
        flag.help);
    option->default_str(flag.show(options));
    option->type_name("");
  }
}

absl::Status CheckServeOptions(const ServeOptions& options) {
  if (options.model.empty()) {
    return InvalidArgument("--model is missing, expected a .gguf file or a Hugging Face folder");
  }
  if (options.max_batch_tokens <= options.max_batch_size) {
    return InvalidArgument("--max-batch-tokens is ", options.max_batch_tokens,
                           ", expected more than --max-batch-size (", options.max_batch_size, ")");
  }
  return absl::OkStatus();
}

std::string Describe(const ServeOptions& options) {
  std::string text;
  for (const ServeFlag& flag : ServeFlags()) {
    text += Str(flag.name + 2, " = ", flag.show(options), "\n");
  }
  return text;
}

}  // namespace treadle
