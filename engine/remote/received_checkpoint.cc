#include "engine/remote/received_checkpoint.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <tuple>
#include <utility>

#include "base/quoted.h"
#include "base/sha256.h"
#include "base/status.h"
#include "engine/remote/checkpoint_messages.h"
#include "engine/remote/control.pb.h"

namespace treadle {
namespace {

constexpr uint64_t kChunkBytes = 1 << 20;
constexpr uint64_t kChunksAhead = 4;               // asked for and not yet here
constexpr uint64_t kMaxBytes = uint64_t{1} << 44;  // of one tensor
// The size of all tensors: more than any model has, and a quarter of a process' addresses.
constexpr uint64_t kMaxRoom = uint64_t{1} << 45;
constexpr int kMaxTensors = 1 << 17;  // 32 for each of 4096 layers
constexpr size_t kMaxNameBytes = 1 << 10;
// How often a worker may ask for a tensor from its first byte on for each of its ranks, while it is
// attached: its sum is taken each time. A rank loads one at most twice, as embedding and as
// head, and again for a cache of another size.
constexpr int kMaxBegun = 4;

std::string HashOf(std::span<const std::byte> bytes) {
  Sha256 sum;
  sum.Add(bytes);
  return sum.Finish();
}

// Whether constants fit the matrix that they belong to, as those of a file are checked.
absl::Status CheckConstants(const StoredTensor& tensor, const MatrixConstants& constants) {
  const bool own = !constants.codes.empty();
  const uint64_t codes = own ? constants.codes.size() : tensor.bytes;
  const auto expected = static_cast<uint64_t>(tensor.format->MatrixBytes(1, tensor.Elements()));
  if (codes != expected) {
    return InvalidArgument("tensor ", Quoted(tensor.name), " has ", codes,
                           " bytes of codes, expected ", expected, " for a matrix ",
                           ShapeText(tensor.shape), " in ", tensor.format->name);
  }
  // Larger than any format's blocks, which a small matrix may not fill.
  const int64_t most_block = std::max<int64_t>(tensor.Elements(), int64_t{1} << 30);
  if (constants.scale_block < 1 || constants.scale_block > most_block) {
    return InvalidArgument("tensor ", Quoted(tensor.name), " has scales for blocks of ",
                           constants.scale_block, ", expected 1 to ", most_block);
  }
  const absl::Status fits = CheckMatrixSource({.format = tensor.format,
                                               .data = tensor.data,
                                               .n = tensor.shape[0],
                                               .k = tensor.shape[1],
                                               .constants = &constants});
  if (fits.ok()) return fits;
  return InvalidArgument("tensor ", Quoted(tensor.name), ": ", std::string(fits.message()));
}

// Bytes of a message with the constants of such a matrix: at the very most a scale and a zero for
// each of its elements, the codes, and the order of its inputs.
uint64_t MostConstantBytes(const StoredTensor& tensor) {
  constexpr uint64_t kRest = 1 << 16;  // a codebook, and the fields' tags
  const auto elements = static_cast<uint64_t>(tensor.Elements());
  return elements * (2 * sizeof(float) + 1 + 5) + kRest;
}

}  // namespace

void ReceivedCheckpoint::Unmap::operator()(std::byte* begin) const { munmap(begin, bytes); }

absl::StatusOr<std::unique_ptr<ReceivedCheckpoint>> ReceivedCheckpoint::Create(
    const control::CheckpointDirectory& directory, std::chrono::milliseconds patience, Ask ask) {
  std::unique_ptr<ReceivedCheckpoint> checkpoint(new ReceivedCheckpoint(patience, std::move(ask)));
  TREADLE_RETURN_IF_ERROR(checkpoint->Read(directory));
  return checkpoint;
}

ReceivedCheckpoint::ReceivedCheckpoint(std::chrono::milliseconds patience, Ask ask)
    : patience_(patience),
      ask_(std::move(ask)),
      page_(static_cast<uint64_t>(sysconf(_SC_PAGESIZE))) {}

absl::Status ReceivedCheckpoint::Read(const control::CheckpointDirectory& directory) {
  kind_ = directory.hugging_face() ? Kind::kHuggingFace : Kind::kGguf;
  path_ = directory.path();
  if (path_.size() > kMaxNameBytes) {
    return InvalidArgument("the path of the master's model has ", path_.size(),
                           " bytes, expected at most ", kMaxNameBytes);
  }
  if (directory.tensors_size() > kMaxTensors) {
    return InvalidArgument(path_, ": ", directory.tensors_size(), " tensors, expected at most ",
                           kMaxTensors);
  }
  TREADLE_RETURN_IF_ERROR(DecodeConfig(directory.config(), config_));
  TREADLE_RETURN_IF_ERROR(CheckConsistency());
  std::vector<StoredTensor> tensors;
  uint64_t reserved = 0;
  for (const control::TensorEntry& entry : directory.tensors()) {
    TREADLE_RETURN_IF_ERROR(AddEntry(entry, reserved, tensors));
  }
  reserved = std::max(reserved, page_);
  void* const begin = mmap(nullptr, reserved, PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) {
    return ResourceExhausted("no addresses for ", reserved,
                             " bytes of weights: ", std::strerror(errno));
  }
  range_ = {static_cast<std::byte*>(begin), Unmap{reserved}};
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].data = range_.get() + offsets_[i];
  AddTensors(std::move(tensors));
  return absl::OkStatus();
}

