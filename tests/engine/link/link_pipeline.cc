#include "tests/engine/link/link_pipeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/wire_codec.h"
#include "kernels/collectives/gloo_communicator.h"
#include "kernels/op_cases/random.h"
#include "kernels/reference/reference_backend.h"
#include "tests/support/ranks/thread_links.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;

std::vector<float> Input(uint64_t iteration, int64_t rows) {
  std::vector<float> x(rows * kHidden);
  Random random(SeedOf("input", iteration));
  for (float& value : x) value = random.Normal() * 3;
  return x;
}

void Transform(int stage, float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] = x[i] * 0.75f + static_cast<float>(stage + 1);
}

// Message that stage `stage` must receive.
std::vector<float> Expected(const PipelineCase& test, int stage, uint64_t iteration) {
  const int64_t rows = test.rows[iteration];
  std::vector<float> x = Input(iteration, rows);
  std::vector<std::byte> wire(EncodedBytes(test.wire, rows, kHidden));
  for (int previous = 0; previous < stage; ++previous) {
    Transform(previous, x.data(), rows * kHidden);
    const Tensor tensor = DenseTensor(x.data(), DType::kF32, rows, kHidden);
    EncodeRows(test.wire, tensor, wire.data());
    DecodeRows(test.wire, wire.data(), tensor);
  }
  return x;
}

absl::Status RunIterations(ActivationLink& link, int stage, int stages, const PipelineCase& test,
                           Outcome& outcome) {
  for (uint64_t i = 0; i < test.rows.size(); ++i) {
    const int64_t rows = test.rows[i];
    if (rows == 0) continue;
    TREADLE_ASSIGN_OR_RETURN(const Tensor hidden, link.Receive(kEpoch, i, rows));
    for (uint64_t j = i + 1; j < std::min<uint64_t>(i + 1 + test.ahead, test.rows.size()); ++j) {
      if (test.rows[j] == 0) continue;
      TREADLE_RETURN_IF_ERROR(link.Announce(kEpoch, j, test.rows[j]));
    }
    const size_t bytes = rows * kHidden * sizeof(float);
    const std::vector<float> expected = stage == 0 ? Input(i, rows) : Expected(test, stage, i);
    if (stage == 0) std::memcpy(hidden.data, expected.data(), bytes);
    ++outcome.received;
    outcome.right &= std::memcmp(hidden.data, expected.data(), bytes) == 0;
    Transform(stage, hidden.Row<float>(0), rows * kHidden);
    if (stage + 1 < stages) TREADLE_RETURN_IF_ERROR(link.Send(kEpoch, i, hidden));
  }
  return absl::OkStatus();
}

// A barrier that is used once.
class Meeting {
 public:
  explicit Meeting(int missing) : missing_(missing) {}
  void Attend() {
    const MutexLock lock(mutex_);
    --missing_;
    changed_.NotifyAll();
    while (missing_ > 0) changed_.Wait(mutex_);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  int missing_;
};

}  // namespace

PipelineCase RandomCase(WireType wire, int ahead, int iterations, uint64_t seed) {
  Random random(seed);
  PipelineCase test{wire, ahead, {}};
  for (int i = 0; i < iterations; ++i) test.rows.push_back(random.Below(kMaxRows + 1));
  return test;
}

ActivationLink::Options LinkOptions(int stage, int stages, WireType wire) {
  return {.previous = stage - 1,
          .next = stage + 1 < stages ? stage + 1 : -1,
          .hidden = kHidden,
          .max_batch_tokens = kMaxRows,
          .wire = wire};
}

Outcome RunStage(CommunicatorPtr communicator, const PipelineCase& test,
                 const std::function<void()>& finish) {
  const int stage = communicator->rank(), stages = communicator->size();
  const std::unique_ptr<Backend> backend = CreateReferenceBackend();
  auto link = ActivationLink::Create(*backend, std::move(communicator),
                                     LinkOptions(stage, stages, test.wire));
  Outcome outcome;
  outcome.status = link.ok() ? RunIterations(**link, stage, stages, test, outcome) : link.status();
  if (link.ok() && !outcome.status.ok()) (*link)->Abort(outcome.status);
  finish();
  return outcome;
}

// Threads end their links together: memory that others may still read from.
std::vector<Outcome> RunThreads(int stages, const PipelineCase& test, milliseconds timeout,
                                const Wrap& wrap) {
  std::vector<CommunicatorPtr> ranks = CreateThreadLinks(stages, timeout);
  std::vector<Outcome> outcomes(stages);
  Meeting end(stages);
  RunRankThreads(stages, [&](int stage) {
    outcomes[stage] = RunStage(wrap(stage, std::move(ranks[stage])), test, [&] { end.Attend(); });
  });
  return outcomes;
}

void ExpectAllReceived(const std::vector<Outcome>& outcomes, const PipelineCase& test) {
  const auto nonempty = test.rows.size() - std::count(test.rows.begin(), test.rows.end(), 0);
  for (size_t stage = 0; stage < outcomes.size(); ++stage) {
    EXPECT_TRUE(outcomes[stage].status.ok()) << stage << ": " << outcomes[stage].status;
    EXPECT_EQ(outcomes[stage].received, static_cast<int>(nonempty));
    EXPECT_TRUE(outcomes[stage].right) << stage;
  }
}

CommunicatorPtr JoinGloo(int stage, int stages, const RendezvousFolder& folder,
                         milliseconds timeout) {
  FolderRendezvous rendezvous(folder.path());
  return CreateGlooCommunicator(
             {.rank = stage, .size = stages, .data_interface = "lo", .timeout = timeout},
             rendezvous)
      .value();
}

void AttendAll(int stage, int stages, const RendezvousFolder& folder) {
  FolderRendezvous rendezvous(folder.path());
  EXPECT_TRUE(rendezvous.Set(Str("done", stage), "").ok());
  for (int other = 0; other < stages; ++other) {
    EXPECT_TRUE(
        rendezvous
            .Get(Str("done", other), std::chrono::steady_clock::now() + std::chrono::seconds(50))
            .ok());
  }
}

}  // namespace treadle
