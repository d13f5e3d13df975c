// Packing of GGUF's blocks: the same bits in the order that the kernels take them.
#include <string_view>

#include "kernels/cpu/matmul/packing.h"

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

  // Bytes of a block's codes, of 16 features, and of a run.
  int64_t code_bytes() const { return kBlockValues * kGroupFeatures * bits / 8; }
  int64_t run_bytes() const { return blocks * (code_bytes() + scales) + kHalfRow * halves; }
};

constexpr BlockRow kRows[] = {
    {"q4_0", PackKind::kQ4_0, 4, 8, 1},        {"q4_1", PackKind::kQ4_1, 4, 0, 2},
    {"q5_0", PackKind::kQ5_0, 5, 16, 1},       {"q5_1", PackKind::kQ5_1, 5, 0, 2},
    {"q8_0", PackKind::kQ8_0, 8, 128, 1},      {"q4_k", PackKind::kQ4_K, 4, 0, 2, 8, 32},
    {"q5_k", PackKind::kQ5_K, 5, 0, 2, 8, 32}, {"q6_k", PackKind::kQ6_K, 6, 32, 2, 8, 32},
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

// The integer scales and f16 constants of one block of a K type (kernels/formats/k_quants.h).
void PackConstantsK(const BlockRow& row, const uint8_t* stored, int64_t place, int64_t lane,
                    uint8_t* scales, uint8_t* constants) {
  if (row.kind == PackKind::kQ6_K) {
    scales[lane] = stored[192 + 2 * place];
    scales[kGroupFeatures + lane] = stored[192 + 2 * place + 1];
    std::memcpy(constants + 2 * lane, stored + 208, 2);
    return;
  }
  const uint8_t* packed = stored + 4;
  const uint8_t* minima = packed + 4;
  if (place < 4) {
    scales[lane] = packed[place] & 63;
    scales[kGroupFeatures + lane] = minima[place] & 63;
  } else {
    const uint8_t low = packed[place + 4];
    scales[lane] = static_cast<uint8_t>((low & 15) | packed[place - 4] >> 6 << 4);
    scales[kGroupFeatures + lane] = static_cast<uint8_t>(low >> 4 | minima[place - 4] >> 6 << 4);
  }
  std::memcpy(constants + 2 * lane, stored, 2);
  std::memcpy(constants + kHalfRow + 2 * lane, stored + 2, 2);
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
        bytes[i + j] = static_cast<uint8_t>(codes.codes[j] + row.zero);
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

// Any inline format whose weights share an offset by 32.
bool PlanBytes(const MatrixSource& source, const PackTarget&, PackedView& view) {
  const WeightFormat& format = *source.format;
  if (format.group == 0 || format.block % kBlockValues != 0) return false;
  if (format.offsets && format.group != kBlockValues) return false;
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
    if (at % 16 == 0) PutFloat(codes.scale, at + lane, block + 512);
    if (at == 0) PutFloat(codes.offset, 2 * kGroupFeatures + lane, block + 512);
  }
}

}  // namespace

constinit const Packing kBlockPacking = {Plan, PackRow, nullptr};
constinit const Packing kBytesPacking = {PlanBytes, PackBytes, nullptr};

}  // namespace treadle
