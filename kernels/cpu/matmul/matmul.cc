#include "kernels/cpu/matmul/matmul.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/cpu/weight_arena.h"

namespace treadle {
namespace {

// Below this many activations they are quantized by the caller alone: a task would cost more.
constexpr int64_t kSerialValues = 16384;
// Kernels like to run this many groups side by side, so pieces begin at multiples of it.
constexpr int64_t kGroupsTogether = 2;
// Pieces of a thread where groups have different numbers of rows.
constexpr int64_t kUnevenPieces = 16;
// Rows of a gated product at a time, of kGroupsTogether groups: its two results stay in the cache.
constexpr int64_t kGatedRows = 512;
constexpr size_t kGatedBytes = kGatedRows * kGroupsTogether * kGroupFeatures * sizeof(float);
static_assert(kGatedRows % kTileRows == 0);

MatMulKernel KernelOfRows(CpuIsa isa, ComputeMode compute) {
  switch (compute) {
    case ComputeMode::kExact:
      return {kMatMulExact[isa], nullptr, 0, false};
    case ComputeMode::kInt8:
      return {kMatMulInt8[isa], kQuantizeInt8[isa], kInt8Bytes, false};
    case ComputeMode::kInt12:
      return {kMatMulInt16[isa], kQuantizeInt12[isa], kInt16Bytes, true};
    case ComputeMode::kAuto:
    case ComputeMode::kInt16:
    case ComputeMode::kBf16:   // of other matrices than layers'
    case ComputeMode::kMixed:  // never: it is several
      break;
  }
  return {kMatMulInt16[isa], kQuantizeInt16[isa], kInt16Bytes, true};
}

MatMulKernel KernelOf(CpuIsa isa, ComputeMode compute) {
  MatMulKernel kernel = KernelOfRows(isa, compute);
  kernel.run_bf16 = kMatMulBf16[isa];
  kernel.round_row = kRoundRowToBf16[isa];
  if (isa != CpuIsa::kAmx) return kernel;
  kernel.bf16_tiles = {avx512::MatMulTilesBf16, avx512::RoundTileToBf16, kTileBlockBf16, true};
  kernel.run_row_int8_tiles = avx512::MatMulTilesRowInt8;
  if (compute == ComputeMode::kInt8) {
    kernel.tiles = {avx512::MatMulTilesInt8, avx512::QuantizeTileInt8, kTileBlockInt8};
  } else if (compute == ComputeMode::kInt12) {
    kernel.tiles = {avx512::MatMulTilesInt12, avx512::QuantizeTileInt12, kTileBlockInt12};
  } else if (kernel.quantize != nullptr) {
    kernel.tiles = {avx512::MatMulTilesInt16, avx512::QuantizeTileInt16, kTileBlockInt16};
  }
  return kernel;
}

// For matrices packed for `mode`. kMixed and kInt12 have several kernels, others have one for all.
MatMulKernel KernelOfMode(CpuIsa isa, ComputeMode compute, ComputeMode mode) {
  const bool several = compute == ComputeMode::kMixed || compute == ComputeMode::kInt12;
  return KernelOf(isa, several ? mode : compute);
}

int64_t Blocks(int64_t k) { return (k + kBlockValues - 1) / kBlockValues; }

// Bytes of a tile of rows.
int64_t RowTileBytes(const TileKernel& kernel, int64_t k) { return Blocks(k) * kernel.block_bytes; }

}  // namespace

PackTarget PackTargetOf(CpuIsa isa, ComputeMode compute, const MatrixSource& source) {
  const ComputeMode mode = ModeOf(compute, source);
  if (mode == ComputeMode::kBf16) {
    return {.table_bits = 8,
            .inline_codes = true,
            .isa = isa,
            .compute = mode,
            .bf16 = true,
            .tiles = isa == CpuIsa::kAmx};
  }
  const MatMulKernel kernel = KernelOf(isa, mode);
  // Bits of the largest table whose lookup takes less time than reading integers. A permutation
  // looks at 16 bytes with AVX2, at 64 words with AVX-512, and at 128 bytes with VBMI.
  const int bits = isa >= CpuIsa::kAvx512Vbmi ? 8 : isa == CpuIsa::kAvx512 ? 7 : 5;
  return {.table_bits = kernel.codebooks ? bits : 8,
          .inline_codes = kernel.codebooks || kernel.quantize == nullptr,
          .isa = isa,
          .compute = mode,
          .integers = kernel.quantize != nullptr};
}

CpuMatMul::CpuMatMul(ThreadPool& pool, CpuIsa isa, ComputeMode compute)
    : pool_(pool),
      kernel_(KernelOfMode(isa, compute, ComputeMode::kInt16)),
      int8_(KernelOfMode(isa, compute, ComputeMode::kInt8)),
      int12_(KernelOfMode(isa, compute, ComputeMode::kInt12)),
      row_activations_(isa) {}

// Matrices that were quantized with the same inputs have equal orders in places of their own.
size_t CpuMatMul::InputFor(const CpuMatrix& matrix) {
  const PackedView& view = matrix.view();
  const int32_t* const order = view.input_order;
  const MatMulKernel* const kernel = &KernelFor(matrix);
  const size_t bytes = static_cast<size_t>(view.k) * sizeof(int32_t);
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (inputs_[i].bf16 != view.bf16 || inputs_[i].kernel != kernel) continue;
    const int32_t* known = inputs_[i].order;
    const bool both = known != nullptr && order != nullptr;
    if (known == order || (both && std::memcmp(known, order, bytes) == 0)) return i;
  }
  inputs_.push_back({.order = order, .bf16 = view.bf16, .kernel = kernel});
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
    const MatMulKernel& kernel = KernelFor(matrix);
    const TileKernel* tiles = view.bf16 ? &kernel.bf16_tiles : &kernel.tiles;
    const bool has_tiles = tiles->run != nullptr && (view.bf16 || HasTiles(view.kind));
    if (!has_tiles || !tiles->Pays(projection.first_row % kTileRows, out.rows)) tiles = nullptr;
    const bool row_tiles =
        row_int8 && out.rows >= kTileRows && kernel_.run_row_int8_tiles != nullptr;
    jobs_.push_back({{view, 0, groups, projection.bias, static_cast<float*>(out.data), out.stride,
                      projection.accumulate},
                     groups_,
                     projection.first_row,
                     out.rows,
                     InputFor(matrix),
                     row_int8 ? row_activations_.Add(view) : -1,
                     tiles != nullptr ? tiles->run
                     : row_tiles      ? kernel_.run_row_int8_tiles
                     : view.bf16      ? kernel.run_bf16
                                      : kernel.run,
                     tiles != nullptr});
    groups_ += groups;
    const bool blocks = matrix.format().group > 0 || IntegerRunOf(view.kind) ||
                        (HasCodes(view.kind) && kernel.codebooks);
    Input& input = inputs_[jobs_.back().input];
    if (tiles != nullptr) {
      input.tile_kernel = tiles;
    } else if (view.bf16) {
      input.round = true;
    } else {
      input.quantize |= kernel.quantize != nullptr && blocks;
    }
  }
}