absl::Status ReceivedCheckpoint::AddEntry(const control::TensorEntry& entry, uint64_t& reserved,
                                          std::vector<StoredTensor>& tensors) {
  if (entry.name().size() > kMaxNameBytes) {
    return InvalidArgument(path_, ": tensor ", tensors.size(), " has a name of ",
                           entry.name().size(), " bytes, expected at most ", kMaxNameBytes);
  }
  StoredTensor tensor;
  tensor.name = entry.name();
  tensor.format = FindWeightFormat(entry.format());
  tensor.shape.assign(entry.shape().begin(), entry.shape().end());
  tensor.bytes = entry.bytes();
  tensor.constant_bytes = entry.constant_bytes();
  if (tensor.format == nullptr) {
    return InvalidArgument(path_, ": tensor ", Quoted(tensor.name), " has unknown format ",
                           Quoted(entry.format()));
  }
  int64_t elements = 1;
  for (const int64_t extent : tensor.shape) {
    if (extent < 1 || elements > static_cast<int64_t>(kMaxBytes) / extent) {
      return InvalidArgument(path_, ": tensor '", tensor.name, "' has an impossible shape");
    }
    elements *= extent;
  }
  const bool apart = tensor.format->apart();
  if (tensor.bytes > kMaxBytes ||
      (!apart && (elements % tensor.format->block != 0 ||
                  static_cast<uint64_t>(tensor.format->RowBytes(elements)) != tensor.bytes))) {
    return InvalidArgument(path_, ": tensor '", tensor.name, "' has ", tensor.bytes, " bytes for ",
                           elements, " elements in ", tensor.format->name);
  }
  if (apart && tensor.shape.size() != 2) {
    return InvalidArgument(path_, ": tensor ", Quoted(tensor.name), " has shape ",
                           ShapeText(tensor.shape), " in ", tensor.format->name,
                           ", expected a matrix");
  }
  const uint64_t room = RoomOf(tensor);  // at most kMaxBytes and a page
  if (room > kMaxRoom - reserved || tensor.constant_bytes > kMaxBytes) {
    return InvalidArgument(path_, ": tensor ", Quoted(tensor.name), " has ", tensor.bytes,
                           " bytes and ", tensor.constant_bytes, " of constants, after ", reserved,
                           " of other tensors; expected at most ", kMaxRoom, " of all, and ",
                           kMaxBytes, " of constants");
  }
  const auto index = static_cast<uint32_t>(tensors.size());
  if (apart) tensor.constants = [this, index] { return FetchConstants(index); };
  offsets_.push_back(reserved);
  reserved += room;
  file_bytes_ += tensor.bytes + tensor.constant_bytes;
  tensors.push_back(std::move(tensor));
  return absl::OkStatus();
}

// Whole pages; for an apart format at least what its shape says, whatever the file holds.
uint64_t ReceivedCheckpoint::RoomOf(const StoredTensor& tensor) const {
  uint64_t bytes = tensor.bytes;
  if (tensor.format->apart()) {
    bytes =
        std::max(bytes, static_cast<uint64_t>(tensor.format->MatrixBytes(1, tensor.Elements())));
  }
  return (bytes + page_ - 1) / page_ * page_;
}

