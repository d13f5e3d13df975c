// The op set: everything that a model's forward pass and a sampler need from a device.
//
// One abstract class and no optional member, so that no backend can forget an op. ReferenceBackend
// (kernels/reference) is the plain twin of every op; the op-case list (kernels/op_cases/op_cases.h)
// drives correctness and speed of every backend.
//
// Numerics: docs/design.md. In every op a row's result depends on that row alone (N1, N2): not on
// the number of rows, the threads, or which kernel ran.
//
// Thread safety: a Backend belongs to one rank; all its methods are called from that rank's thread,
// except that Pack may be called from any one thread before the first op, and that once BindThread
// has returned, any thread may call Allocate, and CopyToDevice to memory that no op uses meanwhile.
// Ops run in call order; on asynchronous devices results are readable on the host after
// Synchronize. Shapes are the caller's duty: a wrong one is a bug and CHECKed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/choice.h"
#include "kernels/buffer.h"
#include "kernels/formats/matrix_source.h"
#include "kernels/kv_view.h"
#include "kernels/sampling.h"
#include "kernels/tensor.h"

namespace treadle {

// How matrices are multiplied (dense float formats run exact but in kBf16).
//   kExact: activations stay float; y[n] = sum over ascending k of fma(w, x, y), where
//           w = fma(d, code, m).
//   kInt8:  activations are quantized per row in blocks of 32: dx = absmax / 127, q = x * (127 /
//           absmax) rounded half to even. With the exact integers S = sum of q and I = sum of code
//           * q, blocks are added in ascending order: y = fma(I, d * dx, y), then, with minima, y =
//           fma(m, dx * S, y). absmax below 2^-100 counts as zeros; NaN spoils its own row only. Of
//           formats with a scale per 16 weights halves are blocks, but minima come after both.
//   kInt16: dx = absmax / 16256 of a span: 256 activations, or a row's last 320 or fewer; q = x *
//           (16256 / absmax), 127 * 128 steps, so that q = 128 * high + low with both in 8 bits. Of
//           a span's blocks p = fma(I, d, p) from 0, and y = fma(m, dx * S, y) if there are minima;
//           then y = fma(p, dx, y). I reaches 128 * 16256 * 32 < 2^31 and is rounded to float once.
//   kInt12: kInt16, but with 127 * 16 steps for nibbles (HasNibbles): q = 16 * high + low, so that
//           a byte of a processor's matrix unit holds 16 * code, and one product of bytes has both.
//   kBf16:  layers' matrices (MatrixSource::of_layer), float ones too, and Attention: x and w =
//           fma(d, code, m), or q * scale and p, are rounded to bf16, as is what RotateAndStoreKv
//           stores as floats. Of each 32 k in turn, fma(w, x, sum) of the even ones is a chain from
//           0, that of the odd ones another, and y += even + odd; in all of these subnormal numbers
//           are zeros. The other matrices run as in kInt16.
//   kMixed: kInt8 for the matrices whose MatrixSource::coarse is set, if they have integers
//           (HasIntegers); else kInt12.
//   kAuto:  what the backend recommends for the format (documented at the backend).
// "k", and the blocks of activations, follow MatrixConstants::input_order where a matrix has one.
// Apart formats with integers (HasIntegers) have w = scale * code + m, with m = -(scale * zero),
// rounded once. Others of these run exact with w = scale * (codebook[code] - zero), unless the
// backend says how its integer modes round.
//
// LLM.int8() (ActivationPolicy::kRowInt8; Dettmers, chapter 2) is the same in every mode. An
// element with |x| >= threshold is an outlier (OutlierRule says whose). Of the others: dx = absmax
// / 127, q = x * (127 / absmax) rounded half to even, outliers and rows whose absmax is below
// 2^-100 count as zeros. y = (sum of code * q, exact) * (scale * dx), then for the outliers'
// columns in ascending order: y = fma(scale * code, x, y). NaN is an outlier; it spoils its own row
// only.
enum class ComputeMode : uint8_t { kAuto, kExact, kInt8, kInt16, kBf16, kMixed, kInt12 };
inline constexpr Choice<ComputeMode> kComputeModes[] = {
    {"auto", ComputeMode::kAuto},   {"exact", ComputeMode::kExact}, {"int8", ComputeMode::kInt8},
    {"int12", ComputeMode::kInt12}, {"int16", ComputeMode::kInt16}, {"bf16", ComputeMode::kBf16},
    {"mixed", ComputeMode::kMixed}};
constexpr std::string_view Name(ComputeMode compute) { return WordOf(kComputeModes, compute); }
// The mode of one matrix's products: kBf16, kMixed and kInt12 are several.
inline ComputeMode ModeOf(ComputeMode compute, const MatrixSource& source) {
  if (compute == ComputeMode::kBf16) return source.of_layer ? compute : ComputeMode::kInt16;
  if (compute != ComputeMode::kMixed && compute != ComputeMode::kInt12) return compute;
  const bool coarse = compute == ComputeMode::kMixed && source.of_layer && source.coarse;
  if (coarse && HasIntegers(source)) return ComputeMode::kInt8;
  return HasNibbles(source) ? ComputeMode::kInt12 : ComputeMode::kInt16;
}

// A weight matrix in the backend's own layout. Opaque; constant once made.
class PackedMatrix {
 public:
  virtual ~PackedMatrix() = default;
  virtual int64_t n() const = 0;
  virtual int64_t k() const = 0;
  virtual const WeightFormat& format() const = 0;
  virtual size_t bytes() const = 0;  // on the device
};

// One of several products that share an input: out = x W^T + bias (+ out if accumulate), of as many
// rows of x as out has.
struct Projection {
  const PackedMatrix* weight = nullptr;
  const float* bias = nullptr;  // [n] on the device, or null
  Tensor out;                   // [rows, n] f32
  bool accumulate = false;      // the residual add, fused
  int64_t first_row = 0;        // of x
};

// The two factors of an adapter for one product (LoRA, Hu et al. 2021, section 4.1): x A B is added
// to x W^T. On the device, in panels of 16 columns one after the other: [panels, rows, 16], zeros
// beyond the last column.
struct LowRank {
  const void* a = nullptr;   // [k, rank]; null: x is x A already
  const void* b = nullptr;   // [rank, n]
  DType type = DType::kF32;  // both factors': kF32, kF16 or kBF16
  int64_t rank = 0;
};
inline constexpr int64_t kLowRankPanel = 16;
constexpr int64_t LowRankPanels(int64_t cols) { return (cols + kLowRankPanel - 1) / kLowRankPanel; }
// Elements of a factor [rows, cols], and the place of one.
constexpr int64_t LowRankElements(int64_t rows, int64_t cols) {
  return LowRankPanels(cols) * rows * kLowRankPanel;
}
constexpr int64_t LowRankAt(int64_t rows, int64_t row, int64_t col) {
  return (col / kLowRankPanel * rows + row) * kLowRankPanel + col % kLowRankPanel;
}
// Some rows of a product.
struct LowRankProduct {
  LowRank by;
  std::span<const int32_t> rows = {};  // of x and of out; host
  Tensor out;                          // [*, n] f32
};

// cos and sin of position * frequency, [max_positions, half_dim] each, f32 on the device.
// Rotation is of the half-split kind: (x[i], x[i + half_dim]) for i < half_dim; elements of a head
// from 2 * half_dim on pass through.
struct RotaryTable {
  const float* cos = nullptr;
  const float* sin = nullptr;
  int64_t half_dim = 0;
  int64_t max_positions = 0;
};

// The numbers of an xIELU (Backend::Xielu).
struct XieluScales {
  float positive = 0;
  float negative = 0;
  float slope = 0.5f;
  float largest = -1e-6f;  // below 0
};

inline constexpr int64_t kMaxExperts = 1 << 12;  // of a layer

// How a router chooses and weighs a row's experts (Backend::Route).
struct Routing {
  bool sigmoid = false;         // scores are sigmoids of logits; else a softmax of these
  bool normalize = true;        // the weights of a row add up to `scale`
  float scale = 1;              // of weights
  const float* bias = nullptr;  // [experts], added to sigmoids for the choice alone; null: none
  const float* expert_scales = nullptr;  // [experts], of their weights, besides `scale`; null: ones
  // Experts are in so many groups of consecutive ones, of which `used_groups` are looked at.
  int64_t groups = 1;  // divides the number of experts
  int64_t used_groups = 1;
};

// The properties by which two iterations are the same to RunGraph.
struct GraphKey {
  int64_t rows = 0;         // padded
  int64_t context = 0;      // the longest sequence, rounded up by the caller to few values
  int64_t output_rows = 0;  // padded
  friend auto operator<=>(const GraphKey&, const GraphKey&) = default;
};

// The most that a backend is going to be asked; it allocates its scratch from this.
struct BackendLimits {
  int64_t max_rows = 0;         // of a batch
  int64_t max_sequences = 0;    // of a batch
  int64_t max_context = 0;      // positions of a sequence
  int64_t max_output_rows = 0;  // of Gather, the head and Sample
  int64_t max_features = 0;     // the widest input or output of a product, but for the head
  int64_t vocab = 0;            // columns of logits
  int64_t page_size = 0;
  int64_t page_tables = 1;  // of a sequence: 2 with BatchInput::window_sequences
  int64_t heads = 0;        // query heads of this rank
  int64_t head_dim = 0;
};

// An iteration's rows as the ops will be told of them. Spans stay valid and unchanged until the
// next BeginBatch.
struct BatchInput {
  std::span<const int32_t> token_ids = {};  // [rows]; Embed's
  std::span<const int32_t> positions = {};  // [rows] or none; also Embed's, of a table of positions
  std::span<const SequenceSpan> sequences = {};  // KvView's
  // The same rows in other pages: KvView's of layers that see a window, where others do not.
  std::span<const SequenceSpan> window_sequences = {};
  std::span<const int32_t> output_rows = {};  // Gather's
  std::span<const SampleRow> samples = {};    // Sample's, one for each output row
  // [samples.size()] or none. Where a replayed Sample's results go: those of samples[i] to
  // results[i]. If none, where they went when RunGraph first ran it.
  std::span<SampleResult> results = {};
  // Launches are sized for sequences of this many positions (0: for the longest one), and for as
  // many sequences as there are rows if no sequence has more than one: what RunGraph's key says.
  int64_t max_context = 0;
};

// Where rows that come from or go to another process lie on their way: in host memory that the
// device reaches directly, or on the device itself.
enum class StagingPlace : uint8_t { kHost, kDevice };

// Such memory, of a device with a memory of its own.
class Staging {
 public:
  virtual ~Staging() = default;
  // Any thread.
  virtual absl::StatusOr<Buffer> Allocate(size_t bytes) = 0;
  // Copies in the order of ops, without waiting; `staged` is of Allocate. In host memory it must be
  // left alone until Synchronize, or WaitForMark of a later mark, has returned.
  virtual void Upload(void* device, const void* staged, size_t bytes) = 0;
  virtual void Download(void* staged, const void* device, size_t bytes) = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string_view name() const = 0;    // "reference", "cpu"
  virtual std::string description() const = 0;  // "cpu avx512, 2 threads, compute auto (int16)"

