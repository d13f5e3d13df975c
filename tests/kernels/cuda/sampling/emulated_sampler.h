// The sampling kernels on an emulated device, called as a Backend's ops are. Tests only.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/ops.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/sampling.h"

namespace treadle::cuda {

// An array's copy on a device.
template <typename T>
class OnDevice {
 public:
  OnDevice(Device& device, const std::vector<T>& host)
      : buffer_(device.Allocate(std::max<size_t>(1, host.size()) * sizeof(T)).value()) {
    if (!host.empty()) device.CopyToDevice(buffer_.data(), host.data(), host.size() * sizeof(T));
  }
  T* data() { return reinterpret_cast<T*>(buffer_.data()); }

 private:
  Buffer buffer_;
};

// Lists of all rows, one after the other, and the rows that point into them.
struct RowLists {
  std::vector<DeviceSampleRow> rows;
  std::vector<TokenCount> counts;
  std::vector<int32_t> suppressed;
  std::vector<LogitBias> biases;
  std::vector<uint32_t> mask_words;

  template <typename T>
  static void Append(std::span<const T> list, std::vector<T>& all, int32_t& first, int32_t& count) {
    first = static_cast<int32_t>(all.size());
    count = static_cast<int32_t>(list.size());
    all.insert(all.end(), list.begin(), list.end());
  }

  // vocab: the whole vocabulary's, which masks are of.
  void Add(const SampleRow& row, int64_t vocab) {
    DeviceSampleRow to = FlatRow(row);
    Append(row.counts, counts, to.first_count, to.num_counts);
    Append(row.suppressed, suppressed, to.first_suppressed, to.num_suppressed);
    if (row.mask != nullptr) {
      to.first_mask_word = static_cast<int32_t>(mask_words.size());
      mask_words.insert(mask_words.end(), row.mask, row.mask + (vocab + 31) / 32);
    }
    if (const SamplingParameters* p = row.parameters; p != nullptr) {
      Append(std::span<const LogitBias>(p->logit_bias), biases, to.first_bias, to.num_biases);
    }
    rows.push_back(to);
  }
};

class EmulatedSampler {
 public:
  // logits: host, left as they are. The whole vocabulary is that of the logits for Sample.
  void Sample(Tensor logits, std::span<const SampleRow> rows, std::span<SampleResult> results) {
    last_samples_.assign(rows.size(), -2);
    OnDevice<int32_t> last(*device_, last_samples_);
    Run<SampleResult>(logits, rows, logits.cols, results,
                      [&](Tensor on_device, const DeviceBatch& batch, std::span<std::byte> scratch,
                          SampleResult* out) {
                        cuda::Sample(*device_, on_device, kRowsBefore, batch, scratch, out,
                                     last.data());
                      });
    device_->CopyToHost(last_samples_.data(), last.data(), rows.size() * sizeof(int32_t));
  }
  void SampleShard(Tensor logits, int32_t first_token, std::span<const SampleRow> rows,
                   int64_t vocab, std::span<ShardSample> shards) {
    Run<ShardSample>(logits, rows, vocab, shards,
                     [&](Tensor on_device, const DeviceBatch& batch, std::span<std::byte> scratch,
                         ShardSample* out) {
                       cuda::SampleShard(*device_, on_device, first_token, kRowsBefore, batch,
                                         scratch, out);
                     });
  }
  const std::vector<int32_t>& last_samples() const { return last_samples_; }

 private:
  static constexpr int64_t kRowsBefore = 2;  // rows of a batch begin anywhere
  static constexpr int64_t kPadding = 3;     // between rows, so that they begin anywhere too

  template <typename Result, typename Call>
  void Run(Tensor logits, std::span<const SampleRow> rows, int64_t vocab, std::span<Result> results,
           Call call) {
    RowLists lists;
    lists.rows.resize(kRowsBefore);
    for (const SampleRow& row : rows) lists.Add(row, vocab);
    const int64_t stride = logits.cols + kPadding;
    std::vector<float> padded(static_cast<size_t>(logits.rows * stride),
                              std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < logits.rows; ++i) {
      std::copy_n(logits.Row<float>(i), logits.cols, padded.data() + i * stride);
    }
    OnDevice<float> x(*device_, padded);
    OnDevice<DeviceSampleRow> samples(*device_, lists.rows);
    OnDevice<TokenCount> counts(*device_, lists.counts);
    OnDevice<int32_t> suppressed(*device_, lists.suppressed);
    OnDevice<LogitBias> biases(*device_, lists.biases);
    OnDevice<uint32_t> mask_words(*device_, lists.mask_words);
    OnDevice<Result> out(*device_, std::vector<Result>(results.size()));
    std::vector<std::byte> dirt(SampleScratchBytes(logits.rows, logits.cols), std::byte{0xff});
    OnDevice<std::byte> scratch(*device_, dirt);
    const DeviceBatch batch = {.samples = samples.data(),
                               .counts = counts.data(),
                               .suppressed = suppressed.data(),
                               .biases = biases.data(),
                               .mask_words = mask_words.data(),
                               .num_output_rows = static_cast<int32_t>(lists.rows.size())};
    call(Tensor{x.data(), DType::kF32, logits.rows, logits.cols, stride}, batch,
         std::span(scratch.data(), dirt.size()), out.data());
    ASSERT_TRUE(device_->Synchronize().ok());
    device_->CopyToHost(results.data(), out.data(), results.size_bytes());
  }

  std::unique_ptr<Device> device_ = Device::Open(0).value();
  std::vector<int32_t> last_samples_;
};

}  // namespace treadle::cuda
