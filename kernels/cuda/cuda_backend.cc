#include "kernels/cuda/cuda_backend.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <thread>
#include <tuple>
#include <utility>

#include "kernels/cuda/matmul.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/runtime/announced_batch.h"
#include "kernels/cuda/runtime/backend_on_device.h"
#include "kernels/cuda/runtime/result_delivery.h"
#include "kernels/cuda/runtime/staging.h"

namespace treadle::cuda {
namespace {

// The device's marks: the backend's own two, then the upload's.
constexpr int kUploadMark = 2;
// A graph of a model's decoding step takes a few MB on the device. Shapes beyond this many run op
// by op.
constexpr size_t kMaxGraphs = 256;
constexpr int64_t kFewestSampleRows = 64;

BackendLimits Max(const BackendLimits& a, const BackendLimits& b) {
  BackendLimits larger = a;
  for (int64_t BackendLimits::*limit :
       {&BackendLimits::max_rows, &BackendLimits::max_sequences, &BackendLimits::max_context,
        &BackendLimits::max_output_rows, &BackendLimits::max_features, &BackendLimits::vocab,
        &BackendLimits::page_size, &BackendLimits::heads, &BackendLimits::head_dim}) {
    larger.*limit = std::max(a.*limit, b.*limit);
  }
  return larger;
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(std::unique_ptr<Device> device, const CudaOptions& options)
      : options_(options),
        device_(std::move(device)),
        pinned_staging_(*device_),
        device_staging_(*device_),
        batch_(*device_, kUploadMark),
        results_(*device_) {}
  ~CudaBackend() override { (void)device_->Synchronize(); }  // before memory is freed

  absl::Status Init(std::unique_ptr<MatMuls> matmuls) {
    matmuls_ = std::move(matmuls);
    return ReserveLastSamples(kFewestSampleRows);
  }

  Device& device() { return *device_; }

  std::string_view name() const override { return "cuda"; }
  std::string description() const override {
    return Str("cuda ", device_->properties().name, ", products in ", Name(options_.dtype),
               options_.deterministic ? ", deterministic" : "");
  }
  void BindThread() override { device_->BindThread(); }

  absl::StatusOr<Buffer> Allocate(size_t bytes) override { return device_->Allocate(bytes); }
  void CopyToDevice(void* device, const void* host, size_t bytes) override {
    if (bytes > 0) device_->CopyToDevice(device, host, bytes);
  }
  void CopyToHost(void* host, const void* device, size_t bytes) override {
    if (bytes > 0) device_->CopyToHost(host, device, bytes);
  }
  Staging* staging(StagingPlace place) override {
    if (place == StagingPlace::kHost) return &pinned_staging_;
    return &device_staging_;
  }
  absl::Status Synchronize() override {
    Keep(results_.Flush());
    Keep(device_->Synchronize());
    status_.ok() ? results_.DeliverAll() : results_.Drop();
    return status_;
  }
  absl::Status Recover() override {
    Synchronize().IgnoreError();
    return status_ = device_->Recover();
  }
  KeyOrder key_order() const override { return KeyOrder::kByPosition; }
  bool asynchronous() const override { return true; }

  void SetMark(int mark) override {
    Keep(results_.SetMark(mark));
    device_->SetMark(mark);
  }
  absl::Status WaitForMark(int mark) override {
    Keep(device_->WaitForMark(mark));
    status_.ok() ? results_.DeliverMarked(mark) : results_.Drop();
    return status_;
  }

  // -- iterations ---------------------------------------------------------------------------------

  absl::Status Reserve(const BackendLimits& limits) override {
    limits_ = Max(limits_, limits);
    TREADLE_RETURN_IF_ERROR(Synchronize());
    TREADLE_RETURN_IF_ERROR(batch_.Reserve(limits_, PaddedRows(limits_.max_sequences)));
    const BackendLimits& l = limits_;
    TREADLE_RETURN_IF_ERROR(results_.Reserve(static_cast<size_t>(l.max_output_rows) *
                                             std::max(sizeof(SampleResult), sizeof(ShardSample))));
    TREADLE_RETURN_IF_ERROR(ReserveLastSamples(l.max_output_rows));
    TREADLE_RETURN_IF_ERROR(ReserveScratch(
        std::max(AttentionScratchBytes(l.max_rows, l.max_context, l.heads, l.head_dim),
                 SampleScratchBytes(l.max_output_rows, l.vocab))));
    TREADLE_RETURN_IF_ERROR(ReserveProducts(l.max_rows, l.max_features, l.max_features));
    return ReserveProducts(l.max_output_rows, l.max_features, l.vocab);
  }

  void BeginBatch(const BatchInput& batch) override {
    Keep(results_.Reserve(batch.samples.size() * sizeof(SampleResult)));
    Keep(ReserveLastSamples(static_cast<int64_t>(batch.samples.size())));
    if (Ready()) Keep(batch_.Announce(batch));
  }

  int64_t PaddedRows(int64_t rows) const override {
    const int64_t padded = PaddedRowBucket(rows);
    return rows <= limits_.max_rows ? std::min(padded, limits_.max_rows) : padded;
  }

  // The first time under a key ops run as they are, which also lets libraries choose and load what
  // they need; the second time they are captured, and from then on replayed.
  absl::Status RunGraph(const GraphKey& key, const std::function<absl::Status()>& ops) override {
    if (!Ready()) return absl::OkStatus();  // Synchronize tells of it
    Keep(batch_.Upload());
    Keep(results_.Flush());
    if (graphs_generation_ != Generation()) graphs_.clear();
    graphs_generation_ = Generation();
    const DeviceBatch& batch = batch_.batch();
    TREADLE_CHECK(batch.num_sequences == 0 ||
                  (batch.rows == key.rows && batch.max_context == key.context));
    const FullKey full_key = {key, batch.num_sequences, batch.max_sequence_rows};
    auto it = graphs_.find(full_key);
    if (it == graphs_.end()) {
      TREADLE_RETURN_IF_ERROR(ops());
      if (graphs_.size() < kMaxGraphs) graphs_[full_key];
      return absl::OkStatus();
    }
    CapturedOps& captured = it->second;
    if (captured.graph == nullptr) TREADLE_RETURN_IF_ERROR(Capture(ops, captured));
    if (!Ready()) return absl::OkStatus();
    device_->Replay(*captured.graph);
    results_.AddPending(captured.results, batch_.announced().results);
    return absl::OkStatus();
  }

  void ForgetGraphs() override { graphs_.clear(); }

  // -- weights ------------------------------------------------------------------------------------

  absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source) override {
    return matmuls_->Pack(source);
  }
  DType InputType(std::span<const PackedMatrix* const> weights) const override {
    return matmuls_->InputType(weights);
  }

