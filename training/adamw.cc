#include "training/adamw.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "base/status.h"
#include "kernels/formats/quantize.h"

namespace treadle {
namespace {

constexpr size_t kBlock = 256;       // numbers that share a scale
constexpr size_t kLeast8Bit = 4096;  // numbers of a tensor whose moments are 8-bit

size_t BlocksOf(size_t count) { return (count + kBlock - 1) / kBlock; }

// Bounds between a map's values: the nearest one changes there. [255]
std::vector<float> Bounds(std::span<const float> map) {
  std::vector<float> bounds;
  for (size_t i = 1; i < map.size(); ++i) bounds.push_back((map[i - 1] + map[i]) / 2);
  return bounds;
}

// Rounds a block of moments to codes, and gives their scale.
float Quantize(std::span<const float> moments, std::span<const float> bounds, uint8_t* codes) {
  float absmax = 0;
  for (const float moment : moments) absmax = std::max(absmax, std::abs(moment));
  const float inverse = absmax > 0 ? 1 / absmax : 0;  // of zeros any code is right
  for (size_t i = 0; i < moments.size(); ++i) {
    codes[i] = static_cast<uint8_t>(std::ranges::lower_bound(bounds, moments[i] * inverse) -
                                    bounds.begin());
  }
  return absmax;
}

}  // namespace

double LearningRateAt(const AdamWOptions& options, int64_t step) {
  const auto at = static_cast<double>(step), warmup = static_cast<double>(options.warmup);
  if (step < options.warmup) return options.learning_rate * at / warmup;
  const double left = std::max(1.0, static_cast<double>(options.steps) - warmup);
  const double angle = std::acos(-1.0) * std::min(1.0, (at - warmup) / left);
  return options.learning_rate * 0.5 * (1 + std::cos(angle));
}

absl::StatusOr<std::unique_ptr<MappedMoments>> MappedMoments::Create(const std::string& folder,
                                                                     size_t bytes) {
  std::string path = folder + "/optimizer.XXXXXX";
  const int file = mkostemp(path.data(), O_CLOEXEC);
  if (file < 0) return InvalidArgument(folder, ": cannot be written to: ", std::strerror(errno));
  unlink(path.c_str());
  const int error = posix_fallocate(file, 0, static_cast<off_t>(bytes));
  void* const data =
      error == 0 ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  close(file);
  if (data == MAP_FAILED) {
    return ResourceExhausted(folder, ": no room for ", bytes, " bytes of the optimizer: ",
                             std::strerror(error != 0 ? error : errno));
  }
  return std::unique_ptr<MappedMoments>(new MappedMoments({static_cast<std::byte*>(data), bytes}));
}

MappedMoments::~MappedMoments() { munmap(bytes_.data(), bytes_.size()); }

absl::StatusOr<std::unique_ptr<AdamW>> AdamW::Create(const AdamWOptions& options,
                                                     std::span<const size_t> tensors,
                                                     const std::string& folder, ThreadPool& pool) {
  std::vector<Part> parts;
  size_t begin = 0, bytes = 0;
  for (const size_t count : tensors) {
    const bool eight_bit = options.eight_bit && count >= kLeast8Bit;
    if (!eight_bit && !parts.empty() && !parts.back().eight_bit) {
      parts.back().count += count;  // tensors of 32 bits side by side are one part
    } else {
      parts.push_back({.begin = begin, .count = count, .at = 0, .eight_bit = eight_bit});
    }
    begin += count;
  }
  for (Part& part : parts) {
    part.at = bytes;
    const size_t numbers = part.eight_bit ? 2 * BlocksOf(part.count) : 2 * part.count;
    bytes += numbers * sizeof(float);
    if (part.eight_bit) bytes += (2 * part.count + 3) / 4 * 4;
  }
  TREADLE_ASSIGN_OR_RETURN(auto moments, MappedMoments::Create(folder, bytes));
  return std::unique_ptr<AdamW>(new AdamW(options, std::move(parts), std::move(moments), pool));
}

struct AdamW::Rates {
  float clip, beta1, beta2, first_left, second_left, step_size, root, epsilon, kept;

