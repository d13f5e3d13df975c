#include "bench/simulate/recorded_cost.h"

#include <algorithm>
#include <bit>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "base/mapped_file.h"
#include "base/status.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

size_t PowerOf(double rows) {
  return std::min<size_t>(31, std::bit_width(static_cast<uint64_t>(std::max(1.0, rows))) - 1);
}

// The work and seconds of iterations, from records in order.
class Iterations {
 public:
  // A part of a prompt may have been cached, which only its request's end says.
  void NoteEnds(const Json& record) {
    for (const Json& end : record.value("ends", Json::array())) {
      const auto id = end.at("request").get<uint64_t>();
      requests_[id] = {end.at("prompt_tokens"), end.at("cached_tokens")};
      drafts_ += end.value("draft_tokens", int64_t{0});
    }
  }

  void NoteMembers(const Json& record) {
    IterationWork work = 0;
    for (const Json& member : record.at("members")) {
      Request& request = requests_[member.at("request").get<uint64_t>()];
      const auto rows = member.at("tokens").get<double>();
      work.rows += rows;
      work.positions += rows * (request.position + (rows + 1) / 2);
      request.position += rows;
      // Every row of an increment is sampled after; of a prompt's, the last one.
      if (member.at("phase") != "initiation") {
        work.samples += rows;
      } else if (request.position >= request.prompt) {
        work.samples += 1;
      }
    }
    if (work.rows == 0) return;
    stages_ = std::max(stages_, record.value("stages", 1));
    double seconds = 0;
    for (const char* const part : {"receive", "compute", "sample", "bubble"}) {
      seconds += record.at(part).get<double>();
    }
    if (seconds > 0) found_.emplace_back(work, seconds);
  }

  const std::vector<std::pair<IterationWork, double>>& found() const { return found_; }
  int stages() const { return stages_; }
  int64_t drafts() const { return drafts_; }

 private:
  struct Request {
    double prompt = 0, position = 0;
  };
  std::map<uint64_t, Request> requests_;
  std::vector<std::pair<IterationWork, double>> found_;
  int stages_ = 1;
  int64_t drafts_ = 0;
};

}  // namespace

absl::StatusOr<RecordedCost> RecordedCost::Read(const std::string& path, uint64_t seed) {
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<MappedFile> file, MappedFile::Open(path));
  Iterations iterations;
  const auto each = [&](const auto& note) -> absl::Status {
    size_t number = 0;
    for (std::string_view rest = file->text(); !rest.empty();) {
      const std::string_view line = rest.substr(0, rest.find('\n'));
      rest.remove_prefix(std::min(rest.size(), line.size() + 1));
      ++number;
      if (line.empty()) continue;
      try {
        note(Json::parse(line));
      } catch (const Json::exception& wrong) {
        return InvalidArgument(path, ", line ", number, ": ", wrong.what(),
                               "; expected a record of --ledger-file");
      }
    }
    return absl::OkStatus();
  };
  TREADLE_RETURN_IF_ERROR(each([&](const Json& record) { iterations.NoteEnds(record); }));
  TREADLE_RETURN_IF_ERROR(each([&](const Json& record) { iterations.NoteMembers(record); }));
  if (iterations.stages() > 1) {
    return InvalidArgument(path, ": is of ", iterations.stages(), " stages, expected one");
  }
  if (iterations.drafts() > 0) {
    return InvalidArgument(path, ": has ", iterations.drafts(),
                           " guessed tokens, whose rows it does not tell; expected a server with "
                           "--speculate off");
  }
  if (iterations.found().size() < kFewest) {
    return InvalidArgument(path, ": has ", iterations.found().size(),
                           " iterations with rows, expected ", kFewest, " or more");
  }
  RecordedCost cost;
  cost.iterations_ = iterations.found().size();
  for (const auto& [work, seconds] : iterations.found()) cost.fit_.Note(work, seconds);
  std::array<double, 32> fitted = {}, took = {};
  for (const auto& [work, seconds] : iterations.found()) {
    fitted[PowerOf(work.rows)] += cost.fit_.Of(work);
    took[PowerOf(work.rows)] += seconds;
  }
  for (size_t power = 0; power < fitted.size(); ++power) {
    cost.share_[power] = fitted[power] > 0 ? took[power] / fitted[power] : 1;
  }
  double sum = 0, expected = 0;
  for (const auto& [work, seconds] : iterations.found()) {
    sum += seconds;
    expected += cost.fit_.Of(work) * cost.share_[PowerOf(work.rows)];
    if (sum < 1) continue;
    cost.slowness_.push_back(sum / expected);
    sum = expected = 0;
  }
  if (cost.slowness_.empty()) cost.slowness_ = {1};
  cost.second_ = std::mt19937_64(seed)() % cost.slowness_.size();
  return cost;
}

double RecordedCost::Next(const IterationWork& work) {
  const double seconds = fit_.Of(work) * share_[PowerOf(work.rows)] * slowness_[second_];
  over_ += seconds;
  if (over_ >= 1) {
    over_ = 0;
    second_ = (second_ + 1) % slowness_.size();
  }
  return seconds;
}

}  // namespace treadle
