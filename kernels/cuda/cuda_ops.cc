// The ops that need more than a launch: what they are about is brought to the device, and memory
// grows, but not while a graph is captured.
#include "kernels/cuda/cuda_ops.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/cuda/ops.h"

namespace treadle::cuda {

void CudaOps::Embed(const PackedMatrix& table, std::span<const int32_t> ids, int32_t first_id,
                    bool accumulate, Tensor out) {
  TREADLE_CHECK(out.rows == static_cast<int64_t>(ids.size()) && out.cols == table.k());
  if (ids.empty() || !Ready()) return;
  const auto on_device = batch_.Ids(ids);
  Keep(on_device.status());
  if (!Ready()) return;
  matmuls_->Embed(table, {*on_device, LastSamples(), first_id, table.n(), accumulate, out});
}

void CudaOps::MatMul(Tensor x, std::span<const Projection> projections) {
  if (x.rows == 0 || projections.empty() || !Ready()) return;
  int64_t n = 0;
  for (const Projection& projection : projections) n = std::max(n, projection.out.cols);
  Keep(ReserveProducts(x.rows, x.cols, n));
  // Projections of the same rows together.
  while (!projections.empty()) {
    const Projection& first = projections.front();
    const auto others = std::ranges::find_if(projections, [&](const Projection& other) {
      return other.first_row != first.first_row || other.out.rows != first.out.rows;
    });
    const auto count = static_cast<size_t>(others - projections.begin());
    Keep(matmuls_->Multiply(x.Rows(first.first_row, first.out.rows), projections.first(count),
                            OwnersOf(first.first_row, first.out.rows)));
    projections = projections.subspan(count);
  }
}

const int32_t* CudaOps::OwnersOf(int64_t first, int64_t rows) const {
  const DeviceBatch& batch = batch_.batch();
  const bool of_batch = first == 0 && rows == batch.rows && batch.num_sequences > 0;
  return in_graph_ && of_batch ? batch.row_sequence : nullptr;
}

void CudaOps::RotateAndStoreKv(Tensor q, Tensor k, Tensor v, const RotaryTable* rotary,
                               const KvView& kv) {
  const KvLayout& layout = kv.layout;
  TREADLE_CHECK(layout.key_order == key_order() && k.rows == q.rows && v.rows == q.rows);
  TREADLE_CHECK(k.cols == layout.kv_heads * layout.head_dim && v.cols == k.cols);
  TREADLE_CHECK(q.cols % layout.head_dim == 0);
  if (const auto batch = Upload(kv, q.rows)) {
    cuda::RotateAndStoreKv(*device_, q, k, v, rotary, layout, kv.pages, *batch);
  }
}

void CudaOps::Attention(Tensor q, const KvView& kv, float scale, Tensor out) {
  const KvLayout& layout = kv.layout;
  TREADLE_CHECK(layout.key_order == key_order() && q.cols % layout.head_dim == 0);
  TREADLE_CHECK(out.rows == q.rows && out.cols == q.cols);
  const auto batch = Upload(kv, q.rows);
  if (!batch) return;
  Keep(ReserveScratch(AttentionScratchBytes(q.rows, batch->max_context, q.cols / layout.head_dim,
                                            layout.head_dim)));
  if (!Ready()) return;
  cuda::Attention(*device_, q, kv, *batch, scale, options_.deterministic, Scratch(), out);
}

void CudaOps::Sample(Tensor logits, std::span<const SampleRow> rows,
                     std::span<SampleResult> results) {
  const SamplePlace place = BeginSample(logits, rows, logits.cols, std::as_writable_bytes(results));
  if (!Ready() || rows.empty()) return;
  Keep(ReserveLastSamples(place.first + logits.rows));
  if (!Ready()) return;
  cuda::Sample(*device_, logits, place.first, batch_.batch(), Scratch(),
               reinterpret_cast<SampleResult*>(place.results), LastSamples() + place.first);
}

void CudaOps::SampleShard(Tensor logits, int32_t first_token, std::span<const SampleRow> rows,
                          std::span<ShardSample> shards) {
  const SamplePlace place =
      BeginSample(logits, rows, first_token + logits.cols, std::as_writable_bytes(shards));
  if (!Ready() || rows.empty()) return;
  cuda::SampleShard(*device_, logits, first_token, place.first, batch_.batch(), Scratch(),
                    reinterpret_cast<ShardSample*>(place.results));
}

bool CudaOps::Ready() {
  if (status_.ok()) Keep(device_->status());
  return status_.ok();
}

std::optional<DeviceBatch> CudaOps::Upload(const KvView& kv, int64_t rows) {
  if (kv.sequences.empty() || rows == 0 || !Ready()) return std::nullopt;
  const auto batch = batch_.UploadSequences(kv, rows);
  Keep(batch.status());
  return Ready() ? std::optional(*batch) : std::nullopt;
}

CudaOps::SamplePlace CudaOps::BeginSample(Tensor logits, std::span<const SampleRow> rows,
                                          int64_t tokens, std::span<std::byte> results) {
  TREADLE_CHECK(logits.rows == static_cast<int64_t>(rows.size()));
  if (rows.empty() || !Ready()) return {};
  const auto samples = batch_.UploadSamples(rows, tokens);
  Keep(samples.status());
  Keep(ReserveScratch(SampleScratchBytes(logits.rows, logits.cols)));
  if (!Ready()) return {};
  const auto place =
      results_.Take(results.size(), results.data(), samples->announced ? samples->first : -1);
  Keep(place.status());
  return {samples->first, place.ok() ? *place : nullptr};
}

absl::Status CudaOps::ReserveProducts(int64_t rows, int64_t k, int64_t n) {
  if (matmuls_->Holds(rows, k, n)) return absl::OkStatus();
  TREADLE_CHECK(!device_->capturing());
  TREADLE_RETURN_IF_ERROR(device_->Synchronize());
  ++generation_;
  return matmuls_->Reserve(rows, k, n);
}

absl::Status CudaOps::ReserveScratch(size_t bytes) {
  if (bytes <= scratch_.bytes()) return absl::OkStatus();
  TREADLE_CHECK(!device_->capturing());
  ++generation_;
  return Grow(*device_, bytes, scratch_);
}

absl::Status CudaOps::ReserveLastSamples(int64_t rows) {
  const size_t bytes = static_cast<size_t>(rows) * sizeof(int32_t);
  if (bytes <= last_samples_.bytes()) return absl::OkStatus();
  TREADLE_CHECK(!device_->capturing());
  TREADLE_ASSIGN_OR_RETURN(Buffer larger, device_->Allocate(bytes));
  std::vector<std::byte> kept(last_samples_.bytes());
  if (!kept.empty()) {
    device_->CopyToHost(kept.data(), last_samples_.data(), kept.size());
    device_->CopyToDevice(larger.data(), kept.data(), kept.size());
  }
  last_samples_ = std::move(larger);
  ++generation_;
  return absl::OkStatus();
}

}  // namespace treadle::cuda