  // Called once by the rank's thread, before its first op: binds it to the device, or to the CPU
  // that the backend was made for. Threads that only load (Pack) are left where they are.
  virtual void BindThread() = 0;

  // -- memory -------------------------------------------------------------------------------------
  // 64-byte aligned, zero-filled lazily where the device can (untouched pages cost nothing).
  virtual absl::StatusOr<Buffer> Allocate(size_t bytes) = 0;
  virtual void CopyToDevice(void* device, const void* host, size_t bytes) = 0;
  virtual void CopyToHost(void* host, const void* device, size_t bytes) = 0;
  // Null where Allocate's memory is the host's: nothing has to be copied there. Constant.
  virtual Staging* staging(StagingPlace place) = 0;
  // Waits for all ops. The status is the first failure of the device, if there was one: results
  // since the last success are then worthless, and ops do nothing until Recover.
  virtual absl::Status Synchronize() = 0;
  // Before an epoch: what ops of the one before failed for is forgotten, if it is over (memory that
  // could not be had; a communicator that was broken and is gone). Not OK: the device itself has
  // failed, and this backend with it, for good.
  virtual absl::Status Recover() = 0;
  // In which order pages hold K (KvLayout::key_order).
  virtual KeyOrder key_order() const = 0;
  // The type to which AddLowRank's factors are rounded that come as floats: kF32 or kF16.
  virtual DType low_rank_type() const = 0;

