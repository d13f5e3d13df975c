#include "server/cli/top/top_state.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "server/grpc/inference.pb.h"

namespace treadle {
namespace {

// Far more records than an engine has plans in flight.
constexpr uint64_t kAftermath = 256;

// Bounds what a window holds of a server with many iterations.
constexpr size_t kMaxSamples = 1 << 20;

std::optional<TopPercentiles> PercentilesOf(std::vector<double> values) {
  if (values.empty()) return std::nullopt;
  std::sort(values.begin(), values.end());
  const auto rank = [&](double share) {
    return values[static_cast<size_t>(std::ceil(share * static_cast<double>(values.size()))) - 1];
  };
  return TopPercentiles{rank(0.5), rank(0.99)};
}

std::vector<std::pair<std::string, int64_t>> Adapters(const v1::GetLoadResponse& load) {
  std::vector<std::pair<std::string, int64_t>> adapters(load.adapters().begin(),
                                                        load.adapters().end());
  std::ranges::sort(adapters, {}, [](const auto& adapter) {
    return std::pair(-adapter.second, std::string_view(adapter.first));
  });
  return adapters;
}

double SecondsBetween(TopState::Time from, TopState::Time to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

bool TopState::IsNew(const v1::LedgerRecord& record) {
  const std::pair<uint64_t, uint64_t> at = {record.epoch(), record.iteration()};
  if (last_ && at <= *last_) return false;
  last_ = at;
  return true;
}

void TopState::Add(const v1::LedgerRecord& record, Time now) {
  if (!IsNew(record)) return;
  // Missed records may have said that requests ended: those that go on show up again.
  const bool gap = records_ == 0 || record.lost() > 0;
  if (gap) {
    running_.clear();
    waiting_.clear();
  }
  for (const v1::LedgerArrival& arrival : record.arrivals()) {
    waiting_.try_emplace(arrival.request(), Running{.since = now,
                                                    .prompt_tokens = arrival.prompt_tokens(),
                                                    .at_least = records_ == 0,
                                                    .key_name = arrival.key_name()});
  }
  ++records_;
  interval_.lost += record.lost();
  AddMembers(record, now);
  AddEnds(record);
  while (!ended_at_.empty() && ended_at_.front().first + kAftermath < records_) {
    ended_.erase(ended_at_.front().second);
    ended_at_.pop_front();
  }
}

void TopState::AddMembers(const v1::LedgerRecord& record, Time now) {
  if (record.members().empty()) return;  // a heartbeat
  ++interval_.iterations;
  last_iteration_ = now;
  interval_.members += record.members_size();
  interval_.time.compute += record.compute();
  interval_.time.sample += record.sample();
  interval_.time.receive += record.receive();
  interval_.time.bubble += record.bubble();
  interval_.time.schedule += record.schedule();
  interval_.samples.iteration.push_back(record.compute() + record.sample());
  for (const v1::LedgerMember& member : record.members()) {
    (member.initiation() ? interval_.prompt_tokens : interval_.decode_tokens) += member.tokens();
    auto came = waiting_.extract(member.request());
    if (ended_.contains(member.request())) continue;
    const auto [at, is_new] = running_.try_emplace(
        member.request(), Running{.since = now, .at_least = !member.initiation()});
    Running& request = at->second;
    if (is_new && came) {
      request.key_name = std::move(came.mapped().key_name);
      if (!member.initiation()) request.prompt_tokens = came.mapped().prompt_tokens;
    }
    (member.initiation() ? request.prompt_tokens : request.decoded_tokens) += member.tokens();
  }
}

void TopState::AddEnds(const v1::LedgerRecord& record) {
  for (const v1::LedgerEnd& end : record.ends()) {
    running_.erase(end.request());
    waiting_.erase(end.request());
    if (ended_.insert(end.request()).second) ended_at_.emplace_back(records_, end.request());
    if (end.reason() != "stop" && end.reason() != "length") {
      ++interval_.broken;
      continue;
    }
    ++interval_.finished;
    interval_.cached_tokens += end.cached_tokens();
    if (end.output_tokens() == 0) continue;
    const v1::Timing& timing = end.timing();
    interval_.samples.queued.push_back(timing.queued());
    interval_.samples.first_token.push_back(timing.first_token());
    if (end.output_tokens() > 1) {
      interval_.samples.per_token.push_back((timing.total() - timing.first_token()) /
                                            (end.output_tokens() - 1));
    }
  }
}

std::vector<TopRequest> TopState::Longest(const Requests& requests, Time now) {
  std::vector<TopRequest> all;
  all.reserve(requests.size());
  for (const auto& [id, request] : requests) {
    all.push_back({.id = id,
                   .seconds = SecondsBetween(request.since, now),
                   .prompt_tokens = request.prompt_tokens,
                   .decoded_tokens = request.decoded_tokens,
                   .at_least = request.at_least,
                   .key_name = request.key_name});
  }
  // Requests that ran before we looked have run longer than later ones; ids are in order of
  // arrival.
  const auto earlier = [](const TopRequest& a, const TopRequest& b) {
    if (a.seconds != b.seconds) return a.seconds > b.seconds;
    if (a.at_least != b.at_least) return a.at_least;
    return a.id < b.id;
  };
  const size_t count = std::min(all.size(), kTopRequests);
  std::partial_sort(all.begin(), all.begin() + static_cast<ptrdiff_t>(count), all.end(), earlier);
  all.resize(count);
  return all;
}

std::optional<TopShares> TopState::TakeShares(TopShares time, bool under_way, Time now) {
  const Time until = under_way ? std::max(last_iteration_, accounted_) : now;
  const double seconds = SecondsBetween(std::exchange(accounted_, until), until);
  if (seconds <= 0) return std::nullopt;
  // More than there was: an iteration that began before we looked, or a record that came late.
  const double busy = time.compute + time.sample + time.receive + time.bubble;
  const double all = std::max(busy, seconds);
  return TopShares{.compute = time.compute / all,
                   .sample = time.sample / all,
                   .receive = time.receive / all,
                   .bubble = time.bubble / all,
                   .idle = (all - busy) / all,
                   .schedule = time.schedule / all};
}

void TopState::Keep(Samples samples) {
  const Time now = samples.end;
  past_.push_back(std::move(samples));
  size_t held = 0;
  for (const Samples& past : past_) held += past.size();
  while (past_.size() > 1 && (past_.front().end <= now - window_ || held > kMaxSamples)) {
    held -= past_.front().size();
    past_.pop_front();
  }
}

std::optional<TopPercentiles> TopState::OverWindow(std::vector<double> Samples::*kind) const {
  std::vector<double> all;
  for (const Samples& past : past_) {
    all.insert(all.end(), (past.*kind).begin(), (past.*kind).end());
  }
  return PercentilesOf(std::move(all));
}

TopNumbers TopState::Close(const v1::GetLoadResponse& load, Time now) {
  Interval done = std::exchange(interval_, {});
  const Time began = std::exchange(began_, now);
  const double seconds = SecondsBetween(began, now);
  done.samples.begin = began;
  done.samples.end = now;
  Keep(std::move(done.samples));
  const auto per_second = [&](auto amount) {
    return seconds > 0 ? static_cast<double>(amount) / seconds : 0;
  };
  const auto per_iteration = [&](int64_t amount) {
    return done.iterations > 0 ? static_cast<double>(amount) / static_cast<double>(done.iterations)
                               : 0;
  };
  if (seconds > 0) {
    history_.push_back({per_second(done.prompt_tokens + done.decode_tokens), load.waiting()});
    if (history_.size() > kTopHistory) history_.pop_front();
  }
  return {.uptime = load.uptime(),
          .draining = load.draining(),
          .running = load.running(),
          .running_limit = load.running_limit(),
          .waiting = load.waiting(),
          .reserved = load.reserved(),
          .waiting_limit = load.queue_limit(),
          .pages_used = load.kv_pages_total() - load.kv_pages_free(),
          .pages_total = load.kv_pages_total(),
          .adapters = Adapters(load),
          .longest = Longest(running_, now),
          .longest_waiting = Longest(waiting_, now),
          .since_iteration = SecondsBetween(last_iteration_, now),
          .seconds = seconds,
          .iterations = done.iterations,
          .lost = done.lost,
          .iterations_rate = per_second(done.iterations),
          .prompt_rate = per_second(done.prompt_tokens),
          .decode_rate = per_second(done.decode_tokens),
          .cached_rate = per_second(done.cached_tokens),
          .finished_rate = per_second(done.finished),
          .broken_rate = per_second(done.broken),
          .mean_requests = per_iteration(done.members),
          .mean_tokens = per_iteration(done.prompt_tokens + done.decode_tokens),
          .window = SecondsBetween(past_.front().begin, now),
          .iteration = OverWindow(&Samples::iteration),
          .queued = OverWindow(&Samples::queued),
          .first_token = OverWindow(&Samples::first_token),
          .per_token = OverWindow(&Samples::per_token),
          .shares = TakeShares(done.time, load.running() > 0, now),
          .history = {history_.begin(), history_.end()}};
}

}  // namespace treadle
