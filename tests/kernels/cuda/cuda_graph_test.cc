// Iterations on the CUDA backend, on an emulated GPU that puts everything off as long as it may:
// graphs, samples that the host has not seen, marks, buffers that grow, and failures. What comes
// out is compared with the reference backend, iteration by iteration.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/runtime/backend_on_device.h"
#include "kernels/op_cases/op_cases.h"
#include "kernels/reference/reference_backend.h"
#include "tests/emulation/emulated_device.h"
#include "tests/kernels/cuda/tiny_decoding.h"

namespace treadle::cuda {
namespace {

using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;

std::unique_ptr<Backend> MakeEmulated(EmulationSettings settings = {.deferred = true}) {
  ScopedEmulation emulation(settings);
  return MakeCudaBackend(Device::Open(0).value(), {.dtype = DType::kF32}).value();
}

std::vector<int32_t> Tokens(std::span<const SampleResult> results) {
  std::vector<int32_t> tokens;
  for (const SampleResult& result : results) tokens.push_back(result.token);
  return tokens;
}

// Tokens that the reference samples in `iterations` iterations.
std::vector<std::vector<int32_t>> ReferenceTokens(Decoding decoding, int iterations) {
  const auto reference = CreateReferenceBackend();
  TinyModel model(*reference);
  std::vector<std::vector<int32_t>> tokens;
  std::vector<SampleResult> results(decoding.samples.size());
  for (int i = 0; i < iterations; ++i) {
    decoding.Place(i);
    const BatchInput batch = decoding.batch(results);
    reference->BeginBatch(batch);
    EXPECT_EQ(model.Forward(batch, results), absl::OkStatus());
    tokens.push_back(Tokens(results));
  }
  return tokens;
}

constexpr int kIterations = 8;

// The host is one iteration ahead of what it has seen; results alternate between two places.
TEST(CudaGraphs, ReplaysReadTheCurrentBatch) {
  const auto backend = MakeEmulated();
  Decoding decoding(3, 4);
  const auto expected = ReferenceTokens(decoding, kIterations);
  TinyModel model(*backend);
  std::array<std::vector<SampleResult>, 2> results;
  for (auto& list : results) list.resize(4);
  int times_run = 0;
  for (int i = 0; i < kIterations; ++i) {
    decoding.Place(i);
    const BatchInput batch = decoding.batch(results[i % 2]);
    backend->BeginBatch(batch);
    const auto ops = [&] {
      ++times_run;
      return model.Forward(batch, results[i % 2]);
    };
    ASSERT_EQ(backend->RunGraph(decoding.key(), ops), absl::OkStatus());
    backend->SetMark(i % 2);
    if (i == 0) continue;
    ASSERT_EQ(backend->WaitForMark((i - 1) % 2), absl::OkStatus());
    EXPECT_THAT(Tokens(results[(i - 1) % 2]), ElementsAreArray(expected[i - 1])) << i;
  }
  ASSERT_EQ(backend->Synchronize(), absl::OkStatus());
  EXPECT_THAT(Tokens(results[(kIterations - 1) % 2]), ElementsAreArray(expected.back()));
  EXPECT_EQ(expected[0].back(), -1);  // the padded row
  // Once as they are, once for the graph; again if something grew after the first time.
  EXPECT_LE(times_run, 3);
}

// Padding holds whatever an earlier batch left; outliers in it are nobody's.
TEST(CudaGraphs, OutliersOfACallAreThoseOfRealRows) {
  constexpr int64_t kRows = 4, kCols = 128;
  RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("int8"), 64, kCols, 3);
  matrix.constants->outlier_threshold = 6;
  matrix.constants->outlier_rule = OutlierRule::kPerCall;
  const auto backend = MakeEmulated();
  const auto packed = backend->Pack(matrix.source).value();
  Buffer x = backend->Allocate(kRows * kCols * sizeof(float)).value();
  Buffer out = backend->Allocate(kRows * 64 * sizeof(float)).value();
  const auto multiply = [&](int64_t rows) {
    const Projection projection = {.weight = packed.get(),
                                   .out = DenseTensor(out.data(), DType::kF32, rows, 64)};
    backend->MatMul(DenseTensor(x.data(), DType::kF32, rows, kCols), {&projection, 1});
    return absl::OkStatus();
  };
  // The first `real` rows of the result; rows beyond them have elements of magnitude `beyond`.
  const auto run = [&](int64_t real, float beyond, bool padded) {
    std::vector<float> host(kRows * kCols);
    Random random(1);
    for (float& value : host) value = random.Normal();
    host[5] = 9;  // an outlier of row 0
    for (int64_t i = real * kCols; i < kRows * kCols; ++i) host[i] = beyond * (i % 3 == 0 ? 1 : 0);
    backend->CopyToDevice(x.data(), host.data(), host.size() * sizeof(float));
    Decoding decoding(real, kRows);
    std::vector<SampleResult> results(kRows);
    const BatchInput batch = decoding.batch(results);
    backend->BeginBatch(batch);
    const auto status = padded ? backend->RunGraph(decoding.key(), [&] { return multiply(kRows); })
                               : multiply(real);
    EXPECT_EQ(status, absl::OkStatus());
    EXPECT_EQ(backend->Synchronize(), absl::OkStatus());
    std::vector<float> y(static_cast<size_t>(real * 64));
    backend->CopyToHost(y.data(), out.data(), y.size() * sizeof(float));
    return y;
  };
  // As they are, captured, and replayed with other rows that are real.
  for (const int64_t real : {3, 3, 3, 2, 4}) {
    const std::vector<float> alone = run(real, 0, /*padded=*/false);
    EXPECT_EQ(run(real, 100, /*padded=*/true), alone) << real << " rows";
  }
}

// Other shapes, op by op or in graphs of their own, in between.
TEST(CudaGraphs, ShapesDoNotDisturbOneAnother) {
  const auto backend = MakeEmulated();
  ASSERT_EQ(backend->Reserve({.max_rows = 16,
                              .max_sequences = 8,
                              .max_context = 16,
                              .max_output_rows = 8,
                              .max_features = TinyModel::kHidden,
                              .vocab = TinyModel::kVocab,
                              .page_size = TinyModel::kPageSize,
                              .heads = TinyModel::kHeads,
                              .head_dim = TinyModel::kHeadDim}),
            absl::OkStatus());
  TinyModel model(*backend), other_model(*backend);
  Decoding decoding(3, 4), other(2, 2);
  const auto expected = ReferenceTokens(decoding, kIterations);
  const auto other_expected = ReferenceTokens(other, kIterations);
  int times_run = 0;
  const auto run = [&](TinyModel& on, const Decoding& what) {
    std::vector<SampleResult> results(what.samples.size());
    const BatchInput batch = what.batch(results);
    backend->BeginBatch(batch);
    const auto ops = [&] {
      ++times_run;
      return on.Forward(batch, results);
    };
    EXPECT_EQ(backend->RunGraph(what.key(), ops), absl::OkStatus());
    EXPECT_EQ(backend->Synchronize(), absl::OkStatus());
    return Tokens(results);
  };
  // The previous samples are those of the other shape, so the host says them.
  const auto place = [](Decoding& what, int32_t position, const std::vector<int32_t>& tokens) {
    what.Place(position);
    for (int64_t s = 0; position > 0 && s < what.rows; ++s) what.token_ids[s] = tokens[s];
  };
  for (int32_t i = 0; i < kIterations; ++i) {
    place(decoding, i, i > 0 ? expected[i - 1] : std::vector<int32_t>());
    EXPECT_THAT(run(model, decoding), ElementsAreArray(expected[i])) << i;
    place(other, i, i > 0 ? other_expected[i - 1] : std::vector<int32_t>());
    EXPECT_THAT(run(other_model, other), ElementsAreArray(other_expected[i])) << i;
  }
  EXPECT_EQ(times_run, 4);  // two shapes, twice each: within the limits nothing grows
}

// A batch beyond everything seen so far moves buffers whose addresses graphs hold.
TEST(CudaGraphs, GrowthMakesThemAnew) {
  const auto backend = MakeEmulated();
  Decoding decoding(3, 4);
  const auto expected = ReferenceTokens(decoding, kIterations);
  TinyModel model(*backend);
  std::vector<SampleResult> results(4);
  int times_run = 0;
  for (int32_t i = 0; i < kIterations; ++i) {
    decoding.Place(i);
    if (i == 5) {
      const std::vector<int32_t> many(5000, 0);
      const Buffer rows = backend->Allocate(sizeof(float) * 4 * many.size()).value();
      const Tensor out = DenseTensor(rows.data(), DType::kF32, 5000, 4);
      backend->Gather(out, many, out);  // onto itself
      ASSERT_EQ(backend->Synchronize(), absl::OkStatus());
      times_run = 0;
    }
    const BatchInput batch = decoding.batch(results);
    backend->BeginBatch(batch);
    const auto ops = [&] {
      ++times_run;
      return model.Forward(batch, results);
    };
    ASSERT_EQ(backend->RunGraph(decoding.key(), ops), absl::OkStatus());
    ASSERT_EQ(backend->Synchronize(), absl::OkStatus());
    EXPECT_THAT(Tokens(results), ElementsAreArray(expected[i])) << i;
  }
  EXPECT_EQ(times_run, 2);
}

TEST(CudaGraphs, BeyondTheirBoundOpsRunAsTheyAre) {
  const auto backend = MakeEmulated();
  const Buffer memory = backend->Allocate(2 * sizeof(float)).value();
  const Tensor x = DenseTensor(memory.data(), DType::kF32, 1, 2);
  int times_run = 0;
  const auto run = [&](int64_t rows) {
    times_run = 0;
    for (int i = 0; i < 4; ++i) {
      const float one[2] = {1, 2};
      float result[2];
      backend->CopyToDevice(memory.data(), one, sizeof(one));
      backend->BeginBatch({});
      const auto ops = [&] {
        ++times_run;
        backend->SwiGlu(x, x, x);
        return absl::OkStatus();
      };
      EXPECT_EQ(backend->RunGraph({.rows = rows}, ops), absl::OkStatus());
      EXPECT_EQ(backend->Synchronize(), absl::OkStatus());
      backend->CopyToHost(result, memory.data(), sizeof(result));
      EXPECT_FLOAT_EQ(result[0], 1 / (1 + std::exp(-1.0f)));
    }
    return times_run;
  };
  EXPECT_EQ(run(1), 2);
  for (int64_t rows = 2; rows <= 256; ++rows) {
    EXPECT_EQ(backend->RunGraph({.rows = rows}, [] { return absl::OkStatus(); }), absl::OkStatus());
  }
  EXPECT_EQ(run(257), 4);
  EXPECT_EQ(run(1), 0);
}

// Whether as they are or captured, ops that fail leave nothing that a later run would replay.
TEST(CudaGraphs, OpsThatFailAreNotKept) {
  const auto backend = MakeEmulated();
  const Buffer memory = backend->Allocate(2 * sizeof(float)).value();
  const std::vector<float> ones = {1, 1};
  const Tensor x = DenseTensor(memory.data(), DType::kF32, 1, 2);
  int times_run = 0;
  const auto run = [&](const absl::Status& status, bool replays = false) {
    backend->CopyToDevice(memory.data(), ones.data(), sizeof(float) * 2);
    const auto ops = [&] {
      ++times_run;
      if (status.ok()) backend->SwiGlu(x, x, x);
      return status;
    };
    EXPECT_EQ(backend->RunGraph({.rows = 1}, ops), replays ? absl::OkStatus() : status);
    EXPECT_EQ(backend->Synchronize(), absl::OkStatus());
    std::vector<float> result(2);
    backend->CopyToHost(result.data(), memory.data(), sizeof(float) * 2);
    return result[0] != 1;  // the op ran
  };
  const absl::Status failure = absl::AbortedError("a peer is gone");
  EXPECT_FALSE(run(failure));
  EXPECT_TRUE(run(absl::OkStatus()));
  EXPECT_FALSE(run(failure));  // while they are captured
  EXPECT_TRUE(run(absl::OkStatus()));
  EXPECT_EQ(times_run, 4);
  EXPECT_TRUE(run(failure, /*replays=*/true));  // nobody asks them any more
  EXPECT_EQ(times_run, 4);
}

TEST(CudaGraphs, ForgottenOnesAreCapturedAnew) {
  const auto backend = MakeEmulated();
  const Buffer memory = backend->Allocate(2 * sizeof(float)).value();
  const Tensor x = DenseTensor(memory.data(), DType::kF32, 1, 2);
  int times_run = 0;
  const auto ops = [&] {
    ++times_run;
    backend->SwiGlu(x, x, x);
    return absl::OkStatus();
  };
  for (const int expected : {2, 4}) {
    for (int i = 0; i < 4; ++i) {
      ASSERT_EQ(backend->RunGraph({.rows = 1}, ops), absl::OkStatus());
    }
    ASSERT_EQ(backend->Synchronize(), absl::OkStatus());
    EXPECT_EQ(times_run, expected);
    backend->ForgetGraphs();
  }
}

TEST(CudaBackend, PaddedRowsAreFewAndEnough) {
  const auto backend = MakeEmulated();
  std::vector<int64_t> buckets;
  for (int64_t rows = 1; rows <= 256; ++rows) {
    const int64_t padded = backend->PaddedRows(rows);
    ASSERT_GE(padded, rows);
    EXPECT_EQ(backend->PaddedRows(padded), padded);
    if (buckets.empty() || padded != buckets.back()) buckets.push_back(padded);
  }
  EXPECT_THAT(buckets, ElementsAre(1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144,
                                   160, 176, 192, 208, 224, 240, 256));
  // Not beyond what was reserved.
  ASSERT_EQ(backend->Reserve({.max_rows = 50}), absl::OkStatus());
  EXPECT_EQ(backend->PaddedRows(49), 50);
  EXPECT_EQ(backend->PaddedRows(51), 56);
}

// An op that is given memory it was given before, with other contents, and was not announced.
TEST(CudaBackend, UnannouncedSpansAreReadEachTime) {
  const auto backend = MakeEmulated();
  const Buffer memory = backend->Allocate(8 * sizeof(float)).value();
  const float values[4] = {10, 11, 12, 13};
  backend->CopyToDevice(memory.data(), values, sizeof(values));
  const Tensor x = DenseTensor(memory.data(), DType::kF32, 4, 1);
  const Tensor out = DenseTensor(memory.data() + sizeof(values), DType::kF32, 2, 1);
  std::vector<int32_t> rows = {3, 1};
  const std::vector<int32_t> announced = {0, 2, 0};
  const auto gather = [&](std::span<const int32_t> which) {
    backend->Gather(x, which, out);
    EXPECT_EQ(backend->Synchronize(), absl::OkStatus());
    std::vector<float> result(2);
    backend->CopyToHost(result.data(), out.data, 2 * sizeof(float));
    return result;
  };
  EXPECT_THAT(gather(rows), ElementsAre(13, 11));
  backend->BeginBatch({.output_rows = announced});
  EXPECT_THAT(gather(std::span(announced).subspan(1)), ElementsAre(12, 10));
  rows = {2, 2};
  EXPECT_THAT(gather(rows), ElementsAre(12, 12));
  rows = {0, 1};
  EXPECT_THAT(gather(rows), ElementsAre(10, 11));
  EXPECT_THAT(gather(std::span(announced).first(2)), ElementsAre(10, 12));
}

// The previous samples survive batches that sample nothing, and buffers that grow.
TEST(CudaBackend, LastSamplesStay) {
  const auto backend = MakeEmulated();
  Decoding decoding(3, 4);
  TinyModel model(*backend);
  std::vector<SampleResult> results(4);
  const BatchInput batch = decoding.batch(results);
  backend->BeginBatch(batch);
  EXPECT_EQ(model.Forward(batch, results), absl::OkStatus());
  const std::vector<SampleRow> many(1000);
  backend->BeginBatch({.samples = many});
  const RandomMatrix table = MakeRandomMatrix(*FindWeightFormat("f32"), TinyModel::kVocab, 4, 9);
  const auto packed = backend->Pack(table.source).value();
  const Buffer memory = backend->Allocate(3 * 4 * sizeof(float)).value();
  const std::vector<int32_t> ids = {-4, -2, -3};
  backend->Embed(*packed, ids, 0, false, DenseTensor(memory.data(), DType::kF32, 3, 4));
  ASSERT_EQ(backend->Synchronize(), absl::OkStatus());
  std::vector<float> out(12), row(4);
  backend->CopyToHost(out.data(), memory.data(), sizeof(float) * 12);
  for (int i = 0; i < 3; ++i) {
    DecodeSourceRow(table.source, results[-2 - ids[i]].token, row.data());
    EXPECT_THAT(std::vector<float>(out.begin() + 4 * i, out.begin() + 4 * i + 4),
                ElementsAreArray(row));
  }
}

// The first failure stays; results are left as they were.
TEST(CudaBackend, AFailureStays) {
  const auto backend = MakeEmulated({.fail_after_launches = 30, .deferred = true});
  Decoding decoding(3, 4);
  TinyModel model(*backend);
  std::vector<SampleResult> results(4);
  absl::Status status;
  int iterations = 0;
  for (int32_t i = 0; i < 8 && status.ok(); ++i) {
    decoding.Place(i);
    for (SampleResult& result : results) result.token = -7;
    const BatchInput batch = decoding.batch(results);
    backend->BeginBatch(batch);
    const auto ops = [&] { return model.Forward(batch, results); };
    EXPECT_EQ(backend->RunGraph(decoding.key(), ops), absl::OkStatus());
    backend->SetMark(0);
    status = backend->WaitForMark(0);
    ++iterations;
  }
  EXPECT_GT(iterations, 1);
  EXPECT_THAT(std::string(status.message()), HasSubstr("launch 30 failed"));
  EXPECT_THAT(Tokens(results), ElementsAre(-7, -7, -7, -7));
  decoding.Place(7);
  const BatchInput batch = decoding.batch(results);
  backend->BeginBatch(batch);
  EXPECT_EQ(model.Forward(batch, results), absl::OkStatus());
  EXPECT_EQ(backend->Synchronize(), status);
  EXPECT_EQ(backend->Recover(), status);
  EXPECT_THAT(Tokens(results), ElementsAre(-7, -7, -7, -7));
}

TEST(CudaBackend, OutOfMemoryIsAnError) {
  const auto backend = MakeEmulated({.memory_bytes = 8 << 20});
  const absl::Status status = backend->Reserve({.max_rows = 1 << 24});
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("bytes"));
}

}  // namespace
}  // namespace treadle::cuda
