// Fits of one run of weights: a scale, perhaps a minimum, and codes for which the weighted squares
// of the errors are small. The K types and the I types of four bits are made of these
// (quantize_k.cc). They are llama.cpp's searches (ggml-quants.c), operation by operation: a file's
// bits depend on every rounding. Private to this folder.
//
// Thread safety: pure functions.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace treadle::formats {

// Runs whose largest magnitude is below this are zeros.
inline constexpr float kNoMagnitude = 1e-15f;

// Half to even, of magnitudes up to 2^22.
inline int Nearest(float value) {
  constexpr float kUnits = 0x1.8p23f;
  return (std::bit_cast<int32_t>(value + kUnits) & 0x7fffff) - 0x400000;
}
inline int Clamp(int value, int least, int most) {
  return value < least ? least : value > most ? most : value;
}

// A run: its values and what the square of each one's error counts. [count]
struct Run {
  const float* values;
  const float* weights;
  int count;
};

// The value of the largest magnitude; of several the first.
inline float Extreme(const Run& run) {
  float largest = 0, extreme = 0;
  for (int i = 0; i < run.count; ++i) {
    if (std::fabs(run.values[i]) <= largest) continue;
    largest = std::fabs(run.values[i]);
    extreme = run.values[i];
  }
  return extreme;
}

// Sums of a fit: of products with codes, and of squared codes.
struct FitSums {
  float values = 0;
  float squares = 0;
  void Add(float weight, float value, float code) {
    values += weight * value * code;
    squares += weight * code * code;
  }
};

// Codes from -most to most - 1, stored plus `most`. Returns the scale.
inline float FitSigned(const Run& run, int most, uint8_t* codes) {
  const float extreme = Extreme(run);
  if (std::fabs(extreme) < kNoMagnitude) {
    for (int i = 0; i < run.count; ++i) codes[i] = 0;
    return 0;
  }
  float scale = 0, best = 0;
  for (int attempt = 0; attempt < 19; ++attempt) {
    // First the plain one, then from 0.9 below to 0.9 above.
    const int tenth = attempt == 0 ? 0 : attempt <= 9 ? attempt - 10 : attempt - 9;
    const auto whole = static_cast<float>(most);
    const float inverse =
        (attempt == 0 ? -whole : -(whole + 0.1f * static_cast<float>(tenth))) / extreme;
    const auto code_of = [&](int i) {
      return Clamp(Nearest(inverse * run.values[i]), -most, most - 1);
    };
    FitSums sums;
    for (int i = 0; i < run.count; ++i) {
      sums.Add(run.weights[i], run.values[i], static_cast<float>(code_of(i)));
    }
    if (attempt > 0 && !(sums.squares > 0 && sums.values * sums.values > best * sums.squares)) {
      continue;
    }
    for (int i = 0; i < run.count; ++i) codes[i] = static_cast<uint8_t>(code_of(i) + most);
    scale = sums.squares != 0 ? sums.values / sums.squares : 0.0f;
    best = scale * sums.values;
  }
  return scale;
}

// Which numbers of levels FitMinimum tries besides `most`: from most + first on, `steps` more.
struct MinimumFit {
  float first;
  float step;
  int steps;
};
// Codes from 0 to `most`: scale * code - minimum, minimum >= 0. Returns the scale.
inline float FitMinimum(const Run& run, int most, const MinimumFit& fit, uint8_t* codes,
                        float* minimum) {
  float least = run.values[0], largest = run.values[0];
  float weights = run.weights[0], values = weights * run.values[0];
  for (int i = 1; i < run.count; ++i) {
    if (run.values[i] < least) least = run.values[i];
    if (run.values[i] > largest) largest = run.values[i];
    weights += run.weights[i];
    values += run.weights[i] * run.values[i];
  }
  if (least > 0) least = 0;
  *minimum = -least;
  if (largest <= least) {
    for (int i = 0; i < run.count; ++i) codes[i] = 0;
    return 0;
  }
  uint8_t tried[32];
  const auto set_codes = [&](float inverse) {
    for (int i = 0; i < run.count; ++i) {
      tried[i] = static_cast<uint8_t>(Clamp(Nearest(inverse * (run.values[i] - least)), 0, most));
    }
  };
  const auto error = [&](float scale, float offset) {
    float sum = 0;
    for (int i = 0; i < run.count; ++i) {
      const float difference = scale * static_cast<float>(tried[i]) + offset - run.values[i];
      sum += run.weights[i] * (difference * difference);
    }
    return sum;
  };
  const auto take = [&] {
    for (int i = 0; i < run.count; ++i) codes[i] = tried[i];
  };
  const float inverse = static_cast<float>(most) / (largest - least);
  float scale = 1 / inverse;
  set_codes(inverse);
  take();
  float best = error(scale, least);
  for (int s = 0; s <= fit.steps; ++s) {
    const float levels = fit.first + fit.step * static_cast<float>(s) + static_cast<float>(most);
    set_codes(levels / (largest - least));
    float sum = 0, squares = 0, products = 0;
    for (int i = 0; i < run.count; ++i) {
      const float weight = run.weights[i];
      const auto code = static_cast<float>(tried[i]);
      sum += weight * code;
      squares += weight * code * code;
      products += weight * code * run.values[i];
    }
    const float determinant = weights * squares - sum * sum;
    if (!(determinant > 0)) continue;
    float this_scale = (weights * products - values * sum) / determinant;
    float this_least = (squares * values - sum * products) / determinant;
    if (this_least > 0) {
      this_least = 0;
      this_scale = products / squares;
    }
    const float this_error = error(this_scale, this_least);
    if (!(this_error < best)) continue;
    take();
    best = this_error;
    scale = this_scale;
    least = this_least;  // from here the next try begins
  }
  *minimum = -least;
  return scale;
}

