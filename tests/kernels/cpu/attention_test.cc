// Attention on the CPU: equal bits whatever the threads, page size, chunking, neighbours and
// instruction set; NaN in every slot that a row must not see; and close to a scalar in double.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "kernels/reference/reference_backend.h"
#include "tests/kernels/cpu/cpu_setting.h"

namespace treadle {
namespace {

struct Shape {
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  DType dtype;
  ComputeMode compute = ComputeMode::kExact;
};

// One sequence's queries and, by position, keys and values that the cache holds exactly.
struct Sequence {
  int64_t positions;
  std::vector<float> q;  // [positions, heads * head_dim]
  std::vector<float> k;  // [positions, kv_heads * head_dim]
  std::vector<float> v;
};

Sequence RandomSequence(const Shape& shape, int64_t positions, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Sequence s{positions, {}, {}, {}};
  s.q.resize(positions * shape.heads * shape.head_dim);
  s.k.resize(positions * shape.kv_heads * shape.head_dim);
  s.v.resize(s.k.size());
  for (float& x : s.q) x = normal(random);
  for (std::vector<float>* part : {&s.k, &s.v}) {
    for (size_t i = 0; i < part->size(); ++i) {
      float& x = (*part)[i];
      x = ToFloat(ToHalf(normal(random)));
      if (shape.dtype != DType::kI8) continue;
      // A scale of 2^-5 in every row.
      x = i % shape.head_dim == 0 ? 127 : std::nearbyint(std::clamp(32 * x, -127.0f, 127.0f));
      x /= 32;
    }
  }
  return s;
}

// Rows of one call: positions [first, first + rows) of a sequence.
struct Chunk {
  const Sequence* sequence;
  int64_t first;
  int64_t rows;
};

// Bytes of 0xff, behind which nothing may be read: NaN in every type, and as a scale.
class GuardedBytes {
 public:
  explicit GuardedBytes(int64_t bytes) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    const int64_t before = (bytes + page - 1) / page * page;
    mapped_ = static_cast<size_t>(before + page);
    void* const at =
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TREADLE_CHECK(at != MAP_FAILED);
    begin_ = static_cast<std::byte*>(at);
    TREADLE_CHECK(mprotect(begin_ + before, static_cast<size_t>(page), PROT_NONE) == 0);
    std::memset(begin_, 0xff, static_cast<size_t>(before));
    data_ = begin_ + before - bytes;
  }
  ~GuardedBytes() { munmap(begin_, mapped_); }
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;
  std::byte* data() const { return data_; }

 private:
  size_t mapped_;
  std::byte *begin_, *data_;
};

// Runs the chunks as one batch, through the real store, and returns the rows one after the other.
// The cache is all NaN but for the positions up to each chunk's end; rows of no sequence lie in
// between.
std::vector<float> Attend(Backend& ops, const Shape& shape, int64_t page_size,
                          const std::vector<Chunk>& chunks) {
  KvLayout layout{shape.kv_heads, shape.head_dim, page_size, 0, shape.dtype};
  std::vector<std::vector<int32_t>> tables;
  int32_t next_page = 0;
  for (const Chunk& chunk : chunks) {
    tables.emplace_back((chunk.first + chunk.rows + page_size - 1) / page_size);
    for (int32_t& page : tables.back()) page = next_page++;
    std::reverse(tables.back().begin(), tables.back().end());
  }
  layout.num_pages = next_page;
  const GuardedBytes pages(layout.num_pages * layout.PageBytes());
  const int64_t kv_cols = shape.kv_heads * shape.head_dim;
  const int64_t q_cols = shape.heads * shape.head_dim;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const Sequence& s = *chunks[i].sequence;
    const int64_t end = chunks[i].first + chunks[i].rows;
    std::vector<float> q = s.q;
    std::vector<float> k = s.k;
    std::vector<float> v = s.v;
    const SequenceSpan span{0, static_cast<int32_t>(end), 0, tables[i].data()};
    ops.RotateAndStoreKv(DenseTensor(q.data(), DType::kF32, end, q_cols),
                         DenseTensor(k.data(), DType::kF32, end, kv_cols),
                         DenseTensor(v.data(), DType::kF32, end, kv_cols), nullptr,
                         {layout, pages.data(), {&span, 1}});
  }
  std::vector<SequenceSpan> spans;
  std::vector<float> q(q_cols, 7.0f);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const Chunk& c = chunks[i];
    spans.push_back({static_cast<int32_t>(q.size() / q_cols), static_cast<int32_t>(c.rows),
                     static_cast<int32_t>(c.first), tables[i].data()});
    q.insert(q.end(), c.sequence->q.begin() + c.first * q_cols,
             c.sequence->q.begin() + (c.first + c.rows) * q_cols);
    q.insert(q.end(), q_cols, 7.0f);
  }
  std::vector<float> out(q.size(), -7.0f);
  const int64_t rows = static_cast<int64_t>(q.size()) / q_cols;
  ops.Attention(DenseTensor(q.data(), DType::kF32, rows, q_cols), {layout, pages.data(), spans},
                1.0f / std::sqrt(static_cast<float>(shape.head_dim)),
                DenseTensor(out.data(), DType::kF32, rows, q_cols));
  std::vector<float> results;
  int64_t expected_gap = 0;
  for (const SequenceSpan& span : spans) {
    for (int64_t i = expected_gap * q_cols; i < span.first_row * q_cols; ++i) {
      EXPECT_EQ(out[i], -7.0f) << "a row of no sequence was written";
    }
    results.insert(results.end(), out.begin() + span.first_row * q_cols,
                   out.begin() + (span.first_row + span.num_rows) * q_cols);
    expected_gap = span.first_row + span.num_rows;
  }
  return results;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Row `position` of the sequence in double.
