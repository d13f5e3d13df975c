#include "kernels/cuda/cuda_backend.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <thread>
#include <tuple>
#include <utility>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/runtime/backend_on_device.h"
#include "kernels/cuda/runtime/side_stream.h"

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

// Page-locked memory, or the device's own.
class DeviceStaging final : public Staging {
 public:
  DeviceStaging(Device& device, StagingPlace place)
      : device_(device), pinned_(place == StagingPlace::kHost) {}
  absl::StatusOr<Buffer> Allocate(size_t bytes) override {
    return pinned_ ? device_.AllocateHost(bytes) : device_.Allocate(bytes);
  }
  void Upload(void* device, const void* staged, size_t bytes) override {
    pinned_ ? device_.CopyToDeviceAsync(device, staged, bytes)
            : device_.CopyOnDevice(device, staged, bytes);
  }
  void Download(void* staged, const void* device, size_t bytes) override {
    pinned_ ? device_.CopyToHostAsync(staged, device, bytes)
            : device_.CopyOnDevice(staged, device, bytes);
  }

 private:
  Device& device_;
  const bool pinned_;
};

class CudaBackend final : public CudaOps {
 public:
  CudaBackend(std::unique_ptr<Device> device, const CudaOptions& options)
      : CudaOps(std::move(device), kUploadMark, options) {}
  ~CudaBackend() override { (void)device_->Synchronize(); }  // before memory is freed

  absl::Status Init(std::unique_ptr<MatMuls> matmuls) {
    matmuls_ = std::move(matmuls);
    return ReserveLastSamples(kFewestSampleRows);
  }

  std::string_view name() const override { return "cuda"; }
  std::string description() const override {
    return Str("cuda ", device_->properties().name, ", products in ", Name(options_.dtype),
               options_.deterministic ? ", deterministic" : "");
  }
  void BindThread() override {
    device_->BindThread();
    rank_thread_ = std::this_thread::get_id();
  }

  absl::StatusOr<Buffer> Allocate(size_t bytes) override {
    return Beside() ? side_.Allocate(bytes) : device_->Allocate(bytes);
  }
  void CopyToDevice(void* device, const void* host, size_t bytes) override {
    if (bytes == 0) return;
    Beside() ? side_.CopyToDevice(device, host, bytes) : device_->CopyToDevice(device, host, bytes);
  }
  void CopyToHost(void* host, const void* device, size_t bytes) override {
    if (bytes > 0) device_->CopyToHost(host, device, bytes);
  }
  Staging* staging(StagingPlace place) override {
    return place == StagingPlace::kHost ? &pinned_staging_ : &device_staging_;
  }
  absl::Status Synchronize() override {
    Keep(results_.Flush());
    Keep(device_->Synchronize());
    Keep(side_.status());
    status_.ok() ? results_.DeliverAll() : results_.Drop();
    return status_;
  }
  absl::Status Recover() override {
    Synchronize().IgnoreError();
    return status_ = device_->Recover();
  }
  bool asynchronous() const override { return true; }

  void SetMark(int mark) override {
    Keep(results_.SetMark(mark));
    device_->SetMark(mark);
  }
  absl::Status WaitForMark(int mark) override {
    Keep(device_->WaitForMark(mark));
    Keep(side_.status());
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
      TREADLE_RETURN_IF_ERROR(RunOps(ops));
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

 private:
  // Whether a thread calls that is not the rank's, once there is one.
  bool Beside() const {
    const std::thread::id rank = rank_thread_;
    return rank != std::thread::id() && rank != std::this_thread::get_id();
  }

  // The numbers that size launches: the caller's key, sequences (bound), and the longest chunk of
  // one.
  using FullKey = std::tuple<GraphKey, int32_t, int32_t>;
  struct CapturedOps {
    std::unique_ptr<Graph> graph;  // null: ran once so far
    ResultDelivery::Pending results;
  };

  absl::Status RunOps(const std::function<absl::Status()>& ops) {
    in_graph_ = true;
    const absl::Status status = ops();
    in_graph_ = false;
    return status;
  }
  absl::Status Capture(const std::function<absl::Status()>& ops, CapturedOps& captured) {
    device_->BeginCapture();
    const absl::Status status = RunOps(ops);
    auto graph = device_->EndCapture();
    captured.results = results_.TakePending();
    TREADLE_RETURN_IF_ERROR(status);
    Keep(graph.status());
    if (graph.ok()) captured.graph = *std::move(graph);
    return absl::OkStatus();
  }

  BackendLimits limits_;
  std::atomic<std::thread::id> rank_thread_ = {};
  SideStream side_{*device_};
  DeviceStaging pinned_staging_{*device_, StagingPlace::kHost};
  DeviceStaging device_staging_{*device_, StagingPlace::kDevice};
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

namespace treadle {

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaOptions& options) {
  TREADLE_ASSIGN_OR_RETURN(auto device, cuda::Device::Open(options.device));
  return cuda::MakeCudaBackend(std::move(device), options);
}

std::vector<CudaDevice> CudaDevices(std::string* why) {
  std::vector<CudaDevice> devices;
  const int count = cuda::Device::Count(why);
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    const auto properties = cuda::Device::Describe(ordinal);
    if (!properties.ok()) {
      *why = std::string(properties.status().message());
      continue;
    }
    devices.push_back({ordinal, properties->name, properties->bus_id, properties->memory_bytes});
  }
  return devices;
}

absl::StatusOr<size_t> CudaFreeBytes(int device) {
  TREADLE_ASSIGN_OR_RETURN(const auto opened, cuda::Device::Open(device));
  return opened->FreeBytes();
}

}  // namespace treadle
