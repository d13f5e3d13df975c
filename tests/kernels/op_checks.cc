#include "tests/kernels/op_checks.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/op_cases/random.h"

namespace treadle {
namespace {

bool SameBits(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }

absl::Status SameOutput(const OpCase& op_case, std::span<const float> expected,
                        std::span<const float> found, std::string_view how) {
  TREADLE_CHECK(expected.size() == found.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    if (SameBits(expected[i], found[i])) continue;
    return Internal(op_case.name, ": element ", i, " is ", std::hexfloat, found[i], " ", how,
                    ", expected ", expected[i]);
  }
  return absl::OkStatus();
}

// All that lies on the device, as floats: [rows + 2, stride].
std::vector<float> Download(const OpRun& run, const GuardedTensor& tensor) {
  std::vector<float> now(tensor.initial().size());
  run.Finish();
  if (tensor.dtype() == DType::kF32) {
    run.backend().CopyToHost(now.data(), tensor.device().data(), now.size() * sizeof(float));
    return now;
  }
  std::vector<uint16_t> bits(now.size());
  run.backend().CopyToHost(bits.data(), tensor.device().data(), bits.size() * sizeof(uint16_t));
  for (size_t i = 0; i < bits.size(); ++i) {
    now[i] = tensor.dtype() == DType::kF16 ? ToFloat(Half{bits[i]}) : ToFloat(BFloat16{bits[i]});
  }
  return now;
}
std::vector<std::byte> Download(const OpRun& run, const KvCaseCache& cache) {
  std::vector<std::byte> now(cache.initial().size());
  run.Finish();
  run.backend().CopyToHost(now.data(), cache.device().data(), now.size());
  return now;
}

bool WritesCache(Op op) {
  return op == Op::kRotateAndStoreKv || op == Op::kCopyPages || op == Op::kConvolve ||
         op == Op::kGatedDelta;
}

// All pages' present elements, in the order of KeyOrder::kByFeature.
void AppendCache(const OpRun& run, std::vector<float>& out) {
  const KvLayout& layout = run.cache->layout();
  std::vector<std::byte> now = Download(run, *run.cache);
  const int64_t part = layout.PartElements();
  for (int64_t page = 0; page < layout.num_pages; ++page) {
    std::byte* const data = now.data() + (page + 1) * layout.PageBytes();
    const size_t first = out.size();
    if (layout.state.present()) {
      out.resize(first + static_cast<size_t>(layout.state.Floats(layout.page_size)));
      std::memcpy(out.data() + first, data, static_cast<size_t>(layout.PageBytes()));
      continue;
    }
    out.resize(first + static_cast<size_t>(layout.Parts() * part));
    for (int64_t slot = 0; slot < layout.page_size; ++slot) {
      for (int64_t j = 0; j < layout.kv_heads * layout.head_dim; ++j) {
        const int64_t head = j / layout.head_dim;
        const int64_t i = j % layout.head_dim;
        out[first + KeyByFeature(layout, head, slot, i)] =
            KvRow(layout, data, KvPart::kKey, head, slot).Load(i);
        if (layout.latent_dim > 0) continue;
        out[first + layout.ValueElement(head, slot, i)] =
            KvRow(layout, data, KvPart::kValue, head, slot).Load(i);
      }
    }
  }
}

absl::Status CheckGuards(const OpRun& run, const GuardedTensor& tensor) {
  const auto rounded = [&](float x) {
    if (tensor.dtype() == DType::kF32) return x;
    return tensor.dtype() == DType::kF16 ? ToFloat(ToHalf(x)) : ToFloat(ToBFloat16(x));
  };
  const std::vector<float> now = Download(run, tensor);
  for (size_t i = 0; i < now.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / tensor.stride() - 1;
    const int64_t col = static_cast<int64_t>(i) % tensor.stride();
    const bool inside = row >= 0 && row < tensor.rows() && col < tensor.cols();
    if (inside && tensor.role() != Role::kInput) continue;
    const float before = rounded(tensor.initial()[i]);
    if (std::memcmp(&now[i], &before, sizeof(float)) != 0) {
      return Internal(tensor.name(), " [", tensor.rows(), ", ", tensor.cols(), "]: row ", row,
                      " column ", col,
                      inside ? " of an input was changed" : " outside was written");
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<float> Output(const OpRun& run) {
  std::vector<float> out;
  for (const GuardedTensor& tensor : run.tensors) {
    if (tensor.role() != Role::kOutput) continue;
    const std::vector<float> now = Download(run, tensor);
    for (int64_t row = 0; row < tensor.rows(); ++row) {
      const float* from = now.data() + (row + 1) * tensor.stride();
      out.insert(out.end(), from, from + tensor.cols());
    }
  }
  if (WritesCache(run.op_case().op)) AppendCache(run, out);
  run.Finish();
  const auto append = [&out](const std::vector<float>& more) {
    out.insert(out.end(), more.begin(), more.end());
  };
  for (const SampleResult& result : run.samples) append(FieldsOf(result));
  for (const ShardSample& shard : run.shards) append(FieldsOf(shard));
  return out;
}

std::vector<float> Tolerance(const TolerantReference& reference) {
  const OpTolerances& tolerances = reference.tolerances();
  std::vector<float> all;
  for (const OpTolerances::Output& output : tolerances.outputs) {
    all.insert(all.end(), output.error.begin(), output.error.end());
  }
  all.insert(all.end(), tolerances.cache.begin(), tolerances.cache.end());
  all.insert(all.end(), tolerances.fields.begin(), tolerances.fields.end());
  return all;
}

absl::Status CheckGuards(const OpRun& run) {
  for (const GuardedTensor& tensor : run.tensors) {
    TREADLE_RETURN_IF_ERROR(CheckGuards(run, tensor));
  }
  if (run.cache == nullptr) return absl::OkStatus();
  const std::vector<std::byte>& before = run.cache->initial();
  const std::vector<std::byte> now = Download(run, *run.cache);
  const KvLayout& layout = run.cache->layout();
  const int64_t page = layout.PageBytes();
  for (int64_t i = 0; i <= layout.num_pages + 1; ++i) {
    if (WritesCache(run.op_case().op) && i > 0 && i <= layout.num_pages) continue;
    if (std::memcmp(now.data() + i * page, before.data() + i * page, page) != 0) {
      return Internal("K/V page ", i - 1, " of ", layout.num_pages, " was written");
    }
  }
  return absl::OkStatus();
}

absl::Status MatchesReference(const OpCase& any_case, Backend& backend,
                              const Arithmetic& arithmetic, uint64_t seed) {
  OpCase op_case = any_case;
  op_case.bf16 = arithmetic.compute == ComputeMode::kBf16;
  TolerantReference reference(arithmetic);
  const auto expected_run = Prepare(op_case, reference, seed);
  const auto run = Prepare(op_case, backend, seed);
  expected_run->Run();
  run->Run();
  const std::vector<float> expected = Output(*expected_run);
  const std::vector<float> found = Output(*run);
  const std::vector<float> tolerance = Tolerance(reference);
  TREADLE_CHECK(expected.size() == found.size() && expected.size() == tolerance.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    if (SameBits(expected[i], found[i])) continue;
    if (std::fabs(double{expected[i]} - found[i]) <= tolerance[i]) continue;
    return Internal(op_case.name, " on ", backend.description(), ": element ", i, " is ", found[i],
                    ", expected ", expected[i], " within ", tolerance[i]);
  }
  return CheckGuards(*run);
}

absl::Status BatchInvariance(const OpCase& any_case, Backend& backend, Backend* other,
                             uint64_t seed) {
  OpCase op_case = any_case;
  op_case.outlier_rule = OutlierRule::kPerRow;
  const auto run = Prepare(op_case, backend, seed);
  run->Run();
  const std::vector<float> whole = Output(*run);

  Random random(SeedOf(op_case.name, seed + 1));
  run->Reset();
  for (int64_t begin = 0; begin < run->rows();) {
    const int64_t left = run->rows() - begin;
    const int64_t count = 1 + random.Below(std::min<int64_t>(left, 1 + random.Below(40)));
    run->RunRows(begin, count);
    begin += count;
  }
  TREADLE_RETURN_IF_ERROR(SameOutput(op_case, whole, Output(*run), "when cut at random"));

  // Only some of many rows run alone, the others together.
  run->Reset();
  for (int64_t begin = 0; begin < run->rows();) {
    const int64_t left = run->rows() - begin;
    const bool alone = run->rows() <= 64 || random.Below(8) == 0;
    const int64_t count = alone ? 1 : std::min<int64_t>(left, 8);
    run->RunRows(begin, count);
    begin += count;
  }
  TREADLE_RETURN_IF_ERROR(SameOutput(op_case, whole, Output(*run), "row by row"));

  if (other == nullptr) return absl::OkStatus();
  const auto twin = Prepare(op_case, *other, seed);
  twin->Run();
  return SameOutput(op_case, whole, Output(*twin), Str("on ", other->description()));
}

}  // namespace treadle