  // -- iterations ---------------------------------------------------------------------------------
  // Before serving. May be called again with larger limits. Ops beyond the limits allocate.
  virtual absl::Status Reserve(const BackendLimits& limits) = 0;
  // Announces an iteration, so that a device with a memory of its own gets its description in one
  // copy. Ops that are given other spans than the announced ones, or than parts of them, work all
  // the same, but not in RunGraph.
  virtual void BeginBatch(const BatchInput& batch) = 0;
  // How many rows a batch of `rows` decoding rows is padded to, so that RunGraph meets few shapes.
  // Rows beyond the real ones have the token id -1 and belong to no sequence.
  virtual int64_t PaddedRows(int64_t rows) const = 0;
  // Runs `ops`, or replays what they did when they first ran under this key: the same ops on the
  // same addresses and shapes, but for the contents of what BeginBatch announced. Between
  // BeginBatch and Synchronize; `ops` neither wait nor allocate nor copy to or from the host. They
  // may call collectives of an asynchronous communicator. The status is that of `ops`; of those
  // that failed nothing is kept.
  virtual absl::Status RunGraph(const GraphKey& key, const std::function<absl::Status()>& ops) = 0;
  // Drops what RunGraph has kept: before anything goes that `ops` used (their communicator).
  virtual void ForgetGraphs() = 0;
  // Whether ops may be on their way when they return. If not, marks say nothing.
  virtual bool asynchronous() const = 0;
  // A point that the host can wait for while later ops run. 0 or 1; setting one again moves it.
  virtual void SetMark(int mark) = 0;
  virtual absl::Status WaitForMark(int mark) = 0;