absl::Status ReceivedCheckpoint::Fetch(const StoredTensor& tensor) const {
  const auto index = static_cast<uint32_t>(&tensor - tensors().data());
  MutexLock lock(loading_);
  if (const auto last = readers_.extract(std::this_thread::get_id())) {
    const uint32_t before = last.mapped();
    if (!IsHere(before)) {
      madvise(range_.get() + offsets_[before], RoomOf(tensors()[before]), MADV_REMOVE);
    }
  }
  if (!IsHere(index)) {
    TREADLE_RETURN_IF_ERROR(Receive(index, /*constants=*/false, tensor.bytes).status());
  }
  readers_[std::this_thread::get_id()] = index;
  return absl::OkStatus();
}

bool ReceivedCheckpoint::IsHere(uint32_t tensor) const {
  return std::ranges::any_of(readers_, [&](const auto& reader) { return reader.second == tensor; });
}

absl::StatusOr<MatrixConstants> ReceivedCheckpoint::FetchConstants(uint32_t tensor) const {
  std::string bytes;
  {
    MutexLock lock(loading_);
    TREADLE_ASSIGN_OR_RETURN(bytes, Receive(tensor, /*constants=*/true, 0));
  }
  TREADLE_ASSIGN_OR_RETURN(MatrixConstants constants, ParseConstants(bytes));
  TREADLE_RETURN_IF_ERROR(CheckConstants(tensors()[tensor], constants));
  return constants;
}

// The bytes of constants; those of a tensor are in their place.
absl::StatusOr<std::string> ReceivedCheckpoint::Receive(uint32_t tensor, bool constants,
                                                        uint64_t expected) const {
  MutexLock lock(mutex_);
  transfer_ = {.tensor = tensor, .constants = constants, .active = true, .total = expected};
  if (!constants && expected == 0) return std::string();
  do {
    const uint64_t known = std::max<uint64_t>(transfer_.total, 1);
    while (transfer_.asked < known &&
           transfer_.asked - transfer_.arrived < kChunksAhead * kChunkBytes) {
      control::TensorRequest request;
      request.set_tensor(tensor);
      request.set_constants(constants);
      request.set_offset(transfer_.asked);
      ask_(request);
      transfer_.asked += kChunkBytes;
    }
    TREADLE_RETURN_IF_ERROR(failed_);
    const uint64_t before = transfer_.arrived;
    const auto late = std::chrono::steady_clock::now() + patience_;
    while (transfer_.arrived == before && transfer_.error.ok() && !EmptyArrived()) {
      if (!changed_.WaitUntil(mutex_, late)) {
        return absl::DeadlineExceededError(Str(path_, ": nothing of tensor '",
                                               tensors()[tensor].name, "' came for ",
                                               patience_.count(), " ms"));
      }
    }
    TREADLE_RETURN_IF_ERROR(transfer_.error);
  } while (transfer_.sha256.empty() || transfer_.arrived < transfer_.total);
  transfer_.active = false;
  const std::span<const std::byte> bytes =
      constants ? std::as_bytes(std::span(transfer_.bytes))
                : std::span<const std::byte>(range_.get() + offsets_[tensor], transfer_.total);
  if (HashOf(bytes) != transfer_.sha256) {
    return absl::DataLossError(Str(path_, ": tensor '", tensors()[tensor].name,
                                   "' did not arrive as it was sent: another SHA-256"));
  }
  return std::move(transfer_.bytes);
}

absl::Status ReceivedCheckpoint::Take(const control::TensorChunk& chunk) {
  if (!chunk.problem().empty()) return InvalidArgument(chunk.problem());
  Transfer& transfer = transfer_;
  const std::string& data = chunk.data();
  if (chunk.offset() == 0) {
    const StoredTensor& tensor = tensors()[transfer.tensor];
    const uint64_t most = MostConstantBytes(tensor);
    if (transfer.constants && chunk.total() > most) {
      return absl::DataLossError(Str("tensor ", Quoted(tensor.name), " has ", chunk.total(),
                                     " bytes of constants, expected at most ", most));
    }
    if (!transfer.constants && chunk.total() != transfer.total) {
      return absl::DataLossError(Str("tensor ", Quoted(tensor.name), " has ", chunk.total(),
                                     " bytes, expected ", transfer.total));
    }
    transfer.total = chunk.total();
    transfer.sha256 = chunk.sha256();
  }
  const uint64_t expected = std::min(kChunkBytes, transfer.total - transfer.arrived);
  if (transfer.sha256.empty() || chunk.offset() != transfer.arrived || data.size() != expected) {
    return absl::DataLossError(Str("tensor '", tensors()[transfer.tensor].name, "': ", data.size(),
                                   " bytes at ", chunk.offset(), ", expected ", expected, " at ",
                                   transfer.arrived));
  }
  if (transfer.constants) {
    transfer.bytes += data;  // memory grows with what has come, not with what was said
  } else {
    std::memcpy(range_.get() + offsets_[transfer.tensor] + transfer.arrived, data.data(),
                data.size());
  }
  transfer.arrived += data.size();
  return absl::OkStatus();
}