  // -- ops ----------------------------------------------------------------------------------------

  void Embed(const PackedMatrix& table, std::span<const int32_t> ids, int32_t first_id,
             bool accumulate, Tensor out) override {
    TREADLE_CHECK(out.rows == static_cast<int64_t>(ids.size()) && out.cols == table.k());
    if (ids.empty() || !Ready()) return;
    const auto on_device = batch_.Ids(ids);
    Keep(on_device.status());
    if (!Ready()) return;
    matmuls_->Embed(table,
                    {.ids = *on_device,
                     .last_samples = LastSamples(),
                     .first = first_id,
                     .n = static_cast<int32_t>(table.n())},
                    accumulate, out);
  }

  void RmsNorm(Tensor x, const float* weight, float eps, Tensor out) override {
    if (Ready()) cuda::RmsNorm(*device_, x, weight, eps, out);
  }
  void LayerNorm(Tensor x, const float* weight, const float* bias, float eps, Tensor out) override {
    if (Ready()) cuda::LayerNorm(*device_, x, weight, bias, eps, out);
  }
  void SwiGlu(Tensor gate, Tensor up, Tensor out) override {
    if (Ready()) cuda::SwiGlu(*device_, gate, up, out);
  }
  void Gelu(Tensor x, Tensor out) override {
    if (Ready()) cuda::Gelu(*device_, x, out);
  }
  void CopyPages(const KvLayout& layout, std::byte* pages,
                 std::span<const PageCopy> copies) override {
    if (Ready()) cuda::CopyPages(*device_, layout, pages, copies);
  }

  void Gather(Tensor x, std::span<const int32_t> rows, Tensor out) override {
    TREADLE_CHECK(out.rows == static_cast<int64_t>(rows.size()) && out.cols == x.cols);
    if (rows.empty() || !Ready()) return;
    const auto on_device = batch_.OutputRows(rows);
    Keep(on_device.status());
    if (Ready()) cuda::Gather(*device_, x, *on_device, out.rows, out);
  }