  // -- weights ------------------------------------------------------------------------------------
  // Repacks for this device, in parallel. The source may be unmapped afterwards, unless the backend
  // leaves it in its file (MatrixSource::file).
  virtual absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source) = 0;
  // The type for rows that nothing but products with these weights reads: a 16-bit type if all of
  // the products round their input to it anyway, so that results have the same bits as with f32,
  // else kF32. weights: at least one, all of one k. Constant for given weights.
  virtual DType InputType(std::span<const PackedMatrix* const> weights) const = 0;

  // -- ops ----------------------------------------------------------------------------------------
  // "f32 or 16 bits" below: f32, or the type that InputType gives for the products to come, rounded
  // half to even (finite numbers beyond f16's range become its largest). Then cols is a multiple of
  // 64, rows begin at multiples of 16 bytes, and out is other memory than the inputs.

  // out[i] = row ids[i] - first_id of table, decoded canonically; added to out if `accumulate`. An
  // id that the table has no row for (-1; a token of another rank's part of the vocabulary) is a
  // row of zeros. An id of -2 - r stands for the token that Sample last gave for row r (of the
  // announced samples, if it was given a part of them), so that a step can follow another whose
  // result the host has not seen. ids: [rows] host. out: [rows, k] f32.
  virtual void Embed(const PackedMatrix& table, std::span<const int32_t> ids, int32_t first_id,
                     bool accumulate, Tensor out) = 0;

  // out = x / sqrt(mean(x^2) + eps) * weight, added to out if `accumulate`. x: [rows, cols] f32;
  // out: f32 (may be x) or, unless it accumulates, 16 bits.
  virtual void RmsNorm(Tensor x, const float* weight, float eps, bool accumulate, Tensor out) = 0;

  // out = (x - mean) / sqrt(var + eps) * weight + bias (bias may be null). x, out: as RmsNorm's.
  virtual void LayerNorm(Tensor x, const float* weight, const float* bias, float eps,
                         Tensor out) = 0;

  // All projections of one input x [rows, k], f32 or 16 bits, or of some of its rows each (those of
  // an expert), in one pass over x and its quantization. All weights have k = x.cols.
  virtual void MatMul(Tensor x, std::span<const Projection> projections) = 0;

  // out[row] += (x[row] A) B, for the rows of each product. x A is, for each column, eight sums by
  // fma from 0 on, each over the next ceil(k / 8) of ascending k, added as ((0 + 1) + (2 + 3)) +
  // ((4 + 5) + (6 + 7)); the product with B is a sum by fma from 0 on over ascending columns of x
  // A. x: [*, k], f32 or 16 bits.
  virtual void AddLowRank(Tensor x, std::span<const LowRankProduct> products) = 0;

  // Rotates q (in place) and k by each row's position (no rotation if `rotary` is null), then
  // stores k and v into the cache, rounded to its type. q: [rows, heads * head_dim], k, v: [rows,
  // kv_heads * head_dim] f32; k's contents are unspecified afterwards. Rows outside every span of
  // kv.sequences are not touched. With a latent_dim, v is not read.
  virtual void RotateAndStoreKv(Tensor q, Tensor k, Tensor v, const RotaryTable* rotary,
                                const KvView& kv) = 0;

