// Packing of GGUF's blocks: the same bits in the order that the kernels take them.
#include <algorithm>
#include <string_view>
#include <vector>

#include "kernels/cpu/matmul/packing.h"
#include "kernels/formats/coded_rows.h"
#include "kernels/formats/k_scales.h"

namespace treadle {
namespace {

constexpr int64_t kHalfRow = 2 * kGroupFeatures;  // bytes of 16 f16 constants

struct BlockRow {
  std::string_view format;
  PackKind kind;
  int bits;        // of a code
  int zero;        // what is added to a code to make it positive
  int64_t halves;  // f16 constants of a run: how many
  // Blocks of a run, and bytes of integer scales for each of them: 8 and 32 of the K types.
  int64_t blocks = 1;
  int64_t scales = 0;
  bool table = false;  // codes are places in kIq4Bytes

  // Bytes of a block's codes, of 16 features, and of a run.
  int64_t code_bytes() const { return kBlockValues * kGroupFeatures * bits / 8; }
  int64_t run_bytes() const { return blocks * (code_bytes() + scales) + kHalfRow * halves; }
};

constexpr BlockRow kRows[] = {
    {"q4_0", PackKind::kQ4_0, 4, 8, 1},
    {"q4_1", PackKind::kQ4_1, 4, 0, 2},
    {"q5_0", PackKind::kQ5_0, 5, 16, 1},
    {"q5_1", PackKind::kQ5_1, 5, 0, 2},
    {"q8_0", PackKind::kQ8_0, 8, 128, 1},
    {"q4_k", PackKind::kQ4_K, 4, 0, 2, 8, 32},
    {"q5_k", PackKind::kQ5_K, 5, 0, 2, 8, 32},
    {"q6_k", PackKind::kQ6_K, 6, 32, 2, 8, 32},
    {"q2_k", PackKind::kQ2_K, 2, 0, 2, 8, 32},
    {"q3_k", PackKind::kQ3_K, 3, 4, 2, 8, 32},
    {"iq4_nl", PackKind::kIq4Nl, 4, 128, 1, 1, 0, true},
    {"iq4_xs", PackKind::kIq4Xs, 4, 128, 1, 8, 16, true},
};

const BlockRow* Find(std::string_view format) {
  for (const BlockRow& row : kRows) {
    if (row.format == format) return &row;
  }
  return nullptr;
}

// Eight dwords of a feature's codes to its lane.
void PutCodes(const BlockRow& row, const uint32_t (&dwords)[8], int64_t lane, uint8_t* codes) {
  const auto put = [=](int64_t line, uint32_t dword) {
    std::memcpy(codes + 64 * line + 4 * lane, &dword, 4);
  };
  if (row.bits == 8) {
    for (int i = 0; i < 8; ++i) put(i, dwords[i]);
    return;
  }
  if (row.bits < 4) {
    constexpr uint32_t kPairs = 0x03030303, kBits = 0x01010101;
    uint32_t pairs[2] = {}, third = 0;
    for (int i = 0; i < 8; ++i) {
      pairs[i / 4] |= (dwords[i] & kPairs) << i % 4 * 2;
      third |= (dwords[i] >> 2 & kBits) << i;
    }
    put(0, pairs[0]);
    put(1, pairs[1]);
    if (row.bits == 3) put(2, third);
    return;
  }
  constexpr uint32_t kNibbles = 0x0f0f0f0f;
  uint32_t upper[2] = {};
  for (int i = 0; i < 4; ++i) {
    put(i, (dwords[i] & kNibbles) | (dwords[i + 4] & kNibbles) << 4);
    const uint32_t low = dwords[i] >> 4 & kNibbles;
    const uint32_t high = dwords[i + 4] >> 4 & kNibbles;
    upper[0] |= row.bits == 6 ? low << 2 * i : low << i | high << (i + 4);
    upper[1] |= high << 2 * i;
  }
  if (row.bits > 4) put(4, upper[0]);
  if (row.bits == 6) put(5, upper[1]);
}

// The integer scales and f16 constants of one block of a K type (kernels/formats/k_scales.h).
void PackConstantsK(const BlockRow& row, const uint8_t* stored, int64_t place, int64_t lane,
                    uint8_t* scales, uint8_t* constants) {
  // Integers of the two halves as they are, or as a function of their group of 16 gives them.
  const auto halves = [&](auto scale_of) {
    for (int64_t half = 0; half < 2; ++half) {
      scales[kGroupFeatures * half + lane] = static_cast<uint8_t>(scale_of(2 * place + half));
    }
  };
  const auto constant = [&](int64_t at, int64_t which) {
    std::memcpy(constants + kHalfRow * which + 2 * lane, stored + at, 2);
  };
  switch (row.kind) {
    case PackKind::kQ6_K:
      halves([&](int64_t group) { return stored[192 + group]; });
      return constant(208, 0);
    case PackKind::kQ3_K:
      halves([&](int64_t group) { return formats::SixBitScale(stored + 96, group); });
      return constant(108, 0);
    case PackKind::kIq4Xs:
      scales[lane] = static_cast<uint8_t>(formats::Iq4Scale(stored, place));
      return constant(0, 0);
    case PackKind::kQ2_K:
      halves([&](int64_t group) { return stored[group]; });
      constant(80, 0);
      constant(82, 1);
      break;
    default: {
      const formats::ScaleAndMinimum pair = formats::SixBitPair(stored + 4, place);
      scales[lane] = static_cast<uint8_t>(pair.scale);
      scales[kGroupFeatures + lane] = static_cast<uint8_t>(pair.minimum);
      constant(0, 0);
      constant(2, 1);
    }
  }
  constants[kHalfRow + 2 * lane + 1] ^= 0x80;  // what is added is -dmin * minimum
}

bool Plan(const MatrixSource& source, const PackTarget&, PackedView& view) {
  const BlockRow* row = Find(source.format->name);
  if (row == nullptr) return false;
  view.kind = row->kind;
  view.group_bytes = source.k / (kBlockValues * row->blocks) * row->run_bytes();
  return true;
}

void PackRow(const MatrixSource& source, const PackedView&, int64_t from, int64_t lane,
             uint8_t* group) {
  const WeightFormat& format = *source.format;
  const BlockRow& row = *Find(format.name);
  const std::byte* stored = source.data + from * format.RowBytes(source.k);
  CodeGroup codes;
  for (int64_t b = 0; b < source.k / kBlockValues; ++b) {
    uint8_t* run = group + b / row.blocks * row.run_bytes();
    const int64_t place = b % row.blocks;
    uint8_t bytes[kBlockValues];
    for (int64_t i = 0; i < kBlockValues; i += format.group) {
      format.codes(stored, (b * kBlockValues + i) / format.group, codes);
      for (int64_t j = 0; j < format.group; ++j) {
        uint8_t& byte = bytes[i + j] = static_cast<uint8_t>(codes.codes[j] + row.zero);
        if (row.table) byte = static_cast<uint8_t>(std::ranges::find(kIq4Bytes, byte) - kIq4Bytes);
      }
    }
    uint32_t dwords[8];
    std::memcpy(dwords, bytes, sizeof(dwords));
    PutCodes(row, dwords, lane, run + place * row.code_bytes());
    const std::byte* block = stored + b * kBlockValues / format.block * format.block_bytes;
    uint8_t* scales = run + row.blocks * row.code_bytes();
    uint8_t* constants = scales + row.blocks * row.scales;
    if (row.scales > 0) {
      PackConstantsK(row, reinterpret_cast<const uint8_t*>(block), place, lane,
                     scales + place * row.scales, constants);
      continue;
    }
    for (int64_t c = 0; c < row.halves; ++c) {
      std::memcpy(constants + kHalfRow * c + 2 * lane, block + 2 * c, 2);
    }
  }
}

// Any inline format with a codebook and without offsets.
bool PlanTable(const MatrixSource& source, const PackTarget&, PackedView& view) {
  const WeightFormat& format = *source.format;
  if (format.group == 0 || format.codebook.empty() || format.offsets) return false;
  view.kind = PackKind::kTable;
  view.group_bytes = source.k / kBlockValues * kTableBlock;
  return true;
}

void PackTable(const MatrixSource& source, const PackedView&, int64_t from, int64_t lane,
               uint8_t* group) {
  const CodedRows rows(source);
  std::vector<uint8_t> codes(static_cast<size_t>(source.k));
  std::vector<float> scales(static_cast<size_t>(source.k / rows.run())), seconds(scales);
  rows.Read(from, codes.data(), scales.data(), seconds.data());
  for (int64_t i = 0; i < source.k; ++i) {
    uint8_t* block = group + i / kBlockValues * kTableBlock;
    const int64_t at = i % kBlockValues;
    uint8_t& byte = block[at % 16 / 4 * 64 + lane * 4 + at % 4];
    byte = static_cast<uint8_t>(byte | codes[i] << at / 16 * 4);
    if (at % 16 == 0) PutFloat(scales[i / rows.run()], at + lane, block + 256);
    if (at < 16) block[kTableAt + at] = static_cast<uint8_t>(rows.values()[at] + 128);
  }
}

// Any inline format.
bool PlanBytes(const MatrixSource& source, const PackTarget&, PackedView& view) {
  const WeightFormat& format = *source.format;
  if (format.group == 0 || format.block % kBlockValues != 0) return false;
  view.kind = PackKind::kBytes;
  view.group_bytes = source.k / kBlockValues * kBytesBlock;
  return true;
}

void PackBytes(const MatrixSource& source, const PackedView&, int64_t from, int64_t lane,
               uint8_t* group) {
  const WeightFormat& format = *source.format;
  const std::byte* stored = source.data + from * format.RowBytes(source.k);
  CodeGroup codes = {};
  for (int64_t i = 0; i < source.k; ++i) {
    if (i % format.group == 0) format.codes(stored, i / format.group, codes);
    uint8_t* block = group + i / kBlockValues * kBytesBlock;
    const int64_t at = i % kBlockValues;
    block[at / 4 * 64 + lane * 4 + at % 4] =
        static_cast<uint8_t>(codes.codes[i % format.group] + 128);
    if (at % 16 != 0) continue;
    PutFloat(codes.scale, at + lane, block + 512);
    PutFloat(codes.offset, 2 * kGroupFeatures + at + lane, block + 512);
  }
}

}  // namespace

constinit const Packing kBlockPacking = {Plan, PackRow, nullptr};
constinit const Packing kTablePacking = {PlanTable, PackTable, nullptr};
constinit const Packing kBytesPacking = {PlanBytes, PackBytes, nullptr};

}  // namespace treadle