  void Copy(Tensor x, Tensor out) override {
    if (Ready()) cuda::Copy(*device_, x, out);
  }

  void MatMul(Tensor x, std::span<const Projection> projections) override {
    if (x.rows == 0 || projections.empty() || !Ready()) return;
    int64_t n = 0;
    for (const Projection& projection : projections) n = std::max(n, projection.out.cols);
    Keep(ReserveProducts(x.rows, x.cols, n));
    Keep(matmuls_->Multiply(x, projections));
  }

  void RotateAndStoreKv(Tensor q, Tensor k, Tensor v, const RotaryTable* rotary,
                        const KvView& kv) override {
    const KvLayout& layout = kv.layout;
    TREADLE_CHECK(layout.key_order == key_order() && k.rows == q.rows && v.rows == q.rows);
    TREADLE_CHECK(k.cols == layout.kv_heads * layout.head_dim && v.cols == k.cols);
    TREADLE_CHECK(q.cols % layout.head_dim == 0);
    if (!Upload(kv, q.rows)) return;
    cuda::RotateAndStoreKv(*device_, q, k, v, rotary, layout, kv.pages, batch_.batch());
  }

  void Attention(Tensor q, const KvView& kv, float scale, Tensor out) override {
    const KvLayout& layout = kv.layout;
    TREADLE_CHECK(layout.key_order == key_order() && q.cols % layout.head_dim == 0);
    TREADLE_CHECK(out.rows == q.rows && out.cols == q.cols);
    if (!Upload(kv, q.rows)) return;
    const DeviceBatch& batch = batch_.batch();
    Keep(ReserveScratch(AttentionScratchBytes(q.rows, batch.max_context, q.cols / layout.head_dim,
                                              layout.head_dim)));
    if (!Ready()) return;
    cuda::Attention(*device_, q, layout, kv.pages, batch, scale, options_.deterministic, Scratch(),
                    out);
  }

  void Sample(Tensor logits, std::span<const SampleRow> rows,
              std::span<SampleResult> results) override {
    const SamplePlace place =
        BeginSample(logits, rows, logits.cols, std::as_writable_bytes(results));
    if (!Ready() || rows.empty()) return;
    Keep(ReserveLastSamples(place.first + logits.rows));
    if (!Ready()) return;
    cuda::Sample(*device_, logits, place.first, batch_.batch(), Scratch(),
                 reinterpret_cast<SampleResult*>(place.results), LastSamples() + place.first);
  }

  void SampleShard(Tensor logits, int32_t first_token, std::span<const SampleRow> rows,
                   std::span<ShardSample> shards) override {
    const SamplePlace place =
        BeginSample(logits, rows, first_token + logits.cols, std::as_writable_bytes(shards));
    if (!Ready() || rows.empty()) return;
    cuda::SampleShard(*device_, logits, first_token, place.first, batch_.batch(), Scratch(),
                      reinterpret_cast<ShardSample*>(place.results));
  }

 private:
  // What launches are sized for: the caller's key, sequences (bound), and the longest chunk of one.
  using FullKey = std::tuple<GraphKey, int32_t, int32_t>;
  struct CapturedOps {
    std::unique_ptr<Graph> graph;  // null: ran once so far
    ResultDelivery::Pending results;
  };

  bool Ready() {
    if (status_.ok()) Keep(device_->status());
    return status_.ok();
  }
  void Keep(const absl::Status& status) {
    if (status_.ok()) status_ = status;
  }

  // Changes whenever a device address that graphs have kept does.
  int64_t Generation() const { return generation_ + batch_.generation() + results_.generation(); }

  absl::Status Capture(const std::function<absl::Status()>& ops, CapturedOps& captured) {
    device_->BeginCapture();
    const absl::Status status = ops();
    auto graph = device_->EndCapture();
    captured.results = results_.TakePending();
    TREADLE_RETURN_IF_ERROR(status);
    Keep(graph.status());
    if (graph.ok()) captured.graph = *std::move(graph);
    return absl::OkStatus();
  }

  // Whether there is anything to do, and it can be done.
  bool Upload(const KvView& kv, int64_t rows) {
    if (kv.sequences.empty() || rows == 0 || !Ready()) return false;
    Keep(batch_.UploadSequences(kv, rows));
    return Ready();
  }