  // Causal attention of each row over its sequence's cached K/V (own chunk included, after rounding
  // to the cache's type; with kv.window, its last positions alone), with kv.sinks in the softmax,
  // grouped queries: query head h reads K/V head h / (heads / kv_heads). Positions are taken in
  // blocks of kAttentionBlock fixed absolute positions; each gives (max, sum, vector), combined in
  // ascending order. q: [rows, heads * head_dim] f32; out: [rows, heads * layout.ValueDim()], f32
  // or 16 bits.
  virtual void Attention(Tensor q, const KvView& kv, float scale, Tensor out) = 0;

  // out = silu(gate) * up, elementwise. gate, up: [rows, cols] f32; out: f32 (may be gate or up) or
  // 16 bits.
  virtual void SwiGlu(Tensor gate, Tensor up, Tensor out) = 0;

  // out = (up' + 1) * gate' * sigmoid(1.702 gate'), gate' = min(gate, limit), up' = up clamped to
  // -limit ..= limit (gpt-oss). gate, up, out: as SwiGlu's.
  virtual void ClampedSwiGlu(Tensor gate, Tensor up, float limit, Tensor out) = 0;

  // out = gelu(gate) * up with the GeLU below. gate, up, out: as SwiGlu's.
  virtual void GeGlu(Tensor gate, Tensor up, Tensor out) = 0;

  enum class Gate : uint8_t { kSwiGlu, kGeGlu };
  void Apply(Gate by, Tensor gate, Tensor up, Tensor out) {
    by == Gate::kSwiGlu ? SwiGlu(gate, up, out) : GeGlu(gate, up, out);
  }

  // Products of pairs, a gate's and an up's of the same rows each, then SwiGlu or GeGlu of all
  // rows: the same bits as one after the other. A backend can do it without writing what the
  // products give: gate and up, of which the projections' `out` are rows, are unspecified
  // afterwards. gate, up, out: [x.rows, cols], as SwiGlu's.
  virtual void GatedMatMul(Tensor x, std::span<const Projection> pairs, Gate by, Tensor gate,
                           Tensor up, Tensor out) {
    MatMul(x, pairs);
    Apply(by, gate, up, out);
  }

  // out = sigmoid(gate) * x, elementwise. gate: [rows, cols], or [rows, 1] for all of a row; x,
  // out: [rows, cols], out f32 (may be x) or 16 bits.
  virtual void SigmoidGate(Tensor gate, Tensor x, Tensor out) = 0;

  // out = x * y, elementwise. x, y, out: as SwiGlu's gate, up and out.
  virtual void Multiply(Tensor x, Tensor y, Tensor out) = 0;

  // A causal convolution along each sequence, of every channel by itself: out = f(bias + sum over
  // ascending t of weight[t] * x at position - taps + 1 + t, by fma), where x is 0 before position
  // 0, and f is silu if `silu`. Stores x as the inputs of kv's state pages. x, out: [rows,
  // channels] f32, may be the same; weight: [taps, channels]; bias: [channels] or null.
  virtual void Convolve(Tensor x, const float* weight, const float* bias, bool silu,
                        const KvView& kv, Tensor out) = 0;

  // The gated delta rule (Yang, Kautz and Hatamizadeh 2024, section 3). qkv: [rows, channels], a
  // row's queries and keys [key_heads, key_dim] each, then its values [heads, value_dim]. With q
  // and k divided by their lengths (the root of the sum of squares + 1e-6), q by the root of
  // key_dim besides, g = -rates * log(1 + exp(decay + bias)) and b = sigmoid(beta), for each value
  // head and the key head that it reads: S = exp(g) S; u = b (v - S^T k); S = S + k u^T; out = S^T
  // q.
  //
  // Computed from the state S_0 before the row's page and the page's keys k_i, changes u_i and
  // decays G_i, with all sums by fma: S_0^T k, likewise of q, over ascending features; times
  // exp(G); then exp(G - G_i) (k_i . k) u_i over ascending i. decay, beta: [rows, heads]; rates,
  // biases: [heads]; out: [rows, heads * value_dim]; all f32.
  //
  // With `skips`, [heads], and no beta: the recurrence of Mamba 2 (Dao and Gu 2024, section 6), of
  // the same form. q and k stay as they are, u = log(1 + exp(decay + bias)) v, and skips * v is
  // added to out.
  virtual void GatedDelta(Tensor qkv, Tensor decay, Tensor beta, const float* rates,
                          const float* biases, const float* skips, const KvView& kv,
                          Tensor out) = 0;