// Moves single codes as long as that improves the fit, five times round at most. `least` to `most`.
inline void Refine(const Run& run, int least, int most, bool squares_too, FitSums& sums,
                   int* codes) {
  for (int round = 0; round < 5; ++round) {
    bool changed = false;
    for (int i = 0; i < run.count; ++i) {
      const float weight = run.weights[i];
      const auto code = static_cast<float>(codes[i]);
      FitSums without = {sums.values - weight * run.values[i] * code,
                         sums.squares - weight * code * code};
      if (!(without.values > 0) || (squares_too && !(without.squares > 0))) continue;
      const int moved =
          Clamp(Nearest(run.values[i] * without.squares / without.values), least, most);
      if (moved == codes[i]) continue;
      without.Add(weight, run.values[i], static_cast<float>(moved));
      if (without.squares > 0 && without.values * without.values * sums.squares >
                                     sums.values * sums.values * without.squares) {
        codes[i] = moved;
        sums = without;
        changed = true;
      }
    }
    if (!changed) return;
  }
}

// Codes from 0 to `most` of values that are not negative (scales). Returns the scale.
inline float FitUnsigned(const Run& run, int most, uint8_t* out) {
  float largest = 0;
  for (int i = 0; i < run.count; ++i) largest = std::fmax(largest, run.values[i]);
  int codes[16] = {};
  FitSums sums;
  if (largest >= kNoMagnitude) {
    const auto whole = static_cast<float>(most);
    float inverse = whole / largest, best = 0;
    for (int attempt = 0; attempt < 9; ++attempt) {
      const int tenth = attempt == 0 ? 0 : attempt <= 4 ? attempt - 5 : attempt - 4;
      const float tried =
          attempt == 0 ? inverse : (0.1f * static_cast<float>(tenth) + whole) / largest;
      const float scale = 1 / tried;
      float error = 0;
      for (int i = 0; i < run.count; ++i) {
        int code = Nearest(tried * run.values[i]);
        if (attempt > 0 && code > most) code = most;
        const float difference = run.values[i] - scale * static_cast<float>(code);
        error += run.weights[i] * difference * difference;
      }
      if (attempt > 0 && !(error < best)) continue;
      best = error;
      inverse = tried;
    }
    for (int i = 0; i < run.count; ++i) {
      const int code = Nearest(inverse * run.values[i]);
      codes[i] = code > most ? most : code;
      sums.Add(run.weights[i], run.values[i], static_cast<float>(codes[i]));
    }
    Refine(run, -0x400000, most, /*squares_too=*/true, sums, codes);
  }
  for (int i = 0; i < run.count; ++i) out[i] = static_cast<uint8_t>(codes[i]);
  return sums.squares > 0 ? sums.values / sums.squares : 0.0f;
}

// Codes from -4 to 3, stored plus 4: Q3_K's without importance. Returns the scale.
inline float FitThreeBits(const Run& run, uint8_t* out) {
  const float extreme = Extreme(run);
  int codes[16] = {};
  FitSums sums;
  if (std::fabs(extreme) < kNoMagnitude) {
    for (int i = 0; i < run.count; ++i) out[i] = 0;
    return 0;
  }
  const float inverse = -4 / extreme;
  for (int i = 0; i < run.count; ++i) {
    codes[i] = Clamp(Nearest(inverse * run.values[i]), -4, 3);
    sums.Add(run.weights[i], run.values[i], static_cast<float>(codes[i]));
  }
  Refine(run, -4, 3, /*squares_too=*/false, sums, codes);
  for (int i = 0; i < run.count; ++i) out[i] = static_cast<uint8_t>(codes[i] + 4);
  return sums.squares > 0 ? sums.values / sums.squares : 0.0f;
}

}  // namespace treadle::formats
