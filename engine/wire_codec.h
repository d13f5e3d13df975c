// How activations look on the wire: rows of f32 to bytes and back, and the checksum over them.
//
//   f32   as they are (bit-exact: what N3 speaks of)
//   bf16  rounded half to even
//   int8  per row, blocks of 64 (the last one shorter): codes q [cols] int8, then scales
//         [blocks] fp16. scale = absmax / 127 rounded to fp16, q = x / scale rounded half to even
//         and cut to +-127 (dynamic blockwise quantization as in Petals, Borzunov et al.).
// A row's bytes depend on that row alone. Little-endian.
//
// Errors of int8, of a block with the maximum a: at most scale / 2 + 127 * |scale - a / 127|, that
// is a * (1/254 + 2^-11) while a / 127 is a normal fp16; magnitudes beyond 127 * 65504 are cut. A
// block with an infinity or NaN comes back as NaN.
//
// Thread safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/choice.h"
#include "kernels/tensor.h"

namespace treadle {

enum class WireType : uint8_t { kF32, kBf16, kInt8 };
inline constexpr Choice<WireType> kWireTypes[] = {
    {"f32", WireType::kF32}, {"bf16", WireType::kBf16}, {"int8", WireType::kInt8}};
constexpr std::string_view Name(WireType wire) { return WordOf(kWireTypes, wire); }

inline constexpr int64_t kWireBlock = 64;

// Bytes of `rows` encoded rows of `cols` values.
size_t EncodedBytes(WireType wire, int64_t rows, int64_t cols);

// x: [rows, cols] f32. out: [EncodedBytes].
void EncodeRows(WireType wire, Tensor x, std::byte* out);
// in: [EncodedBytes]. out: [rows, cols] f32.
void DecodeRows(WireType wire, const std::byte* in, Tensor out);

}  // namespace treadle
