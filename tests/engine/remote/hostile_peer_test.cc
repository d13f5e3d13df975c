// A peer of the control plane that says what it likes: a worker, and a master, end the epoch or the
// attachment with an error that names the field, and stay.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "engine/plan/plan_messages.h"
#include "kernels/collectives/thread_communicator.h"
#include "models/checkpoints/fingerprint.h"
#include "tests/engine/plan_builder.h"
#include "tests/engine/remote/hostile_peers.h"
#include "tests/support/assert_ok.h"
#include "tests/support/ranks/remote_cluster.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

control::Configure HonestStage() {
  control::Configure configure;
  configure.set_stage(0);
  configure.set_stages(1);
  configure.set_tensor_parallel(1);
  configure.set_end_layer(2);
  configure.set_fingerprint(Fingerprint(*Checkpoint::Open(TinyModel()).value()).value());
  configure.set_backend("cpu");
  configure.set_compute("exact");
  configure.set_kv_dtype("f32");
  configure.set_wire("f32");
  configure.set_data_plane("gloo");
  configure.set_max_batch_tokens(32);
  configure.set_page_size(16);
  configure.set_iteration_deadline_ms(20'000);
  return configure;
}

class HostileMasters : public testing::Test {
 protected:
  HostileMasters() {
    WorkerOptions options = ClusterOptions::QuietWorker();
    options.model_path = TinyModel();
    options.version = "test";
    worker_ = *Worker::Start(std::move(options));
  }
  // The worker's answer to a stage that is honest but for `change`; "": it loads it.
  std::string AnswerTo(const std::function<void(control::Configure&)>& change) {
    // The worker may not have noticed yet that the last one is gone.
    std::optional<HostileMaster> master;
    for (int i = 0; i < 100; ++i) {
      master.emplace(worker_->address());
      if (master->Hello()) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    master->Tell([&](control::MasterMessage& message) {
      *message.mutable_configure() = HonestStage();
      change(*message.mutable_configure());
    });
    const auto answer = master->inbox().Next(
        [](const auto& message) { return message.has_failed() || message.has_loaded(); });
    if (!answer) return "no answer";
    return answer->has_failed() ? answer->failed().message() : "";
  }

  std::unique_ptr<Worker> worker_;
};

TEST_F(HostileMasters, StagesThatCannotBeAreRefused) {
  EXPECT_EQ(AnswerTo([](auto&) {}), "");
  const struct {
    void (*change)(control::Configure&);
    const char* error;
  } rows[] = {
      {[](auto& c) { c.set_max_batch_tokens(0); }, "max_batch_tokens 0, expected 1 to"},
      {[](auto& c) { c.set_max_batch_tokens(INT64_MAX); }, "max_batch_tokens 92233720368547"},
      {[](auto& c) { c.set_stages(0); }, "number of stages 0"},
      {[](auto& c) { c.set_stage(7); }, "stage 7, expected 0 to 0"},
      {[](auto& c) { c.set_stage(-1); }, "stage -1"},
      {[](auto& c) { c.set_tensor_parallel(INT32_MAX); }, "tensor-parallel degree 2147483647"},
      {[](auto& c) { c.set_max_context(-1); }, "max_context -1"},
      {[](auto& c) { c.set_page_size(INT64_MAX); }, "page size 92233720368547"},
      {[](auto& c) { c.set_iteration_deadline_ms(0); }, "iteration deadline in ms 0"},
      {[](auto& c) { c.set_first_layer(INT64_MIN); }, "layers -922337203685477"},
      {[](auto& c) { c.set_kv_dtype("q4\n"); }, "a K/V cache of 'q4\\x0a', expected one of f16"},
      {[](auto& c) { c.set_kv_dtype("bf16"); }, "to be bf16, expected f16, f32 or int8 on the CPU"},
      {[](auto& c) {
         c.set_backend("cuda");
         c.set_dtype("bf16");
         c.set_kv_dtype("int8");
       },
       "to be int8, expected f16, bf16 or f32 on a GPU"},
      {[](auto& c) { c.set_compute("x"); }, "the arithmetic 'x'"},
      {[](auto& c) { c.set_wire("x"); }, "the wire 'x'"},
      {[](auto& c) { c.set_data_plane("x"); }, "activations over 'x'"},
      {[](auto& c) { c.set_outlier_threshold(NAN); }, "outliers above nan"},
  };
  for (const auto& [change, error] : rows) EXPECT_THAT(AnswerTo(change), HasSubstr(error));
  EXPECT_EQ(AnswerTo([](auto&) {}), "");
}

TEST_F(HostileMasters, ACacheThatCannotBeIsRefused) {
  std::optional<HostileMaster> master(worker_->address());
  ASSERT_TRUE(master->Hello());
  master->Tell([](control::MasterMessage& m) { *m.mutable_configure() = HonestStage(); });
  master->Tell([](control::MasterMessage& m) { m.mutable_reserve()->set_whole(INT32_MAX); });
  const std::string failure = master->Failure();
  EXPECT_THAT(failure, HasSubstr("the K/V cache of 2147483647 pages, as the master asks, needs "));
  EXPECT_THAT(failure, HasSubstr(" MiB; lower --kv-memory of the server"));
  master.reset();
  EXPECT_EQ(AnswerTo([](auto&) {}), "");
}

TEST_F(HostileMasters, AMasterAsksOnce) {
  HostileMaster master(worker_->address());
  ASSERT_TRUE(master.Hello());
  for (int i = 0; i < 2; ++i) {
    master.Tell([](control::MasterMessage& m) { *m.mutable_configure() = HonestStage(); });
  }
  const auto closed = master.inbox().Closed();
  ASSERT_TRUE(closed.has_value());
  EXPECT_THAT(closed->message(), HasSubstr("configures a stage twice"));
  EXPECT_EQ(AnswerTo([](auto&) {}), "");
}

// In an epoch of one stage.
TEST_F(HostileMasters, PlansThatCannotBeRunEndTheEpoch) {
  HostileMaster master(worker_->address());
  ASSERT_TRUE(master.Hello());
  master.Tell([](control::MasterMessage& m) { *m.mutable_configure() = HonestStage(); });
  master.Tell([](control::MasterMessage& m) { m.mutable_reserve()->set_whole(8); });
  uint64_t epoch = 0;
  const auto failure_of = [&](const std::vector<SequenceStart>& starts) {
    ++epoch;
    master.Tell([&](control::MasterMessage& m) { m.mutable_begin_epoch()->set_epoch(epoch); });
    EXPECT_TRUE(master.inbox().Next([](const auto& m) { return m.has_epoch_ready(); }));
    IterationPlan plan = PlanOf(epoch, 0).Step(SampleOf(StepOf(1, 0, {4})));
    plan.starts = starts;
    master.Tell([&](control::MasterMessage& m) { EncodePlan(plan, *m.mutable_plan()); });
    return master.Failure();
  };
  SequenceStart start = StartOf(1, 1, {0});
  start.sampling.top_p = NAN;
  EXPECT_THAT(failure_of({start}), HasSubstr("top_p is nan, expected (0, 1]"));
  start = StartOf(1, 1, {0});
  start.sampling.logit_bias = {{3, INFINITY}};
  EXPECT_THAT(failure_of({start}), HasSubstr("logit bias for token 3 is inf"));
  EXPECT_THAT(failure_of({StartOf(1, 1, std::vector<int32_t>(100'000, 0))}),
              HasSubstr("100000 pages and 0 of a window, expected at most 8 and 0"));
  EXPECT_THAT(failure_of({StartOf(1, 1, {0}, std::vector<int32_t>(100'000, 0))}),
              HasSubstr("1 pages and 100000 of a window, expected at most 8 and 0"));
  std::vector<SequenceStart> starts;
  for (SequenceId id = 1; id <= 10'000; ++id) starts.push_back(StartOf(id, 1, {0}));
  EXPECT_THAT(failure_of(starts), HasSubstr("10000 live then, expected at most 8"));
  start = StartOf(1, 1, {0});
  start.end_tokens.assign(100'000, 3);
  EXPECT_THAT(failure_of({start}), HasSubstr("100000 end tokens, expected at most one for each"));
  start.end_tokens.clear();
  start.sampling.logit_bias.assign(100'000, {3, 1});
  EXPECT_THAT(failure_of({start}), HasSubstr("100000 logit biases, expected at most one for"));
}

// The largest page that a worker takes: what a sequence keeps is bounded by the model's context.
TEST_F(HostileMasters, LargePagesMakeNoLargeSequences) {
  std::optional<HostileMaster> master(worker_->address());
  ASSERT_TRUE(master->Hello());
  master->Tell([](control::MasterMessage& m) {
    *m.mutable_configure() = HonestStage();
    m.mutable_configure()->set_page_size(1 << 20);
  });
  master->Tell([](control::MasterMessage& m) { m.mutable_reserve()->set_whole(1); });
  master->Tell([](control::MasterMessage& m) { m.mutable_begin_epoch()->set_epoch(1); });
  ASSERT_TRUE(master->inbox().Next([](const auto& m) { return m.has_epoch_ready(); }));
  SequenceStart start = StartOf(1, 1'000'001, {0});
  start.first_position = 1'000'000;
  start.earlier_tokens.assign(1'000'000, 3);
  master->Tell(
      [&](control::MasterMessage& m) { EncodePlan(PlanOf(1, 0).Start(start), *m.mutable_plan()); });
  EXPECT_THAT(master->Failure(), HasSubstr("context hold 256 positions, expected room for posit"));
  master.reset();
  EXPECT_EQ(AnswerTo([](auto&) {}), "");
}

TEST_F(HostileMasters, MasksThatFitNoPlanEndTheEpoch) {
  HostileMaster master(worker_->address());
  ASSERT_TRUE(master.Hello());
  master.Tell([](control::MasterMessage& m) { *m.mutable_configure() = HonestStage(); });
  master.Tell([](control::MasterMessage& m) { m.mutable_reserve()->set_whole(8); });
  uint64_t epoch = 0;
  const std::string whole(MaskWords(TinyVocabulary()) * 4, 'x');
  const auto failure_of = [&](uint64_t iteration, const std::vector<int32_t>& steps,
                              const std::string& bytes) {
    ++epoch;
    master.Tell([&](control::MasterMessage& m) { m.mutable_begin_epoch()->set_epoch(epoch); });
    EXPECT_TRUE(master.inbox().Next([](const auto& m) { return m.has_epoch_ready(); }));
    master.Tell([&](control::MasterMessage& m) {
      m.mutable_masks()->set_epoch(epoch);
      m.mutable_masks()->set_iteration(iteration);
      for (const int32_t step : steps) {
        m.mutable_masks()->add_masks()->set_step(step);
        m.mutable_masks()->mutable_masks()->rbegin()->set_allowed(bytes);
      }
    });
    return master.Failure();
  };
  EXPECT_THAT(failure_of(0, {0, 1}, "abc"), HasSubstr("3 bytes, expected whole words"));
  EXPECT_THAT(failure_of(0, {0}, "abcd"), HasSubstr("has 1 words, expected"));
  EXPECT_THAT(failure_of(0, {3, 3}, whole), HasSubstr("mask of step 3 of iteration 0 came tw"));
  EXPECT_THAT(failure_of(1 << 20, {0}, whole), HasSubstr("and near its plan"));
}

// The fence between epochs: what the next stage says of another one counts for nothing.
TEST_F(HostileMasters, ANextStageFollowsInItsOwnEpochOnly) {
  for (const uint64_t answered : {4, 6, 5}) {
    auto pair = CreateThreadCommunicators(2, std::chrono::seconds(20));
    WorkerOptions options = ClusterOptions::QuietWorker();
    options.model_path = TinyModel();
    options.version = "test";
    options.pipeline = [&](const PipelineRequest&, Rendezvous&) { return std::move(pair[0]); };
    const auto worker = *Worker::Start(std::move(options));
    ControlServer::Acceptors acceptors;
    acceptors.attach = [](auto) { return StreamEvents<control::MasterMessage>(); };
    acceptors.follow = [answered](std::shared_ptr<Stream<control::FollowAnswer>> stream) {
      return StreamEvents<control::FollowMessage>{
          .message =
              [answered, stream](control::FollowMessage&) {
                stream->Tell([answered](auto& answer) { answer.set_epoch(answered); });
              },
          .closed = [](const absl::Status&) {}};
    };
    const auto next = *ControlServer::Start("127.0.0.1:0", std::move(acceptors));
    HostileMaster master(worker->address());
    ASSERT_TRUE(master.Hello());
    master.Tell([](control::MasterMessage& m) {
      *m.mutable_configure() = HonestStage();
      m.mutable_configure()->set_stages(2);
      m.mutable_configure()->set_end_layer(1);
    });
    master.Tell([](control::MasterMessage& m) { m.mutable_reserve()->set_whole(8); });
    ASSERT_TRUE(master.inbox().Next([](const auto& m) { return m.has_reserved(); }));
    master.Tell([&](control::MasterMessage& m) {
      m.mutable_begin_epoch()->set_epoch(5);
      m.mutable_begin_epoch()->set_next_address(next->address());
    });
    // Heartbeats come every second.
    int heartbeats = 0;
    const auto ready = master.inbox().Next([&](const auto& m) {
      heartbeats += m.has_heartbeat() ? 1 : 0;
      return m.has_epoch_ready() || heartbeats == 3;
    });
    ASSERT_TRUE(ready.has_value());
    EXPECT_EQ(ready->has_epoch_ready(), answered == 5) << answered;
  }
}

TEST_F(HostileMasters, NothingLargeIsTakenBeforeHello) {
  HostileMaster large(worker_->address());
  large.Tell([](control::MasterMessage& m) {
    m.mutable_hello()->set_version(std::string(kMaxFirstBytes + 1, 'x'));
  });
  auto closed = large.inbox().Closed();
  ASSERT_TRUE(closed.has_value());
  EXPECT_THAT(closed->message(), HasSubstr("at most 65536 are accepted"));

  HostileMaster rude(worker_->address());
  rude.Tell([](control::MasterMessage& m) { *m.mutable_configure() = HonestStage(); });
  closed = rude.inbox().Closed();
  ASSERT_TRUE(closed.has_value());
  EXPECT_THAT(closed->message(), HasSubstr("a master says hello first"));
  EXPECT_EQ(AnswerTo([](auto&) {}), "");
}

TEST_F(HostileMasters, SilentStreamsMakeRoomForNewOnes) {
  std::vector<std::unique_ptr<HostileMaster>> silent;
  for (int i = 0; i < 70; ++i)
    silent.push_back(std::make_unique<HostileMaster>(worker_->address()));
  int ended = 0;
  for (auto& master : silent) {
    if (ended == 6) break;
    ended += master->inbox().Closed(std::chrono::seconds(2)).has_value();
  }
  EXPECT_EQ(ended, 6);
  EXPECT_EQ(AnswerTo([](auto&) {}), "");
}

// A worker that a test speaks for.
class HostileWorker {
 public:
  HostileWorker() {
    ControlServer::Acceptors acceptors;
    acceptors.attach = [this](std::shared_ptr<Stream<control::WorkerMessage>> stream) {
      return StreamEvents<control::MasterMessage>{
          .message = [this, stream](control::MasterMessage& m) { Answer(*stream, m); },
          .closed = [](const absl::Status&) {}};
    };
    acceptors.follow = [](auto stream) {
      return StreamEvents<control::FollowMessage>{.message = [](auto&) {},
                                                  .closed = [](const absl::Status&) {}};
    };
    server_ = *ControlServer::Start("127.0.0.1:0", std::move(acceptors));
  }

  absl::StatusOr<std::unique_ptr<RemoteEngine>> Engine() {
    ClusterOptions options;
    options.model = TinyModel();
    options.engine.weights_from_master = true;
    options.engine.version = "test";
    TREADLE_ASSIGN_OR_RETURN(RemoteEngineOptions engine,
                             EngineOptionsFor(options, {server_->address()}));
    return RemoteEngine::Create(std::move(engine));
  }

  // Changes what it says, and what it says before that; set before the engine is made.
  std::function<void(control::WorkerMessage&)> change = [](control::WorkerMessage&) {};
  std::function<std::optional<control::WorkerMessage>(const control::WorkerMessage&)> before =
      [](const control::WorkerMessage&) { return std::nullopt; };

 private:
  void Answer(Stream<control::WorkerMessage>& stream, control::MasterMessage& to) {
    control::WorkerMessage answer;
    if (to.has_hello()) {
      answer.mutable_hello()->set_protocol(kControlProtocol);
      answer.mutable_hello()->set_version("test");
      answer.mutable_hello()->set_memory_available(uint64_t{1} << 40);
    } else if (to.has_configure()) {
      answer.mutable_loaded()->set_fingerprint(to.configure().fingerprint());
      answer.mutable_loaded()->set_kv_heads(2);
      answer.mutable_loaded()->set_memory_available(uint64_t{1} << 40);
    } else if (to.has_reserve()) {
      answer.mutable_reserved();
    } else if (to.has_begin_epoch()) {
      answer.set_epoch_ready(to.begin_epoch().epoch());
    } else if (to.has_plan()) {
      const auto plan = DecodePlan(to.plan());
      IterationResult result;
      result.epoch = plan->epoch;
      result.iteration = plan->iteration;
      for (const Step& step : plan->steps) {
        StepResult& answered = result.steps.emplace_back();
        answered.sequence = step.sequence;
        for (const RowOutput& asked : step.outputs) {
          answered.outputs.push_back({.token = asked.sample ? 5 : -1});
        }
      }
      EncodeResult(result, *answer.mutable_result());
    } else {
      return;
    }
    change(answer);
    if (auto earlier = before(answer)) stream.Send(*std::move(earlier));
    stream.Send(std::move(answer));
  }

  std::unique_ptr<ControlServer> server_;
};

// How an engine ends whose worker answers one plan with a result that is changed. Ok: it takes it.
absl::Status AfterResult(const Step& step, const std::function<void(IterationResult&)>& change) {
  HostileWorker worker;
  worker.change = [&](control::WorkerMessage& message) {
    if (!message.has_result()) return;
    IterationResult result = *DecodeResult(message.result());
    change(result);
    message.clear_result();
    EncodeResult(result, *message.mutable_result());
  };
  auto engine = worker.Engine();
  if (!engine.ok()) return engine.status();
  if (const absl::Status started = (*engine)->Start([] {}); !started.ok()) return started;
  (*engine)->Submit(PlanOf((*engine)->epoch(), 0).Start(StartOf(1, 3, {0})).Step(step));
  const auto late = std::chrono::steady_clock::now() + kPatience;
  while ((*engine)->status().ok() && std::chrono::steady_clock::now() < late) {
    if (!(*engine)->TakeResults().empty()) return absl::OkStatus();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return (*engine)->status();
}

// A result of an epoch that has ended, which comes in the next one and would fit its plan.
TEST(HostileWorkers, ResultsOfAnOldEpochAreDropped) {
  HostileWorker worker;
  worker.before = [](const control::WorkerMessage& message) {
    std::optional<control::WorkerMessage> late;
    if (!message.has_result()) return late;
    IterationResult result = *DecodeResult(message.result());
    --result.epoch;
    result.steps[0].outputs[0].token = 9;
    EncodeResult(result, *late.emplace().mutable_result());
    return late;
  };
  ASSERT_OK_AND_ASSIGN(auto engine, worker.Engine());
  EngineClient client(std::move(engine));
  ASSERT_EQ(client.Recover(), absl::OkStatus());
  client.engine().Submit(PlanOf(client.engine().epoch(), 0)
                             .Start(StartOf(1, 3, {0}))
                             .Step(SampleOf(StepOf(1, 0, {4, 5, 6}))));
  ASSERT_OK_AND_ASSIGN(const auto result, client.Next());
  EXPECT_EQ(result.steps[0].token(), 5);
  EXPECT_EQ(client.engine().status(), absl::OkStatus());
}

TEST(HostileWorkers, HiddenStatesAreAsWideAsTheModel) {
  const auto after = [&](const Step& step, size_t width, int32_t token) {
    return std::string(AfterResult(step, [&](IterationResult& result) {
                         result.steps[0].outputs = {{.token = token}};
                         result.steps[0].outputs[0].hidden.assign(width, 1.0f);
                       }).message());
  };
  const Step pooled = HiddenOf(StepOf(1, 0, {4, 5, 6}));
  EXPECT_EQ(after(pooled, 64, -1), "");
  EXPECT_THAT(after(pooled, 63, -1), HasSubstr("63 elements of a hidden state, expected 64"));
  EXPECT_THAT(after(pooled, 64, 5), HasSubstr("has token 5, expected none"));
  const Step sampled = SampleOf(StepOf(1, 0, {4, 5, 6}));
  EXPECT_THAT(after(sampled, 64, 5), HasSubstr("64 elements of a hidden state, expected 0"));
  EXPECT_THAT(after(sampled, 0, -1), HasSubstr("has token -1, expected one of the vocabulary"));
}

TEST(HostileWorkers, ResultsAreWhatWasAsked) {
  const Step step = SampleOf(ScoredOf(StepOf(1, 0, {4, 5, 6}), -1, 1), 1);
  const auto honest = [](IterationResult& result) {
    for (RowResult& row : result.steps[0].outputs) row.target = {-1, {{7, -1}}};
    result.steps[0].outputs[2].target = {};
    result.steps[0].outputs[2].detail = {-1, {{7, -1}}};
  };
  EXPECT_EQ(AfterResult(step, honest), absl::OkStatus());
  const auto message = [&](const std::function<void(std::vector<RowResult>&)>& change) {
    return std::string(AfterResult(step, [&](IterationResult& result) {
                         honest(result);
                         change(result.steps[0].outputs);
                       }).message());
  };
  EXPECT_THAT(message([](auto& rows) { rows.resize(1000); }),
              HasSubstr("step 0 of sequence 1 has 1000 outputs, expected 3"));
  EXPECT_THAT(message([](auto& rows) { rows.clear(); }), HasSubstr("0 outputs, expected 3"));
  EXPECT_THAT(message([](auto& rows) { rows[2].detail.top.resize(2); }),
              HasSubstr("2 alternatives to a token, expected at most 1"));
  EXPECT_THAT(message([](auto& rows) {
                rows[2].target = {-1, {{7, -1}}};
              }),
              HasSubstr("1 alternatives to a token, expected at most 0"));
  EXPECT_THAT(message([](auto& rows) { rows[2].detail.top[0].token = 1 << 30; }),
              HasSubstr("token 1073741824 as an alternative"));
  EXPECT_THAT(message([](auto& rows) { rows[1].target.top[0].token = -1; }),
              HasSubstr("token -1 as an alternative"));
}

TEST(HostileWorkers, WhatTheySayOfThemselvesIsChecked) {
  const auto message = [](const std::function<void(control::WorkerMessage&)>& change) {
    HostileWorker worker;
    worker.change = change;
    return std::string(worker.Engine().status().message());
  };
  EXPECT_EQ(message([](auto&) {}), "");
  const auto loaded = [&](void (*change)(control::Loaded&)) {
    return message([change](control::WorkerMessage& m) {
      if (m.has_loaded()) change(*m.mutable_loaded());
    });
  };
  EXPECT_THAT(loaded([](auto& l) { l.set_kv_heads(INT64_MAX); }), HasSubstr("K/V heads"));
  EXPECT_THAT(loaded([](auto& l) { l.set_kv_heads(-1); }), HasSubstr("K/V heads"));
  EXPECT_THAT(loaded([](auto& l) { l.mutable_kv_pages()->set_whole(INT64_MAX); }),
              HasSubstr("K/V pages"));
  EXPECT_THAT(loaded([](auto& l) { l.mutable_kv_pages()->set_window(-1); }),
              HasSubstr("K/V pages"));
  EXPECT_THAT(loaded([](auto& l) { l.set_memory_available(UINT64_MAX); }),
              HasSubstr("bytes of memory"));
  EXPECT_THAT(loaded([](auto& l) { l.set_backend(std::string(1 << 20, 'x')); }),
              HasSubstr("bytes of description"));
  EXPECT_THAT(message([](control::WorkerMessage& m) {
                if (m.has_hello()) m.mutable_hello()->set_held_bytes(UINT64_MAX);
              }),
              HasSubstr("bytes of memory"));
}

}  // namespace
}  // namespace treadle
