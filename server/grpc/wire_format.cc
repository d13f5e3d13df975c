#include "server/grpc/wire_format.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/message.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/retry_after.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/grpc/rpc_details.pb.h"
#include "server/observe/refusals.h"

namespace treadle {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// A text goes to the client twice, in headers, three bytes for one there; clients take 8 KiB of
// them.
constexpr size_t kMaxMessageBytes = 1024;
constexpr size_t kMaxShortBytes = 512 << 10;
// A client that was refused because the queue is full should wait this long.

// Fields that no version of the protocol had; the parser keeps each of them.
constexpr int64_t kMaxUnknownFields = 1024;

// Goes over a message's bytes before the parser does, and keeps nothing of them: an element of no
// bytes takes two on the wire, and dozens once it is parsed. Counts the entries of repeated fields,
// and looks for a string that the parser would refuse. Depth is bounded by the schema.
class Scan {
 public:
  // Where the message lies in the whole one.
  struct Place {
    const Place* parent;
    const FieldDescriptor* field;
    int64_t index;
  };

  absl::Status Read(std::string_view bytes, const Descriptor& type, const Place* place) {
    CodedInputStream in(reinterpret_cast<const uint8_t*>(bytes.data()),
                        static_cast<int>(bytes.size()));
    while (const uint32_t tag = in.ReadTag()) {
      const WireFormatLite::WireType wire = WireFormatLite::GetTagWireType(tag);
      const FieldDescriptor* field = KnownField(type, tag);
      uint32_t size = 0;
      if (wire == WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
        if (!in.ReadVarint32(&size) || size > bytes.size() - in.CurrentPosition()) break;
        const std::string_view value = bytes.substr(in.CurrentPosition(), size);
        TREADLE_RETURN_IF_ERROR(ReadValue(field, value, place));
        in.Skip(static_cast<int>(size));
      } else if (wire == WireFormatLite::WIRETYPE_START_GROUP ||
                 !WireFormatLite::SkipField(&in, tag)) {
        break;
      } else {
        Count(field, 1, place);
      }
    }
    if (in.ConsumedEntireMessage()) return absl::OkStatus();
    return InvalidArgument(place == nullptr ? "the request" : NameOf(*place, true),
                           " is not a message of type ", type.full_name());
  }

  absl::Status CheckCounts(const CheckEntries& check) const {
    if (unknown_ > kMaxUnknownFields) {
      return InvalidArgument("the request has ", unknown_,
                             " fields that are not known, expected at most ", kMaxUnknownFields);
    }
    for (const auto& [field, name, entries] : counts_) {
      if (check) TREADLE_RETURN_IF_ERROR(check(name, entries));
    }
    return absl::OkStatus();
  }

 private:
  struct Entries {
    const FieldDescriptor* field;
    std::string name;  // with those of the messages around it
    int64_t count;
  };

  static std::string NameOf(const Place& place, bool with_index) {
    std::string name = place.parent == nullptr ? "" : NameOf(*place.parent, with_index) + ".";
    name += place.field->name();
    return with_index && place.field->is_repeated() ? Str(name, "[", place.index, "]") : name;
  }

  // Null if the parser will take it for unknown.
  static const FieldDescriptor* KnownField(const Descriptor& type, uint32_t tag) {
    const FieldDescriptor* field = type.FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
    if (field == nullptr) return nullptr;
    const WireFormatLite::WireType wire = WireFormatLite::GetTagWireType(tag);
    if (wire == WireFormatLite::WIRETYPE_LENGTH_DELIMITED && field->is_packable()) return field;
    const auto own = static_cast<WireFormatLite::FieldType>(field->type());
    return WireFormatLite::WireTypeForFieldType(own) == wire ? field : nullptr;
  }

