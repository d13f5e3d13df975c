// Mixtures of formats that llama-quantize makes under one name (llama.cpp's src/llama-quant.cpp):
// most matrices in one format, those that errors hurt most in larger ones.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/formats/quantize.h"
#include "models/architectures/architecture.h"

namespace treadle {

struct Mixture;
// Null: no mixture has that name.
const Mixture* FindMixture(std::string_view name);
// Its names, for messages.
std::string_view MixtureNames();

// The format of the matrix `part` in layer `layer`.
std::string_view FormatIn(const Mixture& mixture, const ModelConfig& config, Part part,
                          int64_t layer);

// The format itself; or, if its blocks of 256 do not divide rows of `k`, the one of smaller blocks
// that llama-quantize takes instead.
const QuantizeSpec& Fitting(const QuantizeSpec& spec, int64_t k);
// The spec of a format's name, which is one of ParseQuantizeSpec's.
const QuantizeSpec& SpecNamed(std::string_view format);

}  // namespace treadle
