#include "engine/record/recorded_requests.h"

#include <nlohmann/json.hpp>

#include "base/status.h"

namespace treadle {
namespace {

using Json = nlohmann::ordered_json;

// Readers of lines that may be anything: what is missing, or of another type, is empty.
Json Parse(const std::string& line) {
  return Json::parse(line, nullptr, /*allow_exceptions=*/false);
}
Json ListIn(const Json& line, const char* key) {
  if (!line.is_object()) return Json::array();
  const auto found = line.find(key);
  return found != line.end() && found->is_array() ? *found : Json::array();
}
std::optional<uint64_t> NumberIn(const Json& object, const char* key) {
  if (!object.is_object()) return std::nullopt;
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number_unsigned()) return std::nullopt;
  return found->get<uint64_t>();
}
std::string Shown(const Json& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
}

}  // namespace

void RecordedRequests::Follow(const IterationPlan& plan) {
  for (const SequenceStart& start : plan.starts) {
    first_[{plan.epoch, start.sequence}] = start.sequence - start.candidate;
  }
  std::vector<SequenceId>& groups = unnamed_[{plan.epoch, plan.iteration}];
  for (const Step& step : plan.steps) {
    const auto first = first_.find({plan.epoch, step.sequence});
    const SequenceId group = first == first_.end() ? step.sequence : first->second;
    if (groups.empty() || groups.back() != group) groups.push_back(group);
  }
}

void RecordedRequests::Follow(const std::string& ledger_line) {
  const Json line = Parse(ledger_line);
  for (const char* const list : {"arrivals", "members", "ends"}) {
    for (const Json& one : ListIn(line, list)) {
      const auto request = NumberIn(one, "request");
      if (!request) continue;
      const auto id = one.find("request_id");
      std::string& called = all_[*request];
      if (id != one.end() && id->is_string()) called = id->get<std::string>();
    }
  }
  const uint64_t epoch = NumberIn(line, "epoch").value_or(0);
  const auto groups = unnamed_.extract({epoch, NumberIn(line, "iteration").value_or(0)});
  const Json members = ListIn(line, "members");
  if (groups.empty() || groups.mapped().size() != members.size()) return;
  for (size_t i = 0; i < members.size(); ++i) {
    const auto request = NumberIn(members[i], "request");
    if (request) requests_[{epoch, groups.mapped()[i]}] = *request;
  }
}

absl::StatusOr<uint64_t> RecordedRequests::Find(const std::string& id) const {
  for (const auto& [request, called] : all_) {
    if (id == Str(request) || id == called) return request;
  }
  if (all_.empty()) return NotFound("the recording names no request");
  return NotFound("the recording has no request '", id,
                  "', expected what its client called it, or ", all_.begin()->first, " to ",
                  all_.rbegin()->first);
}

std::string RecordedRequests::TextOf(const std::string& ledger_line, uint64_t request) {
  std::string text;
  const Json line = Parse(ledger_line);
  for (const auto& [list, verb] : {std::pair("arrivals", "arrived "), {"ends", "ended "}}) {
    for (const Json& one : ListIn(line, list)) {
      if (NumberIn(one, "request") == request) text += Str(verb, Shown(one), "\n");
    }
  }
  return text;
}

std::optional<uint64_t> RecordedRequests::RequestOf(uint64_t epoch, SequenceId sequence) const {
  const auto first = first_.find({epoch, sequence});
  if (first == first_.end()) return std::nullopt;
  const auto request = requests_.find({epoch, first->second});
  if (request == requests_.end()) return std::nullopt;
  return request->second;
}

}  // namespace treadle
