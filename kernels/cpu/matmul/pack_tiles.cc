// Packing for the tiles of matmul_bf16_tiles.cc: rows of 32 k, feature by feature.
#include <algorithm>
#include <vector>

#include "kernels/cpu/matmul/packing.h"
#include "kernels/formats/coded_rows.h"
#include "kernels/formats/normal_bf16.h"

namespace treadle {
namespace {

int64_t Blocks(const PackedView& view) { return (view.k + kBlockValues - 1) / kBlockValues; }

// The code of the value 0 in a format with integers of four bits.
int ZeroOf(const PackedView& view) { return view.format->name == "q4_0" ? 8 : 0; }

// A feature's 32 codes of four bits, where the kernel's permutation of bits finds them: value i
// belongs to word i, and a qword of words takes 16 bits of every second qword in memory.
void PutNibbles(const uint8_t* codes, uint8_t* to) {
  for (int64_t i = 0; i < kBlockValues; ++i) {
    const int64_t nibble = i / 8 * 4 + i % 4;
    uint8_t& byte = to[i / 4 % 2 * 8 + nibble / 2];
    byte = static_cast<uint8_t>(byte | codes[i] << nibble % 2 * 4);
  }
}

void PackValues(const MatrixSource& source, const PackedView& view, int64_t from, int64_t lane,
                uint8_t* group) {
  std::vector<float> values(static_cast<size_t>(view.k));
  DecodeSourceRow(source, from, values.data());
  for (int64_t i = 0; i < view.k; ++i) {
    const float value = values[view.input_order == nullptr ? i : view.input_order[i]];
    const uint16_t rounded = ToNormalBFloat16(value).bits;
    std::memcpy(group + i / kBlockValues * kTileBlockBf16 + lane * 64 + i % kBlockValues * 2,
                &rounded, 2);
  }
}

void PackRow(const MatrixSource& source, const PackedView& view, int64_t from, int64_t lane,
             uint8_t* group) {
  if (view.kind == PackKind::kTilesBf16) return PackValues(source, view, from, lane, group);
  const CodedRows rows(source);
  std::vector<uint8_t> codes(static_cast<size_t>(view.k));
  std::vector<float> scales(static_cast<size_t>(view.k / rows.run())), seconds(scales);
  rows.Read(from, codes.data(), scales.data(), seconds.data());
  // Inline formats' integers, in four bits or in eight.
  const bool four = view.kind == PackKind::kTiles4;
  const bool integers = !source.format->apart() && (!four || rows.bits() > 4);
  for (uint8_t& code : codes) {
    if (integers) code = static_cast<uint8_t>(static_cast<int>(rows.values()[code]) + ZeroOf(view));
  }
  const int64_t bytes = TileBlockBytes(view);
  for (int64_t b = 0; b < Blocks(view); ++b, group += bytes) {
    uint8_t* constants = group + (four ? 256 : 512);
    if (four) {
      PutNibbles(codes.data() + b * kBlockValues, group + lane * 16);
    } else {
      std::memcpy(group + lane * 32, codes.data() + b * kBlockValues, kBlockValues);
    }
    const auto run = static_cast<size_t>(b * kBlockValues / rows.run());
    PutFloat(scales[run], lane, constants);
    if (view.halves) PutFloat(scales[run + 1], kGroupFeatures + lane, constants);
    const int64_t second = view.halves ? 2 : 1;
    if (view.seconds) PutFloat(seconds[run], second * kGroupFeatures + lane, constants);
  }
}

}  // namespace

constinit const Packing kTilePacking = {nullptr, PackRow, nullptr};

void PlanTiles(const MatrixSource& source, PackedView& view) {
  switch (view.kind) {
    case PackKind::kQ4_0:
    case PackKind::kQ4_1:
    case PackKind::kQ4_K:
    case PackKind::kIq4Nl:
    case PackKind::kIq4Xs:
    case PackKind::kCodes4:
      view.kind = PackKind::kTiles4;
      break;
    case PackKind::kQ5_0:
    case PackKind::kQ5_1:
    case PackKind::kQ8_0:
    case PackKind::kQ3_K:
    case PackKind::kQ5_K:
    case PackKind::kQ6_K:
    case PackKind::kTable:
    case PackKind::kBytes:
      view.kind = PackKind::kTiles8;
      break;
    default:
      view.kind = PackKind::kTilesBf16;
  }
  if (view.kind != PackKind::kTilesBf16) {
    view.seconds = view.zeros || (!source.format->apart() && source.format->offsets);
    view.halves = !source.format->apart() && source.format->group == 16;
  }
  view.group_bytes = Blocks(view) * TileBlockBytes(view);
}

std::vector<float> TileCodebook(const MatrixSource& source, const PackedView& view) {
  if (!source.format->codebook.empty() || source.format->apart()) {
    const std::span<const float> values = CodebookOf(source);
    return {values.begin(), values.end()};
  }
  std::vector<float> values;
  for (int i = 0; i < 16; ++i) values.push_back(static_cast<float>(i - ZeroOf(view)));
  return values;
}

}  // namespace treadle