std::vector<double> Exact(const Shape& shape, const Sequence& s, int64_t position) {
  const int64_t group = shape.heads / shape.kv_heads;
  const int64_t dim = shape.head_dim;
  std::vector<double> out(shape.heads * dim);
  for (int64_t head = 0; head < shape.heads; ++head) {
    const float* q = s.q.data() + (position * shape.heads + head) * dim;
    std::vector<double> scores(position + 1);
    for (int64_t p = 0; p <= position; ++p) {
      const float* k = s.k.data() + (p * shape.kv_heads + head / group) * dim;
      for (int64_t d = 0; d < dim; ++d) scores[p] += static_cast<double>(q[d]) * k[d];
      scores[p] *= 1.0f / std::sqrt(static_cast<float>(dim));
    }
    const double max = *std::max_element(scores.begin(), scores.end());
    double sum = 0.0;
    for (double& score : scores) sum += score = std::exp(score - max);
    for (int64_t p = 0; p <= position; ++p) {
      const float* v = s.v.data() + (p * shape.kv_heads + head / group) * dim;
      for (int64_t d = 0; d < dim; ++d) out[head * dim + d] += scores[p] / sum * v[d];
    }
  }
  return out;
}

std::vector<Shape> Shapes() {
  return {{9, 3, 64, DType::kF16},  {4, 4, 64, DType::kF32}, {8, 1, 32, DType::kF16},
          {3, 3, 40, DType::kF16},  {7, 1, 5, DType::kF32},  {2, 1, 256, DType::kF16},
          {14, 2, 17, DType::kF16}, {4, 2, 80, DType::kF32}, {128, 1, 16, DType::kF16},
          {9, 3, 64, DType::kI8},   {4, 4, 96, DType::kI8},  {14, 2, 17, DType::kI8},
          {7, 1, 5, DType::kI8},    {2, 1, 256, DType::kI8}, {64, 1, 80, DType::kI8}};
}
// Op cases compare products of codes with the reference.
std::vector<Shape> FloatShapes() {
  std::vector<Shape> shapes = Shapes();
  std::erase_if(shapes, [](const Shape& shape) { return shape.dtype == DType::kI8; });
  return shapes;
}
// Shapes whose products are bf16: tiles of AMX, and what other processors do in their place.
std::vector<Shape> Bf16Shapes() {
  constexpr ComputeMode kBf16 = ComputeMode::kBf16;
  return {{9, 3, 64, DType::kF16, kBf16},
          {3, 3, 40, DType::kF32, kBf16},
          {7, 1, 5, DType::kF32, kBf16},
          {2, 1, 256, DType::kF16, kBf16},
          {14, 2, 17, DType::kF16, kBf16}};
}

class CpuAttentionTest : public testing::TestWithParam<Shape> {};
class ExactCpuAttentionTest : public testing::TestWithParam<Shape> {};  // op cases compare bf16

