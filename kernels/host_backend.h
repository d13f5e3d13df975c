// Common parts of all backends whose device is the host: memory is memory, and ops are done
// when they return.
#pragma once

#include <cstring>
#include <functional>
#include <span>
#include <vector>

#include "kernels/backend.h"

namespace treadle {

class HostBackend : public Backend {
 public:
  void BindThread() override {}
  void CopyToDevice(void* device, const void* host, size_t bytes) override {
    if (bytes > 0) std::memcpy(device, host, bytes);
  }
  void CopyToHost(void* host, const void* device, size_t bytes) override {
    if (bytes > 0) std::memcpy(host, device, bytes);
  }
  Staging* staging(StagingPlace) override { return nullptr; }
  absl::Status Synchronize() override { return absl::OkStatus(); }
  absl::Status Recover() override { return absl::OkStatus(); }
  KeyOrder key_order() const override { return KeyOrder::kByFeature; }
  DType low_rank_type() const override { return DType::kF32; }
  DType InputType(std::span<const PackedMatrix* const>) const override { return DType::kF32; }

  bool asynchronous() const override { return false; }
  absl::Status Reserve(const BackendLimits& limits) override { return absl::OkStatus(); }
  void BeginBatch(const BatchInput& batch) override { announced_ = batch.samples; }
  int64_t PaddedRows(int64_t rows) const override { return rows; }
  absl::Status RunGraph(const GraphKey&, const std::function<absl::Status()>& ops) override {
    return ops();
  }
  void ForgetGraphs() override {}
  void SetMark(int mark) override {}
  absl::Status WaitForMark(int mark) override { return absl::OkStatus(); }

  // Operations without arithmetic.
  void Gather(Tensor x, std::span<const int32_t> rows, Tensor out) override {
    TREADLE_CHECK(out.rows == std::ssize(rows) && out.cols == x.cols);
    for (int64_t i = 0; i < out.rows; ++i) {
      TREADLE_CHECK(rows[i] >= 0 && rows[i] < x.rows);
      CopyRow(x, rows[i], out, i);
    }
  }
  void Copy(Tensor x, Tensor out) override {
    TREADLE_CHECK(x.rows == out.rows && x.cols == out.cols);
    for (int64_t row = 0; row < x.rows; ++row) CopyRow(x, row, out, row);
  }
  void CopyPages(const KvLayout& layout, std::byte* pages,
                 std::span<const PageCopy> copies) override {
    const int64_t stride = layout.PageStride();
    for (const PageCopy& copy : copies) {
      std::memmove(pages + copy.to * stride, pages + copy.from * stride,
                   static_cast<size_t>(layout.PageBytes()));
    }
  }

 protected:
  // The row of Embed's table; -1: a row of zeros.
  int64_t TableRow(const PackedMatrix& table, int32_t id, int32_t first_id) const {
    if (id < -1) {
      TREADLE_CHECK(-2 - id < static_cast<int64_t>(last_samples_.size()));
      id = last_samples_[-2 - id];
    }
    const int64_t row = int64_t{id} - first_id;
    return row >= 0 && row < table.n() ? row : -1;
  }
  // At the end of Sample.
  void KeepSamples(std::span<const SampleRow> rows, std::span<const SampleResult> results) {
    const std::less_equal<const SampleRow*> before;  // compares pointers into different arrays too
    const SampleRow* const end = announced_.data() + announced_.size();
    const bool part = before(announced_.data(), rows.data()) && before(rows.data(), end);
    const size_t first = part ? static_cast<size_t>(rows.data() - announced_.data()) : 0;
    if (last_samples_.size() < first + rows.size()) last_samples_.resize(first + rows.size());
    for (size_t i = 0; i < rows.size(); ++i) last_samples_[first + i] = results[i].token;
  }

 private:
  static void CopyRow(const Tensor& x, int64_t from, const Tensor& out, int64_t to) {
    std::memcpy(out.Row<float>(to), x.Row<float>(from),
                static_cast<size_t>(x.cols) * sizeof(float));
  }

  std::span<const SampleRow> announced_;
  std::vector<int32_t> last_samples_;
};

}  // namespace treadle