void ReceivedCheckpoint::Deliver(const control::TensorChunk& chunk) {
  MutexLock lock(mutex_);
  if (!transfer_.active || chunk.tensor() != transfer_.tensor ||
      chunk.constants() != transfer_.constants) {
    return;
  }
  if (transfer_.error.ok()) transfer_.error = Take(chunk);
  changed_.NotifyAll();
}

void ReceivedCheckpoint::Fail(const absl::Status& why) {
  MutexLock lock(mutex_);
  if (failed_.ok()) failed_ = why;
  if (transfer_.error.ok()) transfer_.error = why;
  changed_.NotifyAll();
}

void CheckpointSender::Describe(control::CheckpointDirectory& directory) const {
  directory.set_hugging_face(checkpoint_.kind() == Checkpoint::Kind::kHuggingFace);
  directory.set_path(checkpoint_.path());
  EncodeConfig(checkpoint_.config(), *directory.mutable_config());
  for (const StoredTensor& tensor : checkpoint_.tensors()) {
    control::TensorEntry& entry = *directory.add_tensors();
    entry.set_name(tensor.name);
    entry.set_format(std::string(tensor.format->name));
    entry.mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
    entry.set_bytes(tensor.bytes);
    entry.set_constant_bytes(tensor.constant_bytes);
  }
}

void CheckpointSender::Answer(const control::TensorRequest& request, control::TensorChunk& chunk) {
  chunk.set_tensor(request.tensor());
  chunk.set_constants(request.constants());
  chunk.set_offset(request.offset());
  if (const absl::Status status = Fill(request, chunk); !status.ok()) {
    chunk.set_problem(std::string(status.message()));
  }
}

absl::Status CheckpointSender::Fill(const control::TensorRequest& request,
                                    control::TensorChunk& chunk) {
  const uint32_t index = request.tensor();
  const uint64_t offset = request.offset();
  if (index >= checkpoint_.tensors().size()) {
    return InvalidArgument("tensor ", index, " of ", checkpoint_.tensors().size());
  }
  const StoredTensor& tensor = checkpoint_.tensors()[index];
  MutexLock lock(mutex_);
  TREADLE_RETURN_IF_ERROR(checkpoint_.Revalidate());
  if (tensor.arranged && !request.constants() && arranged_of_ != static_cast<int64_t>(index)) {
    arranged_ = tensor.arranged();
    arranged_of_ = index;
  }
  std::span<const std::byte> bytes(tensor.arranged ? arranged_.data() : tensor.data, tensor.bytes);
  int& begun = begun_[2 * index + (request.constants() ? 1 : 0)];
  if (offset == 0 && begun >= kMaxBegun * ranks_) {
    return ResourceExhausted("tensor ", Quoted(tensor.name), " was asked for ", begun,
                             " times, and is not sent again");
  }
  if (offset == 0) ++begun;
  if (request.constants()) {
    if (!tensor.constants) return InvalidArgument("tensor '", tensor.name, "' has no constants");
    if (constants_of_ != static_cast<int64_t>(index)) {
      if (offset != 0) {
        return InvalidArgument("constants of tensor ", Quoted(tensor.name), " from byte ", offset,
                               " on, expected to be asked for from the first");
      }
      TREADLE_ASSIGN_OR_RETURN(const MatrixConstants read, tensor.constants());
      constants_ = SerializeConstants(read);
      constants_of_ = index;
    }
    bytes = std::as_bytes(std::span(constants_));
  }
  if (offset >= std::max<uint64_t>(bytes.size(), 1)) {
    return InvalidArgument("tensor '", tensor.name, "' has no byte ", offset);
  }
  if (offset == 0) {
    chunk.set_total(bytes.size());
    chunk.set_sha256(HashOf(bytes));
  }
  const auto part = bytes.subspan(offset, std::min(kChunkBytes, bytes.size() - offset));
  chunk.set_data(part.data(), part.size());
  return checkpoint_.CheckUnchanged();
}

}  // namespace treadle