  struct SamplePlace {
    int64_t first = 0;  // of the batch's samples
    std::byte* results = nullptr;
  };
  // What both kinds of sampling need. Failures are kept.
  SamplePlace BeginSample(Tensor logits, std::span<const SampleRow> rows, int64_t tokens,
                          std::span<std::byte> results) {
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

  // -- memory that grows, but not while a graph is captured ---------------------------------------

  absl::Status ReserveProducts(int64_t rows, int64_t k, int64_t n) {
    if (rows <= product_rows_ && k <= product_k_ && n <= product_n_) return absl::OkStatus();
    TREADLE_CHECK(!device_->capturing());
    TREADLE_RETURN_IF_ERROR(device_->Synchronize());
    ++generation_;
    rows = std::max(product_rows_, rows);
    k = std::max(product_k_, k);
    n = std::max(product_n_, n);
    TREADLE_RETURN_IF_ERROR(matmuls_->Reserve(rows, k, n));
    product_rows_ = rows;
    product_k_ = k;
    product_n_ = n;
    return absl::OkStatus();
  }

  absl::Status ReserveScratch(size_t bytes) {
    if (bytes <= scratch_.bytes()) return absl::OkStatus();
    TREADLE_CHECK(!device_->capturing());
    TREADLE_RETURN_IF_ERROR(device_->Synchronize());
    ++generation_;
    scratch_ = Buffer();
    TREADLE_ASSIGN_OR_RETURN(scratch_, device_->Allocate(bytes));
    return absl::OkStatus();
  }
  std::span<std::byte> Scratch() const { return {scratch_.data(), scratch_.bytes()}; }

  // What was sampled last stays.
  absl::Status ReserveLastSamples(int64_t rows) {
    const size_t bytes = static_cast<size_t>(rows) * sizeof(int32_t);
    if (bytes <= last_samples_.bytes()) return absl::OkStatus();
    TREADLE_CHECK(!device_->capturing());
    TREADLE_ASSIGN_OR_RETURN(Buffer larger, device_->Allocate(bytes));
    std::vector<std::byte> kept(last_samples_.bytes());
    CopyToHost(kept.data(), last_samples_.data(), kept.size());
    CopyToDevice(larger.data(), kept.data(), kept.size());
    last_samples_ = std::move(larger);
    ++generation_;
    return absl::OkStatus();
  }
  int32_t* LastSamples() const { return reinterpret_cast<int32_t*>(last_samples_.data()); }

  const CudaOptions options_;
  const std::unique_ptr<Device> device_;
  std::unique_ptr<MatMuls> matmuls_;
  BackendLimits limits_;
  PinnedStaging pinned_staging_;
  DeviceStaging device_staging_;
  AnnouncedBatch batch_;
  ResultDelivery results_;
  int64_t product_rows_ = 0;  // what products have scratch for
  int64_t product_k_ = 0;
  int64_t product_n_ = 0;
  Buffer scratch_;
  Buffer last_samples_;  // int32
  int64_t generation_ = 0;
  absl::Status status_;

  std::map<FullKey, CapturedOps> graphs_;  // captured, or to be
  int64_t graphs_generation_ = 0;
};

}  // namespace

Device& DeviceOf(Backend& backend) {
  TREADLE_CHECK(backend.name() == "cuda");
  return static_cast<CudaBackend&>(backend).device();
}

int64_t PaddedRowBucket(int64_t rows) {
  int64_t bucket = 1;
  while (bucket < 8 && bucket < rows) bucket *= 2;
  if (rows <= bucket) return bucket;
  const int64_t step = rows <= 64 ? 8 : rows <= 256 ? 16 : rows <= 1024 ? 32 : 128;
  return (rows + step - 1) / step * step;
}

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(std::unique_ptr<Device> device,
                                                         const CudaOptions& options) {
  const MatMulOptions matmul = {
      .dtype = options.dtype,
      .deterministic = options.deterministic,
      .threads = options.pack_threads > 0
                     ? options.pack_threads
                     : static_cast<int>(std::max(1u, std::thread::hardware_concurrency())),
      .few_rows = options.few_rows};
  Device& on = *device;
  auto backend = std::make_unique<CudaBackend>(std::move(device), options);
  TREADLE_ASSIGN_OR_RETURN(auto matmuls, MatMuls::Create(on, matmul));
  TREADLE_RETURN_IF_ERROR(backend->Init(std::move(matmuls)));
  return backend;
}

}  // namespace treadle::cuda