  absl::Status ReadValue(const FieldDescriptor* field, std::string_view value, const Place* place) {
    const int64_t index = Count(field, field == nullptr ? 1 : EntriesIn(*field, value), place);
    if (field == nullptr) return absl::OkStatus();
    const Place inner{place, field, index};
    if (field->type() == FieldDescriptor::TYPE_MESSAGE) {
      return Read(value, *field->message_type(), &inner);
    }
    if (field->type() != FieldDescriptor::TYPE_STRING) return absl::OkStatus();
    const size_t bad = FindInvalidUtf8(value);
    if (bad == std::string_view::npos) return absl::OkStatus();
    return InvalidArgument(NameOf(inner, true), " is not valid UTF-8 at byte ", bad,
                           ", expected UTF-8 text");
  }

  static int64_t EntriesIn(const FieldDescriptor& field, std::string_view value) {
    if (!field.is_packable()) return 1;
    switch (WireFormatLite::WireTypeForFieldType(
        static_cast<WireFormatLite::FieldType>(field.type()))) {
      case WireFormatLite::WIRETYPE_FIXED32:
        return static_cast<int64_t>(value.size() / 4);
      case WireFormatLite::WIRETYPE_FIXED64:
        return static_cast<int64_t>(value.size() / 8);
      default:  // each varint has one last byte
        return std::ranges::count_if(value, [](char byte) { return (byte & 0x80) == 0; });
    }
  }

  // How many entries the field had before; 0 for one that is not repeated.
  int64_t Count(const FieldDescriptor* field, int64_t entries, const Place* place) {
    if (field == nullptr) return unknown_++;
    if (!field->is_repeated()) return 0;
    auto at = std::ranges::find(counts_, field, &Entries::field);
    if (at == counts_.end()) {
      at = counts_.insert(at, {field, NameOf(Place{place, field, 0}, false), 0});
    }
    return std::exchange(at->count, at->count + entries);
  }

  std::vector<Entries> counts_;  // a schema has few
  int64_t unknown_ = 0;
};

}  // namespace

absl::Status ParseMessage(std::string_view bytes, google::protobuf::Message& message,
                          const CheckEntries& check) {
  // The parser reports a bad string to the log as well as to us; look first, so it has nothing to
  // say.
  Scan scan;
  TREADLE_RETURN_IF_ERROR(scan.Read(bytes, *message.GetDescriptor(), nullptr));
  TREADLE_RETURN_IF_ERROR(scan.CheckCounts(check));
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return InvalidArgument("the request is not a message of type ",
                           message.GetDescriptor()->full_name());
  }
  return absl::OkStatus();
}

absl::Status Parse(const grpc::ByteBuffer& bytes, google::protobuf::Message& message,
                   const CheckEntries& check) {
  grpc::Slice whole;
  if (!bytes.DumpToSingleSlice(&whole).ok()) {
    // No message came: its client has left, or the door has refused and counted it.
    return Because(std::nullopt, Internal("the request's bytes could not be read"));
  }
  return ParseMessage({reinterpret_cast<const char*>(whole.begin()), whole.size()}, message, check);
}

absl::Status ParseShort(const grpc::ByteBuffer& bytes, google::protobuf::Message& message,
                        const CheckEntries& check) {
  if (bytes.Length() > kMaxShortBytes) {
    return Because(RefusalReason::kTooLong,
                   InvalidArgument("the request has ", bytes.Length(), " bytes, expected at most ",
                                   kMaxShortBytes));
  }
  return Parse(bytes, message, check);
}

grpc::ByteBuffer Serialize(const google::protobuf::Message& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  const auto code = static_cast<grpc::StatusCode>(status.code());
  const std::string message = Cut(std::string(status.message()), kMaxMessageBytes);
  if (code != grpc::StatusCode::RESOURCE_EXHAUSTED) return grpc::Status(code, message);
  rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(RetryAfterSeconds(status));
  rpc::Status details;
  details.set_code(code);
  details.set_message(message);
  google::protobuf::Any* detail = details.add_details();
  detail->set_type_url("type.googleapis.com/google.rpc.RetryInfo");
  detail->set_value(retry.SerializeAsString());
  return grpc::Status(code, message, details.SerializeAsString());
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace treadle