void CpuMatMul::ReserveScratch(const Tensor& x, size_t more_bytes) {
  const size_t rows = static_cast<size_t>(x.rows);
  const size_t cols = static_cast<size_t>(x.cols);
  const auto padded_cols = static_cast<size_t>(Blocks(x.cols) * kBlockValues);
  const size_t float_bytes = rows * padded_cols * sizeof(float);
  const auto code_bytes = [&](const Input& input) {
    return rows * cols * static_cast<size_t>(input.kernel->code_bytes);
  };
  const size_t block_bytes = rows * (cols / kBlockValues) * sizeof(ActivationBlock);
  const size_t row_tiles = (rows + kTileRows - 1) / kTileRows;
  // Tiles may have rows before and behind those of a job.
  worker_bytes_ =
      std::max(worker_bytes_, kTileBytes +
                                  static_cast<size_t>(most_rows_ + 2 * kTileRows) *
                                      kMaxGroupsAtOnce * kGroupFeatures * sizeof(float) +
                                  more_bytes);
  const size_t all_workers = worker_bytes_ * static_cast<size_t>(pool_.size());
  worker_scratch_.Reserve(all_workers);
  worker_memory_ = worker_scratch_.Take<uint8_t>(all_workers);
  size_t bytes = 0;
  for (const Input& input : inputs_) {
    if (input.order != nullptr) bytes += ScratchMemory::Aligned(float_bytes);
    if (input.round) bytes += ScratchMemory::Aligned(float_bytes);
    if (input.quantize) {
      bytes += ScratchMemory::Aligned(code_bytes(input)) + ScratchMemory::Aligned(block_bytes);
    }
    if (input.tile_kernel != nullptr) {
      bytes += ScratchMemory::Aligned(
          row_tiles * static_cast<size_t>(RowTileBytes(*input.tile_kernel, x.cols)));
    }
  }
  memory_.Reserve(bytes);
  for (Input& input : inputs_) {
    input.x = x;
    if (input.order != nullptr) {
      input.x = DenseTensor(memory_.Take<float>(float_bytes), DType::kF32, x.rows, x.cols);
    }
    if (input.round) {
      input.rounded = DenseTensor(memory_.Take<float>(float_bytes), DType::kF32, x.rows,
                                  static_cast<int64_t>(padded_cols));
    }
    if (input.quantize) {
      input.codes = memory_.Take<int8_t>(code_bytes(input));
      input.blocks = memory_.Take<ActivationBlock>(block_bytes);
    }
    if (input.tile_kernel == nullptr) continue;
    const auto tile = static_cast<size_t>(RowTileBytes(*input.tile_kernel, x.cols));
    input.tiles = memory_.Take<uint8_t>(row_tiles * tile);
  }
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
    if (input.round) kernel_.round_row(values, x.cols, input.rounded.Row<float>(row));
    if (!input.quantize) continue;
    input.kernel->quantize(values, x.cols, input.codes + row * x.cols * input.kernel->code_bytes,
                           input.blocks + row * blocks);
  }
  if (input.tile_kernel == nullptr) return;
  for (int64_t row = begin; row < end;) {
    const int64_t lane = row % kTileRows;
    const int64_t rows = std::min(kTileRows - lane, end - row);
    const int64_t empty = row + rows == x.rows ? kTileRows - lane - rows : 0;
    input.tile_kernel->quantize(
        input.x.Row<float>(row), input.x.stride, lane, rows, empty, x.cols,
        input.tiles + row / kTileRows * RowTileBytes(*input.tile_kernel, x.cols));
    row += rows;
  }
}

