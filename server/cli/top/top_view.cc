#include "server/cli/top/top_view.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "server/cli/help/terminal.h"

namespace treadle {
namespace {

using absl::StrFormat;
using Json = nlohmann::ordered_json;

constexpr int kBarWidth = 20;

// The heights of a history's bars, and the characters that stand for them in a line until it is
// cut.
constexpr int kHeights = 8;
constexpr char kLowest = '\x01';
constexpr std::string_view kBlocks[kHeights] = {"\u2581", "\u2582", "\u2583", "\u2584",
                                                "\u2585", "\u2586", "\u2587", "\u2588"};
constexpr std::string_view kPlain = "_.-:=+*#";

std::string Printable(const std::string& text, bool blocks = false) {
  std::string shown;
  for (const char c : text) {
    const int height = c - kLowest;
    if (height >= 0 && height < kHeights) {
      shown += blocks ? kBlocks[height] : kPlain.substr(static_cast<size_t>(height), 1);
    } else {
      shown += c < 0x20 || c > 0x7e ? '?' : c;
    }
  }
  return shown;
}

// A line, with the style of its text (help/terminal.h) behind a label of so many characters.
struct Row {
  Row() = default;
  Row(std::string words, std::string_view look = {}, size_t label_size = 0)  // NOLINT(*)
      : text(std::move(words)), style(look), label(label_size) {}
  std::string text;
  std::string_view style;
  size_t label = 0;
};
using Rows = std::vector<Row>;

std::string Shown(const Row& row, size_t width, const TopStyle& style) {
  const std::string text = row.text.substr(0, width);
  const size_t label = std::min(row.label, text.size());
  const std::string rest = Printable(text.substr(label), style.blocks);
  const bool styled = style.colours && !row.style.empty() && !rest.empty();
  return Styled(Printable(text.substr(0, label)), kCyan, style.colours && label > 0) +
         Styled(rest, row.style, styled);
}

std::string TimeText(std::chrono::system_clock::time_point time, const char* format) {
  return absl::FormatTime(format, absl::FromChrono(time), absl::UTCTimeZone());
}

std::string Span(double seconds) {
  if (!(seconds < 1e12)) return "-";  // no clock says that
  if (seconds < 1e-3) return StrFormat("%.0f us", seconds * 1e6);
  if (seconds < 1) return StrFormat("%.1f ms", seconds * 1e3);
  if (seconds < 60) return StrFormat("%.1f s", seconds);
  const auto whole = static_cast<int64_t>(seconds);
  if (whole < 3600) return StrFormat("%dm%02ds", whole / 60, whole % 60);
  if (whole < 86400) return StrFormat("%dh%02dm", whole / 3600, whole / 60 % 60);
  return StrFormat("%dd%02dh", whole / 86400, whole / 3600 % 24);
}

std::string Rate(double rate) { return StrFormat("%.*f/s", rate < 99.95 ? 1 : 0, rate); }

std::string Count(double count) {
  const char* const units[] = {"", " K", " M", " G", " T"};
  size_t unit = 0;
  for (; count >= 999.95 && unit + 1 < std::size(units); ++unit) count /= 1000;
  return StrFormat("%.*f%s", unit == 0 ? 0 : 1, count, units[unit]);
}

// "12/32", or "12" where there is no limit.
std::string OutOf(int64_t number, int64_t limit) {
  return limit > 0 ? absl::StrCat(number, "/", limit) : absl::StrCat(number);
}

std::string Both(const std::optional<TopPercentiles>& value) {
  return value ? "p50 " + Span(value->p50) + "  p99 " + Span(value->p99) : "p50 -  p99 -";
}

double UsedShare(const TopNumbers& n) {
  return n.pages_total > 0 ? static_cast<double>(n.pages_used) / static_cast<double>(n.pages_total)
                           : 0;
}

std::string SharesText(const std::optional<TopShares>& shares) {
  if (!shares) return "-";
  return StrFormat(
      "compute %.0f%%  sample %.0f%%  receive %.0f%%  bubble %.0f%%  idle %.0f%%; host %.1f%%",
      100 * shares->compute, 100 * shares->sample, 100 * shares->receive, 100 * shares->bubble,
      100 * shares->idle, 100 * shares->schedule);
}

std::string Bar(double share) {
  const int filled = static_cast<int>(std::lround(kBarWidth * std::clamp(share, 0.0, 1.0)));
  return "[" + std::string(filled, '#') + std::string(kBarWidth - filled, '.') + "]";
}

Row Labelled(const char* label, const std::string& text, std::string_view style = {}) {
  const std::string begin = StrFormat("%-11s ", label);
  return {begin + text, style, begin.size()};
}

// Bars as high as the values' share of the highest one.
std::string History(const std::vector<double>& values) {
  const double highest = *std::ranges::max_element(values);
  std::string bars;
  for (const double value : values) {
    const double share = highest > 0 && std::isfinite(value / highest) ? value / highest : 0;
    bars += static_cast<char>(
        kLowest + std::clamp(static_cast<int>(std::ceil(share * kHeights)) - 1, 0, kHeights - 1));
  }
  return bars;
}

// As much of the history as a line of `width` has room for.
void AddHistory(const TopNumbers& n, int width, Rows& rows) {
  if (n.history.size() < 2) return;
  constexpr int kOthers = 32;  // label and highest value
  const auto room = static_cast<size_t>(std::max(width - kOthers, 2));
  std::vector<double> tokens, waiting;
  for (size_t i = n.history.size() - std::min(room, n.history.size()); i < n.history.size(); ++i) {
    tokens.push_back(n.history[i].token_rate);
    waiting.push_back(static_cast<double>(n.history[i].waiting));
  }
  rows.push_back(Labelled(
      "tokens/s", History(tokens) + "  most " + Rate(*std::ranges::max_element(tokens)), kGreen));
  rows.push_back(Labelled("waiting",
                          History(waiting) + "  most " + Count(*std::ranges::max_element(waiting)),
                          kYellow));
}

std::string TroubleText(const TopReport& report) {
  // The reason is long, and a terminal may be narrow.
  return "no answer" +
         (report.retry_in ? StrFormat("; next try in %.1f s",
                                      std::chrono::duration<double>(*report.retry_in).count())
                          : "") +
         " (" + report.trouble.ToString() + ")";
}

std::string ModelText(const TopModel& model) {
  return StrFormat("%s (%s, %s parameters, context %d)", model.name, model.architecture,
                   Count(static_cast<double>(model.parameters)), model.max_context);
}

std::string ServerText(const TopModel& model) {
  return "treadle " + model.version +
         (model.sha256.empty() ? "" : ", sha256 " + model.sha256.substr(0, 12)) + ", " +
         model.backend;
}

std::string StateText(const TopNumbers& n) {
  std::string text = n.uptime > 0 ? "up " + Span(n.uptime) : "up";
  if (n.draining) text += "; draining: no new requests";
  if (n.running > 0 && n.seconds > 0 && n.iterations == 0) {
    text += "; no iteration for " + Span(n.since_iteration);
  }
  if (n.lost > 0) absl::StrAppend(&text, "; ", n.lost, " ledger records missed");
  return text;
}

void AddNumbers(const TopNumbers& n, int width, Rows& lines) {
  const std::string reserved = n.reserved > 0 ? absl::StrCat("  holding pages ", n.reserved) : "";
  lines.push_back(Labelled("requests", "running " + OutOf(n.running, n.running_limit) +
                                           "  waiting " + OutOf(n.waiting, n.waiting_limit) +
                                           reserved));
  const double used = UsedShare(n);
  lines.push_back(Labelled("K/V cache",
                           Bar(used) + StrFormat(" %3.0f%%  ", 100 * used) +
                               OutOf(n.pages_used, n.pages_total) + " pages",
                           used < 0.7 ? kGreen : (used < 0.9 ? kYellow : kRed)));
  if (!n.adapters.empty()) {
    std::string each;
    for (const auto& [name, requests] : n.adapters) {
      absl::StrAppend(&each, each.empty() ? "" : "  ", name, " ", requests);
    }
    lines.push_back(Labelled("adapters", each));
  }
  if (n.seconds == 0) return;  // nothing is known yet of what takes time
  lines.push_back(Labelled("ended", "finished " + Rate(n.finished_rate) +
                                        "  cancelled, late or failed " + Rate(n.broken_rate)));
  lines.push_back(Labelled("tokens", "prompt " + Rate(n.prompt_rate) + "  decode " +
                                         Rate(n.decode_rate) + "  from the prefix cache " +
                                         Rate(n.cached_rate)));
  lines.push_back(Labelled("iterations", Rate(n.iterations_rate) + "  " + Both(n.iteration)));
  lines.push_back(Labelled(
      "batch", StrFormat("mean %.1f requests, %.1f tokens", n.mean_requests, n.mean_tokens)));
  lines.push_back(Labelled("time", SharesText(n.shares)));
  lines.push_back(Labelled("queued", Both(n.queued)));
  lines.push_back(Labelled("first token", Both(n.first_token)));
  lines.push_back(Labelled("per token", Both(n.per_token)));
  AddHistory(n, width, lines);
}

// Adds requests that run, then those that wait, in `room` lines.
void AddRequests(const TopNumbers& n, size_t room, Rows& lines) {
  if ((n.longest.empty() && n.longest_waiting.empty()) || room < 3) return;
  const size_t most = lines.size() + room;
  lines.emplace_back();
  const auto add = [&](const std::vector<std::string>& cells, const std::string& key,
                       std::string_view style) {
    std::string line;
    for (const std::string& cell : cells) absl::StrAppendFormat(&line, "%10s ", cell);
    lines.push_back({line + (key.empty() ? "" : " " + key), style});
  };
  const auto named = [](const TopRequest& request) { return !request.key_name.empty(); };
  const bool keys =
      std::ranges::any_of(n.longest, named) || std::ranges::any_of(n.longest_waiting, named);
  add({"REQUEST", "WAITS", "RUNS", "PROMPT", "DECODED"}, keys ? "KEY" : "", kBold);
  for (const auto* requests : {&n.longest, &n.longest_waiting}) {
    const bool runs = requests == &n.longest;
    for (const TopRequest& each : *requests) {
      const std::string time = (each.at_least ? ">" : "") + Span(each.seconds);
      add({absl::StrCat(each.id), runs ? "-" : time, runs ? time : "-",
           absl::StrCat(each.prompt_tokens), runs ? absl::StrCat(each.decoded_tokens) : "-"},
          each.key_name, runs ? "" : kYellow);
    }
  }
  lines.resize(std::min(lines.size(), most));
}

Json ToJson(const std::vector<TopRequest>& requests) {
  Json all = Json::array();
  for (const TopRequest& request : requests) {
    all.push_back({{"request", request.id},
                   {"seconds", request.seconds},
                   {"prompt_tokens", request.prompt_tokens},
                   {"decoded_tokens", request.decoded_tokens},
                   {"at_least", request.at_least},
                   {"key", request.key_name}});
  }
  return all;
}

Json ToJson(const std::optional<TopShares>& shares) {
  if (!shares) return nullptr;
  return {{"compute", shares->compute}, {"sample", shares->sample}, {"receive", shares->receive},
          {"bubble", shares->bubble},   {"idle", shares->idle},     {"schedule", shares->schedule}};
}

Json ToJson(const std::optional<TopPercentiles>& value) {
  if (!value) return nullptr;
  return {{"p50", value->p50}, {"p99", value->p99}};
}

void Put(const TopNumbers& n, Json& json) {
  json["uptime"] = n.uptime;
  json["draining"] = n.draining;
  json["running"] = n.running;
  json["running_limit"] = n.running_limit;
  json["waiting"] = n.waiting;
  json["reserved"] = n.reserved;
  json["waiting_limit"] = n.waiting_limit;
  json["kv_pages_used"] = n.pages_used;
  json["kv_pages_total"] = n.pages_total;
  json["interval"] = n.seconds;
  json["iterations"] = n.iterations;
  json["lost_records"] = n.lost;
  json["since_iteration"] = n.since_iteration;
  json["iterations_per_second"] = n.iterations_rate;
  json["prompt_tokens_per_second"] = n.prompt_rate;
  json["decode_tokens_per_second"] = n.decode_rate;
  json["cached_tokens_per_second"] = n.cached_rate;
  json["finished_per_second"] = n.finished_rate;
  json["broken_per_second"] = n.broken_rate;
  json["batch"] = {{"mean_requests", n.mean_requests}, {"mean_tokens", n.mean_tokens}};
  json["window"] = n.window;
  json["iteration_seconds"] = ToJson(n.iteration);
  json["queued_seconds"] = ToJson(n.queued);
  json["first_token_seconds"] = ToJson(n.first_token);
  json["per_token_seconds"] = ToJson(n.per_token);
  json["time_shares"] = ToJson(n.shares);
  json["adapters"] = Json::object();
  for (const auto& [name, requests] : n.adapters) json["adapters"][name] = requests;
  json["longest"] = ToJson(n.longest);
  json["longest_waiting"] = ToJson(n.longest_waiting);
}

}  // namespace

std::vector<std::string> TopScreen(const TopReport& report, int width, int height,
                                   const TopStyle& style) {
  Rows rows;
  std::string title = (style.paused ? "treadle top (paused)  " : "treadle top  ") + report.target +
                      "  " + TimeText(report.time, "%H:%M:%S UTC") + "  every " +
                      Span(std::chrono::duration<double>(report.interval).count());
  if (report.numbers && report.numbers->window > 0) {
    title += "; p50, p99 of the last " + Span(report.numbers->window);
  }
  rows.push_back({std::move(title), kBold});
  if (!report.model.version.empty()) {
    rows.push_back(ModelText(report.model));
    rows.push_back(ServerText(report.model));
  }
  const bool keys = style.keys && height > 2;
  const size_t room = static_cast<size_t>(std::max(height, 0)) - (keys ? 1 : 0);
  if (!report.trouble.ok()) {
    rows.push_back({TroubleText(report), kRed});
  } else if (report.numbers) {
    const std::string state = StateText(*report.numbers);
    rows.push_back({state, state.find(';') == state.npos ? std::string_view() : kYellow});
    rows.emplace_back();
    AddNumbers(*report.numbers, width, rows);
    AddRequests(*report.numbers, room > rows.size() ? room - rows.size() : 0, rows);
  } else {
    rows.emplace_back("connecting");
  }
  rows.resize(keys ? room : std::min(rows.size(), room));
  if (keys) rows.push_back({"q quit   p pause or go on   Ctrl-Z to the shell", kDim});
  std::vector<std::string> lines;
  for (const Row& row : rows) {
    lines.push_back(Shown(row, static_cast<size_t>(std::max(width, 0)), style));
  }
  return lines;
}

std::string TopLine(const TopReport& report) {
  std::string line = TimeText(report.time, "%Y-%m-%dT%H:%M:%SZ ");
  if (!report.trouble.ok() || !report.numbers) {
    return Printable(line + report.target + ": " + TroubleText(report));
  }
  const TopNumbers& n = *report.numbers;
  line += "running " + OutOf(n.running, n.running_limit) + " waiting " +
          OutOf(n.waiting, n.waiting_limit) + " pages " + OutOf(n.pages_used, n.pages_total) +
          " finished " + Rate(n.finished_rate) + " broken " + Rate(n.broken_rate) + " prompt " +
          Rate(n.prompt_rate) + " decode " + Rate(n.decode_rate) + " iterations " +
          Rate(n.iterations_rate) + " " + Both(n.iteration) +
          StrFormat(" batch %.1f idle ", n.mean_requests) +
          (n.shares ? StrFormat("%.0f%%", 100 * n.shares->idle) : "-");
  return Printable(line + "; " + StateText(n));
}

std::string TopJson(const TopReport& report) {
  Json json;
  json["time"] = std::chrono::duration<double>(report.time.time_since_epoch()).count();
  json["target"] = report.target;
  if (!report.model.version.empty()) {
    json["model"] = report.model.name;
    json["version"] = report.model.version;
    json["backend"] = report.model.backend;
    json["sha256"] = report.model.sha256;
    json["max_context"] = report.model.max_context;
  }
  if (!report.trouble.ok() || !report.numbers) {
    json["error"] = report.trouble.ToString();
    json["retry_in"] = report.retry_in
                           ? Json(std::chrono::duration<double>(*report.retry_in).count())
                           : Json(nullptr);
  } else {
    Put(*report.numbers, json);
  }
  // A name may be no UTF-8.
  return json.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

}  // namespace treadle