TEST_P(ExactCpuAttentionTest, IsCloseToDouble) {
  const Shape shape = GetParam();
  const Sequence s = RandomSequence(shape, 200, 1);
  for (const CpuIsa isa : SupportedIsas()) {
    const auto ops = MakeCpuBackend({isa, ComputeMode::kExact}, 1);
    const std::vector<float> got = Attend(*ops, shape, 16, {{&s, 0, 200}});
    // Scores: at most head_dim + 2 roundings of a sum of |q k| / sqrt(dim) <= sqrt(dim) * max|q|
    // max|k| (below 4.5 each here); a relative error e of each weight moves the mean of v by 2 e
    // max|v|. Sums over the positions add less than 100 roundings (64 in a block, blocks,
    // normalization).
    const double half_ulp = 0x1p-24;
    const double dim = static_cast<double>(shape.head_dim);
    const double score_error = (dim + 2.0) * half_ulp * std::sqrt(dim) * 4.5 * 4.5;
    const double tolerance = 4.5 * (2.0 * score_error + 100.0 * half_ulp);
    const int64_t cols = shape.heads * shape.head_dim;
    for (const int64_t position : {0, 1, 15, 16, 63, 64, 65, 127, 128, 199}) {
      const std::vector<double> exact = Exact(shape, s, position);
      for (int64_t i = 0; i < cols; ++i) {
        ASSERT_NEAR(got[position * cols + i], exact[i], tolerance) << position << ", " << i;
      }
    }
  }
}

TEST_P(CpuAttentionTest, BitsDependOnTheRowAlone) {
  const Shape shape = GetParam();
  const Sequence s = RandomSequence(shape, 150, 2);
  const Sequence neighbour = RandomSequence(shape, 333, 3);
  const auto first = MakeCpuBackend({SupportedIsas().front(), shape.compute}, 1);
  const std::vector<float> whole = Attend(*first, shape, 16, {{&s, 0, 150}});
  ASSERT_TRUE(std::none_of(whole.begin(), whole.end(), [](float x) { return std::isnan(x); }));
  const int64_t cols = shape.heads * shape.head_dim;
  for (const CpuIsa isa : SupportedIsas()) {
    for (const int threads : {1, 2, 3}) {
      const auto ops = MakeCpuBackend({isa, shape.compute}, threads);
      for (const int64_t page_size : {16, 32, 64, 128}) {
        SCOPED_TRACE(testing::Message()
                     << Name(isa) << ", " << threads << " threads, pages of " << page_size);
        EXPECT_TRUE(SameBits(Attend(*ops, shape, page_size, {{&s, 0, 150}}), whole));
        std::vector<float> pieces;
        for (const auto& [begin, end] :
             {std::pair<int64_t, int64_t>{0, 1}, {1, 63}, {63, 66}, {66, 149}, {149, 150}}) {
          const std::vector<float> part =
              Attend(*ops, shape, page_size,
                     {{&neighbour, 332, 1}, {&s, begin, end - begin}, {&neighbour, 0, 3}});
          pieces.insert(pieces.end(), part.begin() + cols, part.end() - 3 * cols);
        }
        EXPECT_TRUE(SameBits(pieces, whole));
      }
    }
  }
}

// Rows of the same chunk: what follows a row is not multiplied by zero either.
TEST_P(CpuAttentionTest, LaterPositionsMayBeNaN) {
  const Shape shape = GetParam();
  const Sequence s = RandomSequence(shape, 150, 5);
  const int64_t cols = shape.heads * shape.head_dim;
  const int64_t kv_cols = shape.kv_heads * shape.head_dim;
  for (const CpuIsa isa : SupportedIsas()) {
    const auto ops = MakeCpuBackend({isa, shape.compute}, 2);
    const std::vector<float> clean = Attend(*ops, shape, 32, {{&s, 0, 150}});
    for (const int64_t bad : {1, 14, 63, 64, 70, 149}) {
      Sequence poisoned = s;
      const float nan = std::numeric_limits<float>::quiet_NaN();
      std::fill(poisoned.k.begin() + bad * kv_cols, poisoned.k.end(), nan);
      std::fill(poisoned.v.begin() + bad * kv_cols, poisoned.v.end(), nan);
      std::vector<float> got = Attend(*ops, shape, 32, {{&poisoned, 0, 150}});
      EXPECT_TRUE(std::isnan(got[bad * cols])) << bad;
      got.resize(bad * cols);
      EXPECT_TRUE(SameBits(got, {clean.begin(), clean.begin() + bad * cols})) << bad;
    }
  }
}