// A share of a job, of rows [row, row + rows) of it.
void CpuMatMul::RunShare(const Job& job, const MatMulShare& share, int64_t row, int64_t rows,
                         const MatMulScratch& scratch) {
  const Input& from = inputs_[job.input];
  const int64_t k = from.x.cols;
  const int64_t first_row = job.first_row + row;
  MatMulInput input = {from.x.Row<float>(first_row), from.x.stride, nullptr, nullptr, {}, rows, k};
  if (job.tiles) {
    input.first_lane = first_row % kTileRows;
    input.tiles = from.tiles + first_row / kTileRows * RowTileBytes(*from.tile_kernel, k);
  } else if (from.round) {
    input.x = from.rounded.Row<float>(first_row);
    input.x_stride = from.rounded.stride;
  } else if (from.quantize) {
    input.codes = from.codes + first_row * k * from.kernel->code_bytes;
    input.blocks = from.blocks + first_row * (k / kBlockValues);
  }
  if (job.row_int8 >= 0) input.row_int8 = row_activations_.input(job.row_int8, first_row);
  job.run(input, share, scratch);
}

MatMulScratch CpuMatMul::ScratchOf(int worker) const {
  uint8_t* const memory = worker_memory_ + static_cast<size_t>(worker) * worker_bytes_;
  return {memory, reinterpret_cast<float*>(memory + kTileBytes)};
}

// Groups [begin, end) counted over all jobs.
void CpuMatMul::RunGroups(int worker, int64_t begin, int64_t end) {
  for (const Job& job : jobs_) {
    MatMulShare share = job.whole;
    share.group_begin = std::max(int64_t{0}, begin - job.first);
    share.group_end = std::min(job.whole.group_end, end - job.first);
    if (share.group_begin >= share.group_end) continue;
    RunShare(job, share, 0, job.rows, ScratchOf(worker));
  }
}

