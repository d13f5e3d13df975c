#include "bench/machine_peaks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <vector>

#include "kernels/cpu/weight_arena.h"

namespace treadle {
namespace {

constexpr int64_t kReadBytes = int64_t{768} << 20;
constexpr int64_t kPieceBytes = int64_t{1} << 20;
constexpr int64_t kPieceRounds = 20'000;
constexpr int64_t kPieces = 300;
constexpr int kTries = 5;

// Calls body(worker, piece) for `pieces` pieces on every thread at once. Returns the best of
// several tries of the sum over threads of work / median time: what interrupts a few pieces does
// not show.
template <typename Body>
double BestRate(ThreadPool& pool, int64_t pieces, double work, Body body) {
  std::vector<double> rates(static_cast<size_t>(pool.size()));
  double best = 0;
  for (int i = 0; i < kTries; ++i) {
    pool.Run([&](int worker) {
      std::vector<double> times;
      for (int64_t piece = 0; piece < pieces; ++piece) {
        const auto start = std::chrono::steady_clock::now();
        body(worker, piece);
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        times.push_back(elapsed.count());
      }
      const auto middle = times.begin() + static_cast<int64_t>(times.size() / 2);
      std::nth_element(times.begin(), middle, times.end());
      rates[worker] = work / *middle;
    });
    best = std::max(best, std::accumulate(rates.begin(), rates.end(), 0.0));
  }
  return best;
}

}  // namespace

MachinePeaks MeasurePeaks(ThreadPool& pool, CpuIsa isa) {
  const PeakLoops& loops = isa == CpuIsa::kAvx512 ? avx512::kPeakLoops : avx2::kPeakLoops;
  std::atomic<int64_t> sink = 0;
  MachinePeaks peaks;
  peaks.float_gigaops =
      BestRate(pool, kPieces, 1e-9 * loops.fma_ops * kPieceRounds,
               [&](int, int64_t) { sink += static_cast<int64_t>(loops.fma(kPieceRounds)); });
  peaks.integer_gigaops = BestRate(pool, kPieces, 1e-9 * loops.integer_ops * kPieceRounds,
                                   [&](int, int64_t) { sink += loops.integer(kPieceRounds); });
  const auto buffer = MapMemory(kReadBytes);
  if (buffer == nullptr) return peaks;
  const int64_t pieces = kReadBytes / pool.size() / kPieceBytes;
  const auto piece_of = [&](int worker, int64_t piece) {
    return buffer.get() + (worker * pieces + piece) * kPieceBytes;
  };
  pool.Run([&](int worker) {
    std::memset(piece_of(worker, 0), 0, static_cast<size_t>(pieces * kPieceBytes));
  });
  peaks.read_gigabytes = BestRate(pool, pieces, 1e-9 * kPieceBytes, [&](int worker, int64_t piece) {
    sink += loops.read(piece_of(worker, piece), kPieceBytes);
  });
  return peaks;
}

}  // namespace treadle
