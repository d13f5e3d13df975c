#include "engine/record/op_tolerance.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace treadle {
namespace {

constexpr double kUnit = 0x1p-24;

double At(Tensor x, int64_t row, int64_t column) {
  return LoadElement(x.dtype, x.Rows(row, 1).data, column);
}

double LargestOf(Tensor x, int64_t row) {
  double largest = 0;
  for (int64_t i = 0; i < x.cols; ++i) largest = std::fmax(largest, std::fabs(At(x, row, i)));
  return largest;
}

double NormOf(Tensor x, int64_t row) {
  double squares = 0;
  for (int64_t i = 0; i < x.cols; ++i) squares += At(x, row, i) * At(x, row, i);
  return std::sqrt(squares);
}

// 0 where nothing is added to.
double Before(Tensor before, int64_t row, int64_t column) {
  return before.rows == 0 ? 0 : std::fabs(At(before, row, column));
}

// What rounding once to a 16-bit type changes, at most.
double Rounding(double size, DType type) {
  if (type == DType::kF16) return std::fmax(0x1p-11 * size, 0x1p-25);
  return type == DType::kBF16 ? 0x1p-8 * size : 0;
}

// The magnitudes of a sequence's K and V, by which one can tell what scores and sums may be.
struct CacheMagnitudes {
  double key_norm = 0;  // of a head, the largest
  double value = 0;
};

CacheMagnitudes MagnitudesIn(const KvView& kv, const SequenceSpan& span) {
  const KvLayout& layout = kv.layout;
  CacheMagnitudes found;
  for (int64_t p = kv.FirstSeen(span.first_position); p < span.first_position + span.num_rows;
       ++p) {
    const std::byte* const page = kv.pages + span.pages[p / layout.page_size] * layout.PageBytes();
    const int64_t slot = p % layout.page_size;
    for (int64_t head = 0; head < layout.kv_heads; ++head) {
      double squares = 0;
      for (int64_t i = 0; i < layout.head_dim; ++i) {
        const double key = LoadElement(layout.dtype, page, layout.KeyElement(head, slot, i));
        const double value = LoadElement(layout.dtype, page, layout.ValueElement(head, slot, i));
        squares += key * key;
        found.value = std::fmax(found.value, std::fabs(value));
      }
      found.key_norm = std::fmax(found.key_norm, std::sqrt(squares));
    }
  }
  return found;
}

// |scale * code| + |offset| of a row of codes.
void AddOffsets(const MatrixSource& source, int64_t row, std::vector<float>& magnitudes) {
  CodeGroup group;
  const WeightFormat& format = *source.format;
  for (int64_t g = 0; g < source.k / format.group; ++g) {
    format.codes(source.data + row * format.RowBytes(source.k), g, group);
    for (int64_t i = 0; i < format.group; ++i) {
      magnitudes[g * format.group + i] =
          std::fabs(group.scale * static_cast<float>(group.codes[i])) + std::fabs(group.offset);
    }
  }
}

}  // namespace

WeightMagnitudes MagnitudesOf(const MatrixSource& source, ComputeMode compute) {
  WeightMagnitudes magnitudes;
  const WeightFormat& format = *source.format;
  const MatrixConstants* const constants = source.constants;
  magnitudes.row_int8 = format.activations == ActivationPolicy::kRowInt8;
  if (magnitudes.row_int8) magnitudes.outlier_threshold = constants->outlier_threshold;
  magnitudes.rounds_codebook =
      format.apart() && !magnitudes.row_int8 && compute == ComputeMode::kInt16;
  std::vector<float> values(static_cast<size_t>(source.k));
  for (int64_t n = 0; n < source.n; ++n) {
    const int64_t row = source.SourceRow(n);
    DecodeSourceRow(source, row, values.data());
    if (format.group > 0) AddOffsets(source, row, values);
    double squares = 0;
    float largest = 0;
    for (int64_t i = 0; i < source.k; ++i) {
      double size = std::fabs(values[i]);
      if (constants != nullptr && !constants->zeros.empty()) {
        const int64_t block = (row * source.k + i) / constants->scale_block;
        size += 2 * std::fabs(double{constants->scales[block]} * constants->zeros[block]);
      }
      squares += size * size;
      largest = std::max(largest, static_cast<float>(size));
    }
    magnitudes.norms.push_back(static_cast<float>(std::sqrt(squares)));
    magnitudes.largest.push_back(largest);
  }
  return magnitudes;
}

ToleranceOf Exactly() {
  return [](int64_t, int64_t) { return 0.0; };
}

ToleranceOf RmsNormTolerance(Tensor expected, Tensor before) {
  const double roundings = 8 + std::sqrt(static_cast<double>(expected.cols)) / 4;
  return [=](int64_t row, int64_t i) {
    return kUnit * roundings * (std::fabs(At(expected, row, i)) + 2 * Before(before, row, i));
  };
}