  void Change(float gradient, float& first, float& second, float& value) const {
    const float g = gradient * clip;
    first = beta1 * first + first_left * g;
    second = beta2 * second + second_left * g * g;
    const float denominator = std::sqrt(second) / root + epsilon;
    value = value * kept - step_size * (first / denominator);
  }
};

AdamW::Rates AdamW::RatesOf(int64_t step, double clip) const {
  const double rate = LearningRateAt(options_, step);
  const auto count = static_cast<double>(step + 1);
  return {.clip = static_cast<float>(clip),
          .beta1 = static_cast<float>(options_.beta1),
          .beta2 = static_cast<float>(options_.beta2),
          .first_left = static_cast<float>(1 - options_.beta1),
          .second_left = static_cast<float>(1 - options_.beta2),
          .step_size = static_cast<float>(rate / (1 - std::pow(options_.beta1, count))),
          .root = static_cast<float>(std::sqrt(1 - std::pow(options_.beta2, count))),
          .epsilon = static_cast<float>(options_.epsilon),
          .kept = static_cast<float>(1 - rate * options_.weight_decay)};
}

double AdamW::Step(int64_t step, std::span<float> values, std::span<const float> gradients) {
  TREADLE_CHECK(values.size() == gradients.size());
  TREADLE_CHECK(values.size() == parts_.back().begin + parts_.back().count);
  double squares = 0;
  for (const float g : gradients) squares += double{g} * g;
  const double norm = std::sqrt(squares), bound = options_.max_gradient_norm;
  const Rates rates = RatesOf(step, bound > 0 ? std::min(1.0, bound / (norm + 1e-6)) : 1.0);
  for (const Part& part : parts_) {
    StepPart(rates, part, values.data() + part.begin, gradients.data() + part.begin);
  }
  return norm;
}

void AdamW::StepPart(const Rates& rates, const Part& part, float* values, const float* gradients) {
  constexpr int64_t kGrain = 4096;
  if (part.eight_bit) {
    pool_.ParallelFor(static_cast<int64_t>(BlocksOf(part.count)), kGrain / kBlock,
                      [&](int64_t begin, int64_t end) {
                        for (int64_t i = begin; i < end; ++i) {
                          StepBlock(rates, part, static_cast<size_t>(i), values, gradients);
                        }
                      });
    return;
  }
  float* const first = reinterpret_cast<float*>(moments().data() + part.at);
  float* const second = first + part.count;
  pool_.ParallelFor(static_cast<int64_t>(part.count), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      rates.Change(gradients[i], first[i], second[i], values[i]);
    }
  });
}

void AdamW::StepBlock(const Rates& rates, const Part& part, size_t block, float* values,
                      const float* gradients) {
  static const std::span<const float> maps[] = {DynamicMap(), DynamicMap(/*has_sign=*/false)};
  static const std::vector<float> bounds[] = {Bounds(maps[0]), Bounds(maps[1])};
  const size_t blocks = BlocksOf(part.count), begin = block * kBlock;
  const size_t count = std::min(kBlock, part.count - begin);
  auto* const scales = reinterpret_cast<float*>(moments().data() + part.at);
  auto* const codes = reinterpret_cast<uint8_t*>(scales + 2 * blocks);
  float found[2][kBlock];
  for (size_t moment = 0; moment < 2; ++moment) {
    const uint8_t* const of_block = codes + moment * part.count + begin;
    for (size_t i = 0; i < count; ++i) {
      found[moment][i] = maps[moment][of_block[i]] * scales[moment * blocks + block];
    }
  }
  for (size_t i = 0; i < count; ++i) {
    rates.Change(gradients[begin + i], found[0][i], found[1][i], values[begin + i]);
  }
  for (size_t moment = 0; moment < 2; ++moment) {
    scales[moment * blocks + block] = Quantize(std::span(found[moment]).first(count),
                                               bounds[moment], codes + moment * part.count + begin);
  }
}

}  // namespace treadle
