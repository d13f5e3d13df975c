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

namespace treadle {

double LearningRateAt(const AdamWOptions& options, int64_t step) {
  const auto at = static_cast<double>(step), warmup = static_cast<double>(options.warmup);
  if (step < options.warmup) return options.learning_rate * at / warmup;
  const double left = std::max(1.0, static_cast<double>(options.steps) - warmup);
  const double angle = std::acos(-1.0) * std::min(1.0, (at - warmup) / left);
  return options.learning_rate * 0.5 * (1 + std::cos(angle));
}

absl::StatusOr<std::unique_ptr<MappedFloats>> MappedFloats::Create(const std::string& folder,
                                                                   size_t count) {
  std::string path = folder + "/optimizer.XXXXXX";
  const int file = mkstemp(path.data());
  if (file < 0) return InvalidArgument(folder, ": cannot be written to: ", std::strerror(errno));
  unlink(path.c_str());
  const size_t bytes = count * sizeof(float);
  const int error = posix_fallocate(file, 0, static_cast<off_t>(bytes));
  void* const data =
      error == 0 ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  close(file);
  if (data == MAP_FAILED) {
    return ResourceExhausted(folder, ": no room for ", bytes, " bytes of the optimizer: ",
                             std::strerror(error != 0 ? error : errno));
  }
  return std::unique_ptr<MappedFloats>(new MappedFloats({static_cast<float*>(data), count}));
}

MappedFloats::~MappedFloats() { munmap(values_.data(), values_.size_bytes()); }

absl::StatusOr<std::unique_ptr<AdamW>> AdamW::Create(const AdamWOptions& options, size_t count,
                                                     const std::string& folder, ThreadPool& pool) {
  TREADLE_ASSIGN_OR_RETURN(auto moments, MappedFloats::Create(folder, 2 * count));
  return std::unique_ptr<AdamW>(new AdamW(options, std::move(moments), pool));
}

double AdamW::Step(int64_t step, std::span<float> values, std::span<const float> gradients) {
  TREADLE_CHECK(values.size() == gradients.size() && 2 * values.size() == moments().size());
  double squares = 0;
  for (const float g : gradients) squares += double{g} * g;
  const double norm = std::sqrt(squares), bound = options_.max_gradient_norm;
  const auto clip = static_cast<float>(bound > 0 ? std::min(1.0, bound / (norm + 1e-6)) : 1.0);
  const double rate = LearningRateAt(options_, step);
  const auto count = static_cast<double>(step + 1);
  const auto beta1 = static_cast<float>(options_.beta1), beta2 = static_cast<float>(options_.beta2);
  const auto first_left = static_cast<float>(1 - options_.beta1);
  const auto second_left = static_cast<float>(1 - options_.beta2);
  const auto step_size = static_cast<float>(rate / (1 - std::pow(options_.beta1, count)));
  const auto root = static_cast<float>(std::sqrt(1 - std::pow(options_.beta2, count)));
  const auto epsilon = static_cast<float>(options_.epsilon);
  const auto kept = static_cast<float>(1 - rate * options_.weight_decay);
  float* const first = moments().data();
  float* const second = first + values.size();
  constexpr int64_t kGrain = 4096;
  pool_.ParallelFor(std::ssize(values), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float g = gradients[i] * clip;
      first[i] = beta1 * first[i] + first_left * g;
      second[i] = beta2 * second[i] + second_left * g * g;
      const float denominator = std::sqrt(second[i]) / root + epsilon;
      values[i] = values[i] * kept - step_size * (first[i] / denominator);
    }
  });
  return norm;
}

}  // namespace treadle
