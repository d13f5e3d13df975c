#include "kernels/cpu/matmul/matmul.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/matmul/weight_arena.h"

namespace treadle {
namespace {

// Below this many activations they are quantized by the caller alone: a task would cost more.
constexpr int64_t kSerialValues = 16384;
// Kernels like to run this many groups side by side, so pieces begin at multiples of it.
constexpr int64_t kGroupsTogether = 2;
// Pieces of a thread where groups have different numbers of rows.
constexpr int64_t kUnevenPieces = 16;

MatMulKernel KernelOfRows(CpuIsa isa, ComputeMode compute) {
  switch (compute) {
    case ComputeMode::kExact:
      return {kMatMulExact[isa], nullptr, 0, false};
    case ComputeMode::kInt8:
      return {kMatMulInt8[isa], kQuantizeInt8[isa], kInt8Bytes, false};
    case ComputeMode::kAuto:
    case ComputeMode::kInt16:
      break;
  }
  return {kMatMulInt16[isa], kQuantizeInt16[isa], kInt16Bytes, true};
}

MatMulKernel KernelOf(CpuIsa isa, ComputeMode compute) {
  MatMulKernel kernel = KernelOfRows(isa, compute);
  if (isa != CpuIsa::kAmx) return kernel;
  kernel.run_row_int8_tiles = avx512::MatMulTilesRowInt8;
  if (compute == ComputeMode::kInt8) {
    kernel.run_tiles = avx512::MatMulTilesInt8;
    kernel.quantize_lane = avx512::QuantizeLaneInt8;
    kernel.tile_block = kTileBlockInt8;
  } else if (kernel.quantize != nullptr) {
    kernel.run_tiles = avx512::MatMulTilesInt16;
    kernel.quantize_lane = avx512::QuantizeLaneInt16;
    kernel.tile_block = kTileBlockInt16;
  }
  return kernel;
}

// Whether tiles take less time, though they compute a multiple of kTileRows: in the time of each of
// them vectors do 13 rows, and 6 in that of unpacking once more (Xeon with AMX, 2026-11-26).
bool TilesPay(int64_t rows) { return rows >= 13 * ((rows + kTileRows - 1) / kTileRows) + 6; }

}  // namespace

PackTarget PackTargetOf(CpuIsa isa, ComputeMode compute) {
  const MatMulKernel kernel = KernelOf(isa, compute);
  // Bits of the largest table whose lookup takes less time than reading integers. A permutation
  // looks at 16 bytes with AVX2, at 64 words with AVX-512, and at 128 bytes with VBMI.
  const int bits = isa >= CpuIsa::kAvx512Vbmi ? 8 : isa == CpuIsa::kAvx512 ? 7 : 5;
  return {.table_bits = kernel.codebooks ? bits : 8,
          .inline_codes = kernel.codebooks || kernel.quantize == nullptr,
          .isa = isa};
}

CpuMatMul::CpuMatMul(ThreadPool& pool, CpuIsa isa, ComputeMode compute)
    : pool_(pool), kernel_(KernelOf(isa, compute)), row_activations_(isa) {}

// Matrices that were quantized with the same inputs have equal orders in places of their own.
size_t CpuMatMul::InputFor(const int32_t* order, int64_t k) {
  const size_t bytes = static_cast<size_t>(k) * sizeof(int32_t);
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const int32_t* known = inputs_[i].order;
    const bool both = known != nullptr && order != nullptr;
    if (known == order || (both && std::memcmp(known, order, bytes) == 0)) return i;
  }
  inputs_.push_back({.order = order});
  return inputs_.size() - 1;
}