ToleranceOf LayerNormTolerance(Tensor x, const float* weight, const float* bias, float eps) {
  return [=](int64_t row, int64_t i) {
    const auto n = static_cast<double>(x.cols);
    double sum = 0;
    for (int64_t k = 0; k < x.cols; ++k) sum += At(x, row, k);
    const double squares = std::pow(NormOf(x, row), 2);
    const double scale = 1 / std::sqrt(std::fmax(squares / n - std::pow(sum / n, 2), 0) + eps);
    const double moved = std::fabs(At(x, row, i)) + std::sqrt(squares / n);
    const double shift = bias == nullptr ? 0 : std::fabs(bias[i]);
    return kUnit * (8 + std::sqrt(n) / 4) * (moved * scale * std::fabs(weight[i]) + shift);
  };
}

ToleranceOf MatMulTolerance(const WeightMagnitudes& weight, Tensor x, Tensor batch,
                            const float* bias, Tensor before) {
  const double root = std::sqrt(static_cast<double>(x.cols));
  double roundings = 8 + root;
  if (weight.row_int8) {  // the integer sum is exact; each outlier's product is added with one
    roundings = 12;
    for (int64_t row = 0; row < batch.rows && weight.outlier_threshold > 0; ++row) {
      for (int64_t i = 0; i < batch.cols; ++i) {
        roundings += std::fabs(At(batch, row, i)) >= weight.outlier_threshold ? 1 : 0;
      }
    }
  }
  return [=, &weight](int64_t row, int64_t n) {
    const double norm = NormOf(x, row);
    // A quantized activation is twice the given one at most.
    double sum = 2 * weight.norms[n] * norm + Before(before, row, n);
    if (bias != nullptr) sum += std::fabs(bias[n]);
    double tolerance = kUnit * roundings * sum;
    if (weight.rounds_codebook) {  // activations by half a step of 16,256, weights of 3,584
      tolerance +=
          1.01 * root *
          (weight.norms[n] * LargestOf(x, row) / (2 * 16256) + norm * weight.largest[n] / 7168);
    }
    return tolerance;
  };
}

ToleranceOf RowTolerance(Tensor rotated) {
  return [=](int64_t row, int64_t) { return 8 * kUnit * LargestOf(rotated, row); };
}

double StoredTolerance(Tensor k, int64_t row, DType cache) {
  // A rotated element is at most the root of 2 times the largest; it may round to a neighbour.
  const double size = std::sqrt(2.0) * LargestOf(k, row);
  return 8 * kUnit * size + 2 * Rounding(size, cache);
}

ToleranceOf AttentionTolerance(Tensor q, const KvView& kv, float scale) {
  std::vector<CacheMagnitudes> magnitudes;
  for (const SequenceSpan& span : kv.sequences) magnitudes.push_back(MagnitudesIn(kv, span));
  return [=, magnitudes = std::move(magnitudes)](int64_t row, int64_t) {
    for (size_t s = 0; s < kv.sequences.size(); ++s) {
      const SequenceSpan& span = kv.sequences[s];
      if (row < span.first_row || row >= span.first_row + span.num_rows) continue;
      const auto positions = static_cast<double>(span.first_position + span.num_rows);
      double score = NormOf(q, row) * magnitudes[s].key_norm * scale;
      // Slopes of ALiBi are below 1.
      if (kv.slopes != nullptr) score += positions;
      const double terms = std::sqrt(static_cast<double>(kv.layout.head_dim)) + 12;
      // An error e of the scores moves every weight by a factor of 1 +- 2e; sums add their own.
      const double of_weights = 4 * terms * score + std::sqrt(positions) + 24;
      return 2 * kUnit * of_weights * magnitudes[s].value;
    }
    return 0.0;
  };
}

ToleranceOf GatedTolerance(Tensor gate, Tensor up, Tensor expected) {
  return [=](int64_t row, int64_t i) {
    const double x = std::fabs(At(gate, row, i));
    const double product = x * std::fabs(At(up, row, i));
    return kUnit * ((12 + 4 * x) * std::fabs(At(expected, row, i)) + 7 * product) + 0x1p-126;
  };
}

ToleranceOf ElementTolerance(Tensor x) {
  return [=](int64_t row, int64_t i) { return 40 * kUnit * std::fabs(At(x, row, i)) + 0x1p-126; };
}

ToleranceOf MixTolerance(Tensor x, std::span<const int32_t> places, Tensor weights, Tensor before) {
  return [=](int64_t row, int64_t i) {
    double sum = Before(before, row, i);
    for (int64_t j = 0; j < weights.cols; ++j) {
      const int32_t place = places[static_cast<size_t>(row * weights.cols + j)];
      sum += std::fabs(At(weights, row, j) * At(x, place, i));
    }
    return kUnit * static_cast<double>(weights.cols + 2) * sum;
  };
}

double SampleTolerance(Tensor logits, int64_t row) {
  double largest = 0;
  for (int64_t i = 0; i < logits.cols; ++i) {
    const double size = std::fabs(At(logits, row, i));
    if (size < 1e30) largest = std::fmax(largest, size);
  }
  return kUnit * (16 + std::sqrt(static_cast<double>(logits.cols)) / 4 + 6 * largest);
}

}  // namespace treadle
