#include "bench/kernels/machine_peaks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "kernels/cpu/weight_arena.h"

namespace treadle {
namespace {

constexpr int64_t kPieceBytes = int64_t{1} << 20;
constexpr int64_t kReadPieces = 768;
constexpr int64_t kReadBytes = kReadPieces * kPieceBytes;
constexpr int64_t kPieceRounds = 20'000;
constexpr int64_t kPiecesPerThread = 300;
constexpr int kTries = 5;

// Calls body(piece) for `pieces` pieces on all threads at once. Returns the best of several tries
// of the sum over threads of work / median time: what interrupts a few pieces does not show.
template <typename Body>
double BestRate(ThreadPool& pool, int64_t pieces, double work, Body body) {
  double best = 0;
  for (int i = 0; i < kTries; ++i) {
    std::vector<std::vector<double>> times(static_cast<size_t>(pool.size()));
    pool.ParallelForEach(pieces, [&](int worker, int64_t piece, int64_t) {
      const auto start = std::chrono::steady_clock::now();
      body(piece);
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
      times[worker].push_back(elapsed.count());
    });
    double rate = 0;
    for (std::vector<double>& one : times) {
      if (one.empty()) continue;
      const auto middle = one.begin() + std::ssize(one) / 2;
      std::nth_element(one.begin(), middle, one.end());
      rate += work / *middle;
    }
    best = std::max(best, rate);
  }
  return best;
}

}  // namespace

MachinePeaks MeasurePeaks(ThreadPool& pool, CpuIsa isa) {
  const PeakLoops& loops = isa == CpuIsa::kAvx2      ? avx2::kPeakLoops
                           : isa == CpuIsa::kAvxVnni ? avxvnni::kPeakLoops
                                                     : avx512::kPeakLoops;
  const int64_t pieces = kPiecesPerThread * pool.size();
  std::atomic<int64_t> sink = 0;
  MachinePeaks peaks;
  peaks.float_gigaops = BestRate(pool, pieces, 1e-9 * loops.fma_ops * kPieceRounds, [&](int64_t) {
    sink += static_cast<int64_t>(loops.fma(kPieceRounds));
  });
  const bool tiles = peaks.tiles = isa == CpuIsa::kAmx;
  const auto integer = tiles ? loops.tile : loops.integer;
  const double ops = tiles ? loops.tile_ops : loops.integer_ops;
  peaks.integer_gigaops = BestRate(pool, pieces, 1e-9 * ops * kPieceRounds,
                                   [&](int64_t) { sink += integer(kPieceRounds); });
  const auto buffer = MapMemory(kReadBytes);
  if (buffer == nullptr) return peaks;
  const auto piece_of = [&](int64_t piece) { return buffer.get() + piece * kPieceBytes; };
  pool.ParallelForEach(kReadPieces, [&](int64_t piece, int64_t) {
    std::memset(piece_of(piece), 0, static_cast<size_t>(kPieceBytes));
  });
  peaks.read_gigabytes = BestRate(pool, kReadPieces, 1e-9 * kPieceBytes, [&](int64_t piece) {
    sink += loops.read(piece_of(piece), kPieceBytes);
  });
  return peaks;
}

}  // namespace treadle