void CpuMatMul::Plan(const Tensor& x, std::span<const Projection> projections) {
  TREADLE_CHECK(x.dtype == DType::kF32);
  jobs_.clear();
  row_activations_.Begin();
  inputs_.clear();
  groups_ = most_rows_ = 0;
  for (const Projection& projection : projections) {
    const auto& matrix = static_cast<const CpuMatrix&>(*projection.weight);
    const Tensor& out = projection.out;
    TREADLE_CHECK(matrix.k() == x.cols && matrix.n() == out.cols && out.dtype == DType::kF32);
    TREADLE_CHECK(projection.first_row >= 0 && projection.first_row + out.rows <= x.rows);
    if (out.rows == 0) continue;
    most_rows_ = std::max(most_rows_, out.rows);
    const int64_t groups = (matrix.n() + kGroupFeatures - 1) / kGroupFeatures;
    const PackedView& view = matrix.view();
    const bool row_int8 = view.kind == PackKind::kRowInt8;
    const bool tiles = TilesPay(out.rows) && kernel_.run_tiles != nullptr && HasTiles(view.kind);
    const bool row_tiles =
        row_int8 && out.rows >= kTileRows && kernel_.run_row_int8_tiles != nullptr;
    jobs_.push_back({{view, 0, groups, projection.bias, static_cast<float*>(out.data), out.stride,
                      projection.accumulate},
                     groups_,
                     projection.first_row,
                     out.rows,
                     InputFor(view.input_order, x.cols),
                     row_int8 ? row_activations_.Add(view) : -1,
                     tiles       ? kernel_.run_tiles
                     : row_tiles ? kernel_.run_row_int8_tiles
                                 : kernel_.run,
                     tiles});
    groups_ += groups;
    const bool blocks = matrix.format().group > 0 || (HasCodes(view.kind) && kernel_.codebooks);
    Input& input = inputs_[jobs_.back().input];
    input.tile |= tiles;
    input.quantize |= kernel_.quantize != nullptr && blocks && !tiles;
  }
}

// Bytes of an input's tiles.
int64_t CpuMatMul::TileBytes(const Tensor& x) const {
  return (x.rows + kTileRows - 1) / kTileRows * (x.cols / kBlockValues) * kernel_.tile_block;
}

void CpuMatMul::ReserveScratch(const Tensor& x) {
  const size_t rows = static_cast<size_t>(x.rows);
  const size_t cols = static_cast<size_t>(x.cols);
  const size_t float_bytes = rows * cols * sizeof(float);
  const size_t code_bytes = rows * cols * static_cast<size_t>(kernel_.code_bytes);
  const size_t block_bytes = rows * (cols / kBlockValues) * sizeof(ActivationBlock);
  const auto tile_bytes = static_cast<size_t>(TileBytes(x));
  // Tiles may have rows before and behind those of a job.
  worker_bytes_ = kTileBytes + static_cast<size_t>(most_rows_ + 2 * kTileRows) * kMaxGroupsAtOnce *
                                   kGroupFeatures * sizeof(float);
  const size_t worker_bytes = worker_bytes_ * static_cast<size_t>(pool_.size());
  memory_.Reserve(inputs_.size() *
                      (ScratchMemory::Aligned(float_bytes) + ScratchMemory::Aligned(code_bytes) +
                       ScratchMemory::Aligned(block_bytes) + ScratchMemory::Aligned(tile_bytes)) +
                  worker_bytes);
  for (Input& input : inputs_) {
    input.x = x;
    if (input.order != nullptr) {
      input.x = DenseTensor(memory_.Take<float>(float_bytes), DType::kF32, x.rows, x.cols);
    }
    if (input.quantize) {
      input.codes = memory_.Take<int8_t>(code_bytes);
      input.blocks = memory_.Take<ActivationBlock>(block_bytes);
    }
    if (!input.tile) continue;
    input.tiles = memory_.Take<uint8_t>(tile_bytes);
    // Rows that are not there are multiplied, too: numbers that are quick, not what was there.
    const size_t last = tile_bytes / ((rows + kTileRows - 1) / kTileRows);
    if (rows % kTileRows != 0) std::memset(input.tiles + tile_bytes - last, 0, last);
  }
  worker_memory_ = memory_.Take<uint8_t>(worker_bytes);
  if (!row_activations_.empty()) row_activations_.Reserve(x);
}

