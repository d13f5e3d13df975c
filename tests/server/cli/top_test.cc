// Views that `treadle top` makes of invented ledger records and loads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "server/cli/top/top_state.h"
#include "server/cli/top/top_view.h"
#include "server/grpc/inference.pb.h"

namespace treadle {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::Pair;

TopState::Time At(double seconds) {
  return TopState::Time(std::chrono::duration_cast<TopState::Time::duration>(
      std::chrono::duration<double>(100 + seconds)));
}

struct Member {
  uint64_t request;
  int tokens;
  bool initiation;
};

v1::LedgerRecord Record(uint64_t iteration, const std::vector<Member>& members) {
  v1::LedgerRecord record;
  record.set_epoch(1);
  record.set_iteration(iteration);
  for (const Member& member : members) {
    v1::LedgerMember* out = record.add_members();
    out->set_request(member.request);
    out->set_tokens(member.tokens);
    out->set_initiation(member.initiation);
  }
  return record;
}

void AddEnd(uint64_t request, const std::string& reason, int tokens, double queued, double first,
            double total, v1::LedgerRecord& record) {
  v1::LedgerEnd* end = record.add_ends();
  end->set_request(request);
  end->set_reason(reason);
  end->set_output_tokens(tokens);
  end->mutable_timing()->set_queued(queued);
  end->mutable_timing()->set_first_token(first);
  end->mutable_timing()->set_total(total);
}

std::vector<uint64_t> Ids(const TopNumbers& numbers) {
  std::vector<uint64_t> ids;
  for (const TopRequest& request : numbers.longest) ids.push_back(request.id);
  return ids;
}

TEST(TopState, RatesAreOverTheIntervalAndBeginAnewWithEach) {
  TopState state(At(0));
  for (int i = 1; i <= 100; ++i) {
    v1::LedgerRecord record = Record(i, {{1, 30, true}, {2, 1, false}, {3, 3, false}});
    record.set_compute(i * 0.009);
    record.set_sample(i * 0.001);
    record.set_receive(0.002);
    record.set_bubble(0.004);
    record.set_schedule(0.001);
    state.Add(record, At(1));
  }
  const TopNumbers first = state.Close({}, At(4));
  EXPECT_DOUBLE_EQ(first.seconds, 4);
  EXPECT_EQ(first.iterations, 100);
  EXPECT_DOUBLE_EQ(first.iterations_rate, 25);
  EXPECT_DOUBLE_EQ(first.prompt_rate, 750);
  EXPECT_DOUBLE_EQ(first.decode_rate, 100);
  EXPECT_DOUBLE_EQ(first.mean_requests, 3);
  EXPECT_DOUBLE_EQ(first.mean_tokens, 34);
  // Nearest rank of 10 ms, 20 ms ... 1 s.
  EXPECT_NEAR(first.iteration->p50, 0.50, 1e-12);
  EXPECT_NEAR(first.iteration->p99, 0.99, 1e-12);
  EXPECT_DOUBLE_EQ(first.since_iteration, 3);

  const TopNumbers second = state.Close({}, At(6));
  EXPECT_DOUBLE_EQ(second.seconds, 2);
  EXPECT_EQ(second.iterations, 0);
  EXPECT_EQ(second.decode_rate, 0);
  EXPECT_EQ(second.mean_requests, 0);
  EXPECT_FALSE(second.iteration.has_value());
  EXPECT_DOUBLE_EQ(second.since_iteration, 5);
  EXPECT_EQ(state.Close({}, At(6)).iterations_rate, 0);  // no time passed
}

// Nearest rank of what ended within the window, however it lies in intervals.
TEST(TopState, PercentilesAreOverTheWindow) {
  TopState state(At(0), std::chrono::seconds(10));
  for (int second = 1; second <= 30; ++second) {
    v1::LedgerRecord record = Record(second, {{1, 1, false}});
    record.set_compute(second);
    state.Add(record, At(second - 0.5));
    const TopNumbers n = state.Close({}, At(second));
    const int first = std::max(1, second - 9);  // the tenth before it ended 10 s ago
    EXPECT_EQ(n.iteration->p99, second);
    EXPECT_EQ(n.iteration->p50, first + (second - first) / 2);
    EXPECT_DOUBLE_EQ(n.window, second - first + 1);
  }
  const TopNumbers late = state.Close({}, At(1000));
  EXPECT_FALSE(late.iteration.has_value());
  EXPECT_DOUBLE_EQ(late.window, 970);  // the interval's own
}

TEST(TopState, HistoryIsOfTheLastIntervals) {
  TopState state(At(0));
  v1::GetLoadResponse load;
  TopNumbers n;
  for (int i = 1; i <= 70; ++i) {
    state.Add(Record(i, {{1, i, true}, {2, i, false}}), At(i));
    load.set_waiting(i);
    n = state.Close(load, At(i));
  }
  ASSERT_EQ(n.history.size(), kTopHistory);
  EXPECT_DOUBLE_EQ(n.history.front().token_rate, 2 * 11);
  EXPECT_EQ(n.history.front().waiting, 11);
  EXPECT_DOUBLE_EQ(n.history.back().token_rate, 2 * 70);
}

TEST(TopState, AdaptersAreInTheOrderOfTheirRequests) {
  v1::GetLoadResponse load;
  for (const auto& [name, requests] : {std::pair("sql", 2), {"json", 3}, {"a", 2}}) {
    (*load.mutable_adapters())[name] = requests;
  }
  TopReport report = {.target = "here", .numbers = TopState(At(0)).Close(load, At(1))};
  EXPECT_THAT(report.numbers->adapters, ElementsAre(Pair("json", 3), Pair("a", 2), Pair("sql", 2)));
  EXPECT_THAT(TopScreen(report, 80, 40, {}), Contains(HasSubstr("json 3  a 2  sql 2")));
  EXPECT_THAT(TopJson(report), HasSubstr(R"("adapters":{"json":3,"a":2,"sql":2})"));
  report.numbers = TopState(At(0)).Close({}, At(1));
  EXPECT_THAT(TopScreen(report, 80, 40, {}), Not(Contains(HasSubstr("adapters"))));
}

TEST(TopState, NothingIsLostOrCountedTwiceWhereverIntervalsEnd) {
  std::mt19937 random(7);
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  for (int round = 0; round < 50; ++round) {
    TopState state(At(0));
    double now = 0, prompt = 0, decode = 0, iterations = 0;
    double seen_prompt = 0, seen_decode = 0, seen_iterations = 0;
    const auto close = [&] {
      const TopNumbers n = state.Close({}, At(now));
      seen_prompt += n.prompt_rate * n.seconds;
      seen_decode += n.decode_rate * n.seconds;
      seen_iterations += static_cast<double>(n.iterations);
    };
    std::vector<v1::LedgerRecord> all;
    for (int i = 0; i < 100; ++i) {
      std::vector<Member> members;
      for (int m = below(4); m > 0; --m) {
        members.push_back({static_cast<uint64_t>(m), 1 + below(9), below(2) == 0});
        (members.back().initiation ? prompt : decode) += members.back().tokens;
      }
      iterations += members.empty() ? 0 : 1;
      now += 0.25;
      all.push_back(Record(i, members));
      state.Add(all.back(), At(now));
      if (below(10) == 0) {  // a reader that begins again a little earlier
        for (int k = std::max(0, i - 5); k <= i; ++k) state.Add(all[k], At(now));
      }
      if (below(5) == 0) close();
    }
    now += 1;
    close();
    EXPECT_NEAR(seen_prompt, prompt, 1e-6);
    EXPECT_NEAR(seen_decode, decode, 1e-6);
    EXPECT_EQ(seen_iterations, iterations);
  }
}

TEST(TopState, SharesAreOfTheTimeThatIterationsAccountFor) {
  TopState state(At(0));
  v1::GetLoadResponse busy, idle;
  busy.set_running(1);
  const auto add = [&](uint64_t iteration, double compute, double at) {
    v1::LedgerRecord record = Record(iteration, {{1, 1, false}});
    record.set_compute(compute);
    record.set_sample(compute / 4);
    record.set_receive(compute / 8);
    record.set_bubble(compute / 16);
    record.set_schedule(0.01);
    state.Add(record, At(at));
  };
  // One is under way: nothing is known of the time.
  EXPECT_FALSE(state.Close(busy, At(1)).shares);
  EXPECT_FALSE(state.Close(busy, At(2)).shares);
  add(1, 1.6, 4);  // it took 2.3 s
  std::optional<TopShares> shares = state.Close(busy, At(5)).shares;
  ASSERT_TRUE(shares);
  EXPECT_NEAR(shares->compute, 1.6 / 4, 1e-9);
  EXPECT_NEAR(shares->sample, 0.4 / 4, 1e-9);
  EXPECT_NEAR(shares->receive, 0.2 / 4, 1e-9);
  EXPECT_NEAR(shares->bubble, 0.1 / 4, 1e-9);
  EXPECT_NEAR(shares->idle, 1.7 / 4, 1e-9);
  EXPECT_NEAR(shares->schedule, 0.01 / 4, 1e-9);
  // The second since then is still open; nothing runs at the end.
  add(2, 1.6, 7);
  shares = state.Close(idle, At(14)).shares;
  ASSERT_TRUE(shares);
  EXPECT_NEAR(shares->compute, 0.16, 1e-9);
  EXPECT_NEAR(shares->idle, 0.77, 1e-9);
  EXPECT_EQ(state.Close(idle, At(15)).shares->idle, 1);
  // More than there was time for.
  add(3, 16, 16);
  shares = state.Close(idle, At(16)).shares;
  ASSERT_TRUE(shares);
  EXPECT_NEAR(shares->compute, 16.0 / 23, 1e-9);
  EXPECT_EQ(shares->idle, 0);
}

TEST(TopState, ANewEpochBeginsItsIterationsAgain) {
  TopState state(At(0));
  state.Add(Record(7, {{1, 1, false}}), At(1));
  v1::LedgerRecord next = Record(0, {{2, 5, true}});
  next.set_epoch(2);
  state.Add(next, At(1));
  state.Add(Record(8, {{1, 1, false}}), At(1));  // of the epoch before: known, or too late
  EXPECT_EQ(state.Close({}, At(2)).iterations, 2);
}

TEST(TopState, EndsAreThoseByThemselvesAndTheOthers) {
  TopState state(At(0));
  v1::LedgerRecord record = Record(0, {{1, 1, false}});
  AddEnd(1, "stop", 11, 0.5, 1.0, 3.0, record);
  AddEnd(2, "length", 1, 0.25, 0.75, 0.75, record);
  AddEnd(3, "stop", 0, 9, 9, 9, record);  // brought nothing
  AddEnd(4, "cancelled", 5, 9, 9, 9, record);
  AddEnd(5, "deadline", 0, 9, 9, 9, record);
  AddEnd(6, "error", 7, 9, 9, 9, record);
  state.Add(record, At(1));
  const TopNumbers numbers = state.Close({}, At(2));
  EXPECT_DOUBLE_EQ(numbers.finished_rate, 1.5);
  EXPECT_DOUBLE_EQ(numbers.broken_rate, 1.5);
  EXPECT_DOUBLE_EQ(numbers.queued->p50, 0.25);
  EXPECT_DOUBLE_EQ(numbers.queued->p99, 0.5);
  EXPECT_DOUBLE_EQ(numbers.first_token->p50, 0.75);
  EXPECT_DOUBLE_EQ(numbers.first_token->p99, 1.0);
  EXPECT_DOUBLE_EQ(numbers.per_token->p50, 0.2);  // 2 s for 10 tokens after the first
  EXPECT_DOUBLE_EQ(numbers.per_token->p99, 0.2);
}

TEST(TopState, RequestsRunFromTheirFirstIterationToTheirEnd) {
  TopState state(At(0));
  // The first record that we see: 5 was there before, 6 begins.
  state.Add(Record(10, {{5, 1, false}, {6, 20, true}}), At(1));
  state.Add(Record(11, {{5, 1, false}, {6, 4, true}, {7, 9, true}}), At(2));
  state.Add(Record(12, {}), At(3));  // a heartbeat
  state.Add(Record(13, {{5, 1, false}, {6, 2, false}, {7, 1, false}}), At(4));
  TopNumbers numbers = state.Close({}, At(11));
  ASSERT_THAT(Ids(numbers), ElementsAre(5, 6, 7));
  EXPECT_EQ(numbers.iterations, 3);
  EXPECT_TRUE(numbers.longest[0].at_least);
  EXPECT_FALSE(numbers.longest[1].at_least);
  EXPECT_DOUBLE_EQ(numbers.longest[1].seconds, 10);  // though nothing came since
  EXPECT_EQ(numbers.longest[1].prompt_tokens, 24);
  EXPECT_EQ(numbers.longest[1].decoded_tokens, 2);
  EXPECT_DOUBLE_EQ(numbers.longest[2].seconds, 9);

  v1::LedgerRecord end = Record(14, {{5, 1, false}, {6, 1, false}});
  AddEnd(5, "stop", 9, 0, 0, 1, end);
  state.Add(end, At(12));
  // The plan that was under way when it ended still has it.
  state.Add(Record(15, {{5, 1, false}, {6, 1, false}}), At(12));
  EXPECT_THAT(Ids(state.Close({}, At(13))), ElementsAre(6, 7));

  // Missed records may have been ends: only who shows up again is still there.
  v1::LedgerRecord after = Record(90, {{7, 1, false}});
  after.set_lost(60);
  state.Add(after, At(14));
  numbers = state.Close({}, At(15));
  EXPECT_THAT(Ids(numbers), ElementsAre(7));
  EXPECT_TRUE(numbers.longest[0].at_least);
  EXPECT_EQ(numbers.lost, 60u);
  EXPECT_EQ(state.Close({}, At(16)).lost, 0u);
}

// A stream's first record names those that are there already.
TEST(TopState, NamesOfKeysAreThoseThatArrivalsSay) {
  TopState state(At(0));
  v1::LedgerRecord record = Record(50, {{1, 1, false}, {2, 5, true}});
  for (const auto& [request, name] : {std::pair(1, "alice"), {2, "bob"}, {3, "carol"}}) {
    v1::LedgerArrival* arrival = record.add_arrivals();
    arrival->set_request(request);
    arrival->set_prompt_tokens(5);
    arrival->set_key_name(name);
  }
  state.Add(record, At(1));
  const auto named = [](const std::vector<TopRequest>& requests) {
    std::vector<std::pair<std::string, bool>> found;
    for (const TopRequest& each : requests) found.emplace_back(each.key_name, each.at_least);
    return found;
  };
  using Found = std::pair<std::string, bool>;
  TopNumbers numbers = state.Close({}, At(2));
  EXPECT_THAT(named(numbers.longest), ElementsAre(Found("alice", true), Found("bob", false)));
  EXPECT_THAT(named(numbers.longest_waiting), ElementsAre(Found("carol", true)));
  EXPECT_EQ(numbers.longest[0].prompt_tokens, 5);  // all of it had run
  // It had run before, and was not in the first iteration that we saw.
  state.Add(Record(51, {{3, 1, false}}), At(3));
  numbers = state.Close({}, At(4));
  EXPECT_THAT(named(numbers.longest),
              ElementsAre(Found("alice", true), Found("bob", false), Found("carol", true)));
  EXPECT_THAT(numbers.longest_waiting, testing::IsEmpty());
}

// From its arrival to its first iteration, or to its end, which may come first.
TEST(TopState, RequestsWaitFromTheirArrival) {
  const auto arrive = [](uint64_t request, int tokens, v1::LedgerRecord& record) {
    v1::LedgerArrival* arrival = record.add_arrivals();
    arrival->set_request(request);
    arrival->set_prompt_tokens(tokens);
  };
  const auto waiting = [](const TopNumbers& numbers) {
    std::vector<uint64_t> ids;
    for (const TopRequest& request : numbers.longest_waiting) ids.push_back(request.id);
    return ids;
  };
  TopState state(At(0));
  state.Add(Record(1, {}), At(0));
  v1::LedgerRecord record = Record(2, {{1, 5, true}});
  arrive(1, 5, record);  // runs at once
  arrive(2, 70, record);
  arrive(3, 80, record);
  state.Add(record, At(1));
  record = Record(3, {{1, 1, false}});
  arrive(4, 90, record);
  state.Add(record, At(2));
  TopNumbers numbers = state.Close({}, At(4));
  EXPECT_THAT(waiting(numbers), ElementsAre(2, 3, 4));
  EXPECT_DOUBLE_EQ(numbers.longest_waiting[0].seconds, 3);
  EXPECT_EQ(numbers.longest_waiting[0].prompt_tokens, 70);
  EXPECT_THAT(Ids(numbers), ElementsAre(1));

  record = Record(4, {{1, 1, false}, {2, 32, true}});
  AddEnd(3, "cancelled", 0, 0, 0, 1, record);
  state.Add(record, At(5));
  numbers = state.Close({}, At(6));
  EXPECT_THAT(waiting(numbers), ElementsAre(4));
  EXPECT_THAT(Ids(numbers), ElementsAre(1, 2));

  record = Record(90, {{1, 1, false}});  // what was missed may have been its beginning
  record.set_lost(9);
  state.Add(record, At(7));
  EXPECT_THAT(waiting(state.Close({}, At(8))), ElementsAre());
}

TEST(TopState, ManyRequestsGiveTheLongestInOrder) {
  TopState state(At(0));
  state.Add(Record(0, {}), At(0));
  for (int i = 0; i < 200; ++i) {
    // Every other one is older by its number and younger by its time.
    const uint64_t id = static_cast<uint64_t>(i % 2 == 0 ? 1000 - i : 1000 + i);
    state.Add(Record(i + 1, {{id, 1, true}}), At(i));
  }
  const std::vector<uint64_t> ids = Ids(state.Close({}, At(1000)));
  ASSERT_EQ(ids.size(), kTopRequests);
  EXPECT_THAT(std::vector<uint64_t>(ids.begin(), ids.begin() + 3), ElementsAre(1000, 1001, 998));
}

TEST(TopState, TheLoadIsTheServers) {
  v1::GetLoadResponse load;
  load.set_running(3);
  load.set_running_limit(32);
  load.set_waiting(5);
  load.set_queue_limit(64);
  load.set_kv_pages_total(100);
  load.set_kv_pages_free(30);
  load.set_draining(true);
  load.set_uptime(12.5);
  const TopNumbers numbers = TopState(At(0)).Close(load, At(1));
  EXPECT_EQ(numbers.running, 3);
  EXPECT_EQ(numbers.running_limit, 32);
  EXPECT_EQ(numbers.waiting, 5);
  EXPECT_EQ(numbers.waiting_limit, 64);
  EXPECT_EQ(numbers.pages_used, 70);
  EXPECT_EQ(numbers.pages_total, 100);
  EXPECT_TRUE(numbers.draining);
  EXPECT_EQ(numbers.uptime, 12.5);
}

}  // namespace
}  // namespace treadle
