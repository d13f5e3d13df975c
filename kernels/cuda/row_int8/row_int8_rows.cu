// LLM.int8() row by row: activations to codes, and rows of a table.
#include "base/status.h"
#include "kernels/cuda/row_int8/row_int8_quantize.h"
#include "kernels/cuda/rows/row_output.h"

namespace treadle::cuda {
namespace {

// One block per row.
TREADLE_KERNEL(kInt8QuantizeThreads) void QuantizeKernel(Int8Input p) {
  simt::AwaitEarlierLaunches();
  const int row = simt::BlockX();
  QuantizeRow(p, row, simt::DynamicShared<Int8QuantizeShared>(), [&](int column, uint32_t word) {
    *reinterpret_cast<uint32_t*>(p.codes + Int8RowByte(row, column, p.units)) = word;
  });
}

// Which columns hold an outlier in any row but padding. One block per row; the flags are zero at
// first.
TREADLE_KERNEL(kInt8QuantizeThreads) void FlagKernel(Int8Input p) {
  simt::AwaitEarlierLaunches();
  if (p.owners != nullptr && p.owners[simt::BlockX()] < 0) return;
  const float* x = p.x + simt::BlockX() * p.x_stride;
  Int8Input by_row = p;
  by_row.of_call = 0;
  ScanRow(by_row, x,
          [&](int column) { simt::AtomicOr(&p.call_flags[column / 32], 1u << (column % 32)); });
}

TREADLE_KERNEL(kInt8QuantizeThreads) void EmbedKernel(Int8Embed p) {
  EmbedRow(p.rows, [&](int row, int column) {
    const uint8_t code = p.codes[Int8WeightByte(row, column, p.units)];
    return p.scales[row] * static_cast<float>(static_cast<int8_t>(code));
  });
}

}  // namespace

Int8ScratchBytes Int8Scratch(int64_t rows, int64_t k) {
  // Warpgroups read whole tiles of rows.
  const int64_t tiles =
      (rows + kInt8WarpgroupRows - 1) / kInt8WarpgroupRows * (kInt8WarpgroupRows / kInt8TileRows);
  return {.codes = static_cast<size_t>(tiles * Int8Units(k) * kInt8RowUnitBytes),
          .row_info = static_cast<size_t>(rows) * sizeof(Int8Row),
          .call_flags = static_cast<size_t>(Int8FlagWords(k)) * sizeof(uint32_t)};
}

void LaunchInt8Quantize(Device& device, const Int8Input& input) {
  LaunchShape shape = {.grid_x = static_cast<uint32_t>(input.rows),
                       .threads = Int8QuantizeThreads(input.k)};
  if (input.of_call != 0) {
    device.Zero(input.call_flags, Int8Scratch(input.rows, input.k).call_flags);
    device.Launch(FlagKernel, shape, input);
  }
  shape.shared_bytes = sizeof(Int8QuantizeShared);
  device.Launch(QuantizeKernel, shape, input);
}

void LaunchInt8Embed(Device& device, const Int8Embed& embed) {
  device.Launch(EmbedKernel,
                {.grid_x = static_cast<uint32_t>(embed.rows.rows),
                 .threads = Int8QuantizeThreads(embed.rows.k)},
                embed);
}

}  // namespace treadle::cuda