void CpuMatMul::PrepareRows(const Tensor& x, const Input& input, int64_t begin, int64_t end) {
  const int64_t blocks = x.cols / kBlockValues;
  for (int64_t row = begin; row < end; ++row) {
    if (input.order != nullptr) {
      const float* from = x.Row<float>(row);
      float* to = input.x.Row<float>(row);
      for (int64_t i = 0; i < x.cols; ++i) to[i] = from[input.order[i]];
    }
    const float* values = input.x.Row<float>(row);
    if (input.tile) {
      kernel_.quantize_lane(values, x.cols, row % kTileRows,
                            input.tiles + row / kTileRows * blocks * kernel_.tile_block);
    }
    if (!input.quantize) continue;
    kernel_.quantize(values, x.cols, input.codes + row * x.cols * kernel_.code_bytes,
                     input.blocks + row * blocks);
  }
}

// Groups [begin, end) counted over all jobs.
void CpuMatMul::RunGroups(int worker, int64_t begin, int64_t end) {
  uint8_t* memory = worker_memory_ + static_cast<size_t>(worker) * worker_bytes_;
  const MatMulScratch scratch{memory, reinterpret_cast<float*>(memory + kTileBytes)};
  for (const Job& job : jobs_) {
    MatMulShare share = job.whole;
    share.group_begin = std::max(int64_t{0}, begin - job.first);
    share.group_end = std::min(job.whole.group_end, end - job.first);
    if (share.group_begin >= share.group_end) continue;
    const Input& from = inputs_[job.input];
    const int64_t k = from.x.cols;
    MatMulInput input = {
        from.x.Row<float>(job.first_row), from.x.stride, nullptr, nullptr, {}, job.rows, k};
    if (job.tiles) {
      input.first_lane = job.first_row % kTileRows;
      input.tiles =
          from.tiles + job.first_row / kTileRows * (k / kBlockValues) * kernel_.tile_block;
    } else if (from.quantize) {
      input.codes = from.codes + job.first_row * k * kernel_.code_bytes;
      input.blocks = from.blocks + job.first_row * (k / kBlockValues);
    }
    if (job.row_int8 >= 0) input.row_int8 = row_activations_.input(job.row_int8, job.first_row);
    job.run(input, share, scratch);
  }
}

// Orders and quantizes the input in the ways that the projections need.
void CpuMatMul::Prepare(const Tensor& x) {
  // In a small call a task would cost more than it saves.
  const auto split = [&](int64_t count, const auto& body) {
    if (x.rows * x.cols <= kSerialValues) {
      body(int64_t{0}, count);
    } else {
      pool_.ParallelFor(count, 1, body);
    }
  };
  if (row_activations_.any_of_call()) {
    split(x.cols, [&](int64_t begin, int64_t end) { row_activations_.FlagColumns(x, begin, end); });
  }
  if (!row_activations_.empty()) {
    split(x.rows,
          [&](int64_t begin, int64_t end) { row_activations_.QuantizeRows(x, begin, end); });
  }
  for (const Input& input : inputs_) {
    if (input.order == nullptr && !input.quantize && !input.tile) continue;
    split(x.rows, [&](int64_t begin, int64_t end) { PrepareRows(x, input, begin, end); });
  }
}

void CpuMatMul::Run(Tensor x, std::span<const Projection> projections) {
  Plan(x, projections);
  if (x.rows == 0 || groups_ == 0) return;
  ReserveScratch(x);
  Prepare(x);
  if (most_rows_ == x.rows) {
    pool_.ParallelFor(groups_, kGroupsTogether, [&](int worker, int64_t begin, int64_t end) {
      RunGroups(worker, begin, end);
    });
    return;
  }
  // Groups of many rows take longer than those of few: whoever is done takes more.
  const int64_t units = (groups_ + kGroupsTogether - 1) / kGroupsTogether;
  const int64_t pieces = std::min(units, kUnevenPieces * pool_.size());
  pool_.ParallelForEach(pieces, [&](int worker, int64_t piece, int64_t) {
    RunGroups(worker, units * piece / pieces * kGroupsTogether,
              std::min(groups_, units * (piece + 1) / pieces * kGroupsTogether));
  });
}

}  // namespace treadle
