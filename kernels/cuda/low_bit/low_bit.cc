#include "kernels/cuda/low_bit/low_bit.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/cuda/dense/cublas_lt.h"

namespace treadle::cuda {
namespace {

// A product of more rows decodes the matrix to 16 bits and leaves it to the library. Estimated in
// cycles of a multiprocessor of an H200 for 1024 codes (low_bit_few_kernel.h): the few-rows kernel
// takes about 65 (4 bits) or 90 (8 bits) for every 32 rows, bound by reads of shared memory and L1;
// decoding takes about 130, bound by the 2048 bytes that it writes; so does the library's product,
// which reads them, up to 192 rows, where arithmetic becomes its bound. 260 cycles are 128 and 96
// rows. To measure it: `treadle-bench kernels --crossover-rows`.
constexpr int64_t kFewRows4 = 128;
constexpr int64_t kFewRows8 = 96;

// So many features are decoded at a time: 4096 x 4096 weights of 16 bits stay in a cache of 50 MB,
// and 2048 rows of them are two waves of 128 x 256 tiles.
constexpr int64_t kDecodedFeatures = 4096;
constexpr size_t kMaxScratch = size_t{128} << 20;

class LowBitFamily final : public MatMulFamily {
 public:
  LowBitFamily(Device& device, const MatMulOptions& options) : device_(device), options_(options) {}

  bool Takes(const MatrixSource& source) const override {
    const WeightFormat& format = *source.format;
    return format.group > 0 || (format.apart() && format.activations == ActivationPolicy::kFloat);
  }

  absl::StatusOr<std::unique_ptr<CudaMatrix>> Pack(const MatrixSource& source) override {
    if (!packed_) {
      packed_ = true;
      TREADLE_RETURN_IF_ERROR(AllocateScratch());
    }
    return PackLowBit(device_, *this, source, options_.dtype, options_.threads);
  }

  absl::Status Reserve(int64_t max_rows, int64_t max_k, int64_t max_n) override {
    max_rows_ = max_rows;
    max_k_ = max_k;
    max_n_ = max_n;
    return AllocateScratch();
  }

  bool Rounds(const CudaMatrix& matrix) const override {
    return options_.dtype != DType::kF32 && ViewOf(matrix).bits != 32;
  }

  void Multiply(const MatMulInput& input, std::span<const Projection> projections) override {
    if (input.x.rows == 0) return;
    few_.clear();
    for (const Projection& projection : projections) {
      const LowBitProduct product = {.w = ViewOf(*projection.weight),
                                     .bias = projection.bias,
                                     .out = projection.out,
                                     .accumulate = projection.accumulate};
      TREADLE_CHECK(product.w.k == input.x.cols && product.w.n == product.out.cols);
      if (!Rounds(static_cast<const CudaMatrix&>(*projection.weight))) {
        LowBitExact(device_, input.x, product);
      } else if (ScratchFeatures(product.w) > 0 && input.x.rows > FewRows(product.w)) {
        MultiplyMany(input, product);
      } else {
        few_.push_back(product);
      }
    }
    if (!few_.empty()) LowBitFewRows(device_, input, few_);
  }

  void Embed(const CudaMatrix& table, const EmbedRows& rows) override {
    LowBitEmbed(device_, ViewOf(table), rows);
  }

 private:
  // Memory for products of many rows, if there are such, and matrices of this family.
  absl::Status AllocateScratch() {
    const bool many = max_rows_ > options_.few_rows.value_or(std::min(kFewRows4, kFewRows8));
    if (!packed_ || !many || options_.deterministic || options_.dtype == DType::kF32) {
      return absl::OkStatus();
    }
    if (library_ == nullptr) {
      TREADLE_ASSIGN_OR_RETURN(library_, CublasLt::Create(device_));
    }
    const int64_t stride = (max_k_ + kStepColumns - 1) / kStepColumns * kStepColumns;
    const auto wanted = static_cast<size_t>(std::min(max_n_, kDecodedFeatures) * stride * 2);
    return Grow(device_, std::min(wanted, kMaxScratch), scratch_);
  }

  static const LowBitView& ViewOf(const PackedMatrix& matrix) {
    return static_cast<const LowBitMatrix&>(matrix).view();
  }
  int64_t FewRows(const LowBitView& w) const {
    return options_.few_rows.value_or(w.bits == 4 ? kFewRows4 : kFewRows8);
  }

  // How many features of a matrix fit the scratch; 0 if there is none, as with `deterministic`.
  int64_t ScratchFeatures(const LowBitView& w) const {
    const int64_t row_bytes = int64_t{w.steps} * kStepColumns * 2;
    const int64_t features = static_cast<int64_t>(scratch_.bytes()) / row_bytes;
    return std::min(features / kBandFeatures * kBandFeatures, kDecodedFeatures);
  }

  void MultiplyMany(const MatMulInput& input, const LowBitProduct& product) {
    const int64_t most = ScratchFeatures(product.w);
    for (int64_t first = 0; first < product.w.n; first += most) {
      const int64_t count = std::min(most, product.w.n - first);
      const LowBitProduct part = {.w = SliceFeatures(product.w, first, count),
                                  .bias = product.bias == nullptr ? nullptr : product.bias + first,
                                  .out = product.out.Cols(first, count),
                                  .accumulate = product.accumulate};
      // The library may decline a shape.
      if (!MultiplyDecoded(input, part)) LowBitFewRows(device_, input, {&part, 1});
    }
  }

  bool MultiplyDecoded(const MatMulInput& input, const LowBitProduct& part) {
    const int64_t stride = int64_t{part.w.steps} * kStepColumns;
    auto* decoded = reinterpret_cast<uint16_t*>(scratch_.data());
    LowBitDecode(device_, part.w, input.dtype, decoded);
    return library_->Multiply({.weights = decoded,
                               .weight_stride = stride,
                               .x = input.x16,
                               .x_stride = input.stride16,
                               .bias = part.bias,
                               .out = part.out.Row<float>(0),
                               .out_stride = part.out.stride,
                               .dtype = input.dtype,
                               .rows = input.x.rows,
                               .n = part.w.n,
                               .k = stride,
                               .accumulate = part.accumulate});
  }

  Device& device_;
  const MatMulOptions options_;
  bool packed_ = false;  // something
  int64_t max_rows_ = 0;
  int64_t max_k_ = 0;
  int64_t max_n_ = 0;
  std::unique_ptr<CublasLt> library_;  // with scratch_: neither, or both
  Buffer scratch_;                     // decoded features
  std::vector<LowBitProduct> few_;     // of a call; kept for its memory
};

}  // namespace

std::unique_ptr<MatMulFamily> MakeLowBitFamily(Device& device, const MatMulOptions& options) {
  return std::make_unique<LowBitFamily>(device, options);
}

}  // namespace treadle::cuda