  // out = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (GPT-2's GeLU). x: [rows, cols] f32; out:
  // f32 (may be x) or 16 bits.
  virtual void Gelu(Tensor x, Tensor out) = 0;
  // out = 0.5 x (1 + erf(x / sqrt(2))), the GeLU that the former stands in for. x, out: as Gelu's.
  virtual void GeluErf(Tensor x, Tensor out) = 0;
  // out = max(x, 0). x, out: as Gelu's.
  virtual void Relu(Tensor x, Tensor out) = 0;

  // out = cap * tanh(x / cap), which bounds logits (Gemma 2, Gemma Team 2024, section 2). x, out:
  // as Gelu's.
  virtual void SoftCap(Tensor x, float cap, Tensor out) = 0;
  // out = x > 0 ? s.positive x^2 + s.slope x : s.negative (exp(min(x, s.largest)) - 1 - x) +
  // s.slope x (xIELU, Huang and Schlag 2024, section 3). x, out: as Gelu's.
  virtual void Xielu(Tensor x, const XieluScales& s, Tensor out) = 0;

  // The experts that each row goes to, and how much each of them counts: those of the k largest
  // logits, the largest first, of equal ones the first (NaN is less than all else), with a softmax
  // over these k if `normalize`, else over all experts. With `sigmoid`, weights are sigmoid(logit),
  // divided by the sum of the k if `normalize`, and a bias chooses those of the k largest
  // sigmoid(logit) + bias (DeepSeek-AI 2024, section 2.1.2). All times `scale`, and each expert's
  // times its own of `expert_scales`. With `groups`, only the experts of the used_groups groups
  // with the largest scores are looked at, of equal ones the first: a group's score is the largest
  // of its logits, or with `sigmoid` the sum of its two largest sigmoid(logit) + bias (the same,
  // and DeepSeek-V2, section 2.2.2). logits: [rows, experts], up to kMaxExperts; ids: [rows, k],
  // whole numbers; weights: [rows, k]; all f32. The used groups have at least k experts, and each
  // of them two.
  virtual void Route(Tensor logits, const Routing& routing, Tensor ids, Tensor weights) = 0;

  // out[i] = sum of weights[i][j] * x[places[i * k + j]] over ascending j, from 0 on by fma; added
  // to out if `accumulate`. x: [*, cols]; weights: [rows, k]; places: [rows * k] host; out: [rows,
  // cols]; all f32.
  virtual void Mix(Tensor x, std::span<const int32_t> places, Tensor weights, bool accumulate,
                   Tensor out) = 0;

  // out[i] = x[rows[i]]. x: [*, cols], out: [rows.size(), cols] f32.
  virtual void Gather(Tensor x, std::span<const int32_t> rows, Tensor out) = 0;

  // out = x, [rows, cols] f32; they do not overlap.
  virtual void Copy(Tensor x, Tensor out) = 0;

  // Copies whole pages of one layer, in order.
  virtual void CopyPages(const KvLayout& layout, std::byte* pages,
                         std::span<const PageCopy> copies) = 0;

  // logits: [rows.size(), vocab] f32, may be overwritten. results: host, [rows.size()]; complete
  // after Synchronize, or after WaitForMark of a later mark. See sampling.h.
  virtual void Sample(Tensor logits, std::span<const SampleRow> rows,
                      std::span<SampleResult> results) = 0;

  // This rank's part of Sample: logits [rows.size(), n] f32 are those of tokens first_token ..
  // first_token + n - 1, may be overwritten. A row's token ids, counts and mask are of the whole
  // vocabulary; what falls outside the shard is ignored. Candidates are filled only for rows that
  // sample and CanMergeShards. shards: host, [rows.size()]; complete as Sample's results.
  virtual void SampleShard(Tensor logits, int32_t first_token, std::span<const SampleRow> rows,
                           std::span<ShardSample> shards) = 0;
};

inline constexpr int64_t kAttentionBlock = 64;