// Groups [begin, end) counted over the gates of all pairs. What a gate and an up give goes to
// memory that stays in the cache, and from there through `combine` to out.
void CpuMatMul::RunPairs(int worker, int64_t begin, int64_t end, GatedFunction* combine,
                         const Tensor& out) {
  float* const gates = reinterpret_cast<float*>(
      worker_memory_ + static_cast<size_t>(worker + 1) * worker_bytes_ - 2 * kGatedBytes);
  float* const ups = gates + kGatedBytes / sizeof(float);
  for (size_t i = 0; i < jobs_.size(); i += 2) {
    const Job &gate = jobs_[i], &up = jobs_[i + 1];
    const int64_t from = std::max(int64_t{0}, begin - gate.first / 2);
    const int64_t to = std::min(gate.whole.group_end, end - gate.first / 2);
    for (int64_t row = 0, rows = 0; row < gate.rows; row += rows) {
      rows = gate.rows - row;
      if (rows > kGatedRows) {  // and leave at least a tile, as kernels of tiles ask
        rows = rows < kGatedRows + kTileRows ? kGatedRows - kTileRows : kGatedRows;
      }
      const int64_t together = kGatedRows / rows * kGroupsTogether;
      for (int64_t group = from; group < to; group += together) {
        const int64_t groups = std::min(together, to - group);
        const int64_t first = group * kGroupFeatures;
        const int64_t stride = groups * kGroupFeatures;
        for (const auto& [job, results] : {std::pair(&gate, gates), std::pair(&up, ups)}) {
          MatMulShare share = job->whole;
          share.group_begin = group;
          share.group_end = group + groups;
          share.out = results - first;
          share.out_stride = stride;
          RunShare(*job, share, row, rows, ScratchOf(worker));
        }
        const int64_t count = std::min(stride, gate.whole.weight.n - first);
        for (int64_t r = 0; r < rows; ++r) {
          combine(gates + r * stride, ups + r * stride,
                  out.Row<float>(gate.first_row + row + r) + first, count);
        }
      }
    }
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
    if (input.order == nullptr && !input.quantize && !input.round && input.tile_kernel == nullptr) {
      continue;
    }
    const int64_t unit = input.bf16 && input.tile_kernel != nullptr ? kTileRows : 1;
    split((x.rows + unit - 1) / unit, [&](int64_t begin, int64_t end) {
      PrepareRows(x, input, begin * unit, std::min(end * unit, x.rows));
    });
  }
}

// Calls run(worker, begin, end) over `groups` groups.
template <typename RunRange>
void CpuMatMul::SplitGroups(const Tensor& x, int64_t groups, RunRange run) {
  if (most_rows_ == x.rows) {
    pool_.ParallelFor(groups, kGroupsTogether, run);
    return;
  }
  // Groups of many rows take longer than those of few: whoever is done takes more.
  const int64_t units = (groups + kGroupsTogether - 1) / kGroupsTogether;
  const int64_t pieces = std::min(units, kUnevenPieces * pool_.size());
  pool_.ParallelForEach(pieces, [&](int worker, int64_t piece, int64_t) {
    run(worker, units * piece / pieces * kGroupsTogether,
        std::min(groups, units * (piece + 1) / pieces * kGroupsTogether));
  });
}

void CpuMatMul::Run(Tensor x, std::span<const Projection> projections) {
  Plan(x, projections);
  if (x.rows == 0 || groups_ == 0) return;
  ReserveScratch(x, 0);
  Prepare(x);
  SplitGroups(x, groups_,
              [&](int worker, int64_t begin, int64_t end) { RunGroups(worker, begin, end); });
}

void CpuMatMul::RunGated(Tensor x, std::span<const Projection> pairs, GatedFunction* combine,
                         Tensor out) {
  Plan(x, pairs);
  if (x.rows == 0 || groups_ == 0) return;
  for (size_t i = 0; i < jobs_.size(); i += 2) {
    const Job &gate = jobs_[i], &up = jobs_[i + 1];
    TREADLE_CHECK(gate.whole.weight.n == out.cols && up.whole.weight.n == out.cols);
    TREADLE_CHECK(gate.first_row == up.first_row && gate.rows == up.rows);
  }
  ReserveScratch(x, 2 * kGatedBytes);
  Prepare(x);
  SplitGroups(x, groups_ / 2, [&](int worker, int64_t begin, int64_t end) {
    RunPairs(worker, begin, end, combine, out);
  });
}

}  // namespace treadle