// A single decode row over a long context is cut by blocks over the threads.
TEST_P(CpuAttentionTest, LongContextSplitsWithoutATrace) {
  const Shape shape = GetParam();
  const Sequence s = RandomSequence(shape, 1500, 4);
  const auto first = MakeCpuBackend({SupportedIsas().front(), shape.compute}, 1);
  const std::vector<float> alone = Attend(*first, shape, 64, {{&s, 1499, 1}});
  for (const CpuIsa isa : SupportedIsas()) {
    for (const int threads : {2, 3, 5}) {
      const auto ops = MakeCpuBackend({isa, shape.compute}, threads);
      EXPECT_TRUE(SameBits(Attend(*ops, shape, 64, {{&s, 1499, 1}}), alone)) << threads;
      const std::vector<float> tail = Attend(*ops, shape, 64, {{&s, 1490, 10}});
      EXPECT_TRUE(SameBits({tail.end() - static_cast<int64_t>(alone.size()), tail.end()}, alone));
    }
  }
}

// Symmetric codes of 8 bits: value / scale rounded half to even, as torch.round does, with the
// least bfloat16 that is no smaller than the largest magnitude / 127.
TEST(KvCodes, AreRoundedHalfToEvenInStepsOfARoundedUpScale) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const struct {
    std::vector<float> values;  // beyond them, zeros
    uint16_t scale;             // bfloat16
    std::vector<int> codes;
  } rows[] = {
      {{127, -127, 63.5f, 62.5f, 0.5f, -0.5f, 1.5f, -2.5f, 3.49f, -0.0f},
       0x3f80,
       {127, -127, 64, 62, 0, 0, 2, -2, 3, 0}},
      {{127.01f, 1, 64}, 0x3f81, {126, 1, 64}},  // steps of 129 / 128
      {{0, -254, 3}, 0x4000, {0, -127, 2}},
      {{0x1p-140f, -0x1p-141f}, 0x0001, {0, 0}},           // steps of 2^-133, the least bfloat16
      {{0x1.fffffep127f, -0x1p127f}, 0x7c02, {126, -63}},  // steps of 1.015625 * 2^121
      {{}, 0, {}},
      {{1, kNan, 2}, 0x7fc0, {}},
      {{kInf, 1}, 0x7fc0, {}},
      {{1, 2, -kInf}, 0x7fc0, {}},
  };
  constexpr int64_t kDim = 24, kSlot = 5;
  const KvLayout layout{1, kDim, 16, 1, DType::kI8};
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(CreateReferenceBackend());
  for (const CpuIsa isa : SupportedIsas()) {
    backends.push_back(MakeCpuBackend({isa, ComputeMode::kExact}, 1));
  }
  for (const auto& backend : backends) {
    for (const auto& row : rows) {
      std::vector<float> values = row.values;
      values.resize(kDim);
      std::vector<float> q(kDim), k = values, v = values;
      std::vector<std::byte> page(layout.PageBytes(), std::byte{0x55});
      const int32_t number = 0;
      const SequenceSpan span = {0, 1, kSlot, &number};
      const auto tensor = [](std::vector<float>& x) {
        return DenseTensor(x.data(), DType::kF32, 1, kDim);
      };
      backend->RotateAndStoreKv(tensor(q), tensor(k), tensor(v), nullptr,
                                {layout, page.data(), {&span, 1}});
      std::vector<int> keys, found, expected = row.codes;
      expected.resize(kDim);
      for (int64_t i = 0; i < kDim; ++i) {
        keys.push_back(static_cast<int8_t>(page[layout.KeyElement(0, kSlot, i)]));
        found.push_back(static_cast<int8_t>(page[layout.ValueElement(0, kSlot, i)]));
      }
      EXPECT_EQ(keys, expected) << backend->description();
      EXPECT_EQ(found, expected) << backend->description();
      for (const int64_t part : {0, 1}) {
        uint16_t scales[16];
        std::memcpy(scales, &page[2 * layout.PartBytes() + 32 * part], sizeof(scales));
        for (int64_t slot = 0; slot < 16; ++slot) {
          EXPECT_EQ(scales[slot], slot == kSlot ? row.scale : 0x5555) << backend->description();
        }
      }
    }
  }
}

std::string NameOf(const testing::TestParamInfo<Shape>& info) {
  const Shape& s = info.param;
  return "heads" + std::to_string(s.heads) + "kv" + std::to_string(s.kv_heads) + "dim" +
         std::to_string(s.head_dim) + std::string(Name(s.dtype));
}
INSTANTIATE_TEST_SUITE_P(Shapes, CpuAttentionTest, testing::ValuesIn(Shapes()), NameOf);
INSTANTIATE_TEST_SUITE_P(Shapes, ExactCpuAttentionTest, testing::ValuesIn(FloatShapes()), NameOf);
INSTANTIATE_TEST_SUITE_P(Bf16, CpuAttentionTest, testing::ValuesIn(Bf16Shapes()), NameOf);

}  // namespace
}  // namespace treadle