// The ops of Backend once more, for whatever does the same with each: X(name, parameters,
// arguments). The compiler refuses an op that is here and not there, and a backend without one.
#define TREADLE_FEATURE_OPS(X)                                                                     \
  X(Embed,                                                                                         \
    (const PackedMatrix& table, std::span<const int32_t> ids, int32_t first_id, bool accumulate,   \
     Tensor out),                                                                                  \
    (table, ids, first_id, accumulate, out))                                                       \
  X(RmsNorm, (Tensor x, const float* weight, float eps, bool accumulate, Tensor out),              \
    (x, weight, eps, accumulate, out))                                                             \
  X(LayerNorm, (Tensor x, const float* weight, const float* bias, float eps, Tensor out),          \
    (x, weight, bias, eps, out))                                                                   \
  X(MatMul, (Tensor x, std::span<const Projection> projections), (x, projections))                 \
  X(AddLowRank, (Tensor x, std::span<const LowRankProduct> products), (x, products))               \
  X(RotateAndStoreKv, (Tensor q, Tensor k, Tensor v, const RotaryTable* rotary, const KvView& kv), \
    (q, k, v, rotary, kv))                                                                         \
  X(Attention, (Tensor q, const KvView& kv, float scale, Tensor out), (q, kv, scale, out))         \
  X(SwiGlu, (Tensor gate, Tensor up, Tensor out), (gate, up, out))                                 \
  X(ClampedSwiGlu, (Tensor gate, Tensor up, float limit, Tensor out), (gate, up, limit, out))      \
  X(GeGlu, (Tensor gate, Tensor up, Tensor out), (gate, up, out))                                  \
  X(SigmoidGate, (Tensor gate, Tensor x, Tensor out), (gate, x, out))                              \
  X(Multiply, (Tensor x, Tensor y, Tensor out), (x, y, out))                                       \
  X(Convolve,                                                                                      \
    (Tensor x, const float* weight, const float* bias, bool silu, const KvView& kv, Tensor out),   \
    (x, weight, bias, silu, kv, out))                                                              \
  X(GatedDelta,                                                                                    \
    (Tensor qkv, Tensor decay, Tensor beta, const float* rates, const float* biases,               \
     const float* skips, const KvView& kv, Tensor out),                                            \
    (qkv, decay, beta, rates, biases, skips, kv, out))                                             \
  X(Gelu, (Tensor x, Tensor out), (x, out))                                                        \
  X(GeluErf, (Tensor x, Tensor out), (x, out))                                                     \
  X(Relu, (Tensor x, Tensor out), (x, out))                                                        \
  X(SoftCap, (Tensor x, float cap, Tensor out), (x, cap, out))                                     \
  X(Xielu, (Tensor x, const XieluScales& s, Tensor out), (x, s, out))                              \
  X(Route, (Tensor logits, const Routing& routing, Tensor ids, Tensor weights),                    \
    (logits, routing, ids, weights))                                                               \
  X(Mix, (Tensor x, std::span<const int32_t> places, Tensor weights, bool accumulate, Tensor out), \
    (x, places, weights, accumulate, out))
// The ops without arithmetic, which HostBackend has.
#define TREADLE_COPY_OPS(X)                                                                  \
  X(Gather, (Tensor x, std::span<const int32_t> rows, Tensor out), (x, rows, out))           \
  X(Copy, (Tensor x, Tensor out), (x, out))                                                  \
  X(CopyPages, (const KvLayout& layout, std::byte* pages, std::span<const PageCopy> copies), \
    (layout, pages, copies))
#define TREADLE_SAMPLE_OPS(X)                                                                  \
  X(Sample, (Tensor logits, std::span<const SampleRow> rows, std::span<SampleResult> results), \
    (logits, rows, results))                                                                   \
  X(SampleShard,                                                                               \
    (Tensor logits, int32_t first_token, std::span<const SampleRow> rows,                      \
     std::span<ShardSample> shards),                                                           \
    (logits, first_token, rows, shards))
#define TREADLE_BACKEND_OPS(X) TREADLE_FEATURE_OPS(X) TREADLE_COPY_OPS(X) TREADLE_SAMPLE_OPS(X)

// Whether a K/V cache of the backend can have this type.
inline bool HasKvType(const Backend& backend, DType type) {
  return type != (backend.key_order() == KeyOrder::kByFeature ? DType::kBF16 : DType::kI8);
}

// Whether it can have latents (KvLayout::latent_dim).
inline bool HasLatents(const Backend& backend) {
  return backend.key_order() == KeyOrder::kByFeature;
}

// TREADLE_BACKEND_OPS(TREADLE_OVERRIDE_OP): in a backend that implements them all.
#define TREADLE_OVERRIDE_OP(name, parameters, arguments) void name parameters override;

}  // namespace treadle
