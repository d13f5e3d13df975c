// The values that a template computes with, and the budget that bounds what it may compute.
//
// Values share their contents and never change, except a namespace's attributes. Inside the
// interpreter an error is a thrown TemplateError; ChatTemplate turns it into a Status. Thread
// safety: a Context and the values made with it belong to one rendering.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/status.h"

namespace treadle::jinja {

struct TemplateError {
  int line;
  std::string message;
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

class Context;
class Value;
using List = std::vector<Value>;
using Dict = std::vector<std::pair<Value, Value>>;  // in order of insertion
using Named = std::vector<std::pair<std::string, Value>>;
using Namespace = std::map<std::string, Value, std::less<>>;

struct Arguments {
  List positional;
  Named named;
};
using Function = std::function<Value(Context&, const Arguments&)>;

struct Undefined {
  std::string name;  // for messages; short
};
struct None {};
// An integer of more than 64 bits, from JSON: it is written and compared, and not computed with.
struct BigInteger {
  std::string digits;
  bool operator==(const BigInteger&) const = default;
};
struct Callee;

class Value {
 public:
  Value() : data_(Undefined{}) {}
  Value(Undefined undefined) : data_(std::move(undefined)) {}  // NOLINT: values convert implicitly
  Value(None none) : data_(none) {}                            // NOLINT
  Value(bool value) : data_(value) {}                          // NOLINT
  Value(int64_t value) : data_(value) {}                       // NOLINT
  Value(double value) : data_(value) {}                        // NOLINT
  Value(BigInteger value) : data_(std::move(value)) {}         // NOLINT
  Value(const char* text) : Value(String(text)) {}             // NOLINT
  static Value String(std::string text) {
    return Value(std::make_shared<const std::string>(std::move(text)));
  }
  // `attributes`: what a template may ask it by name; `depth`: of what the function holds, and one.
  static Value Callable(Function function, Namespace attributes = {}, int depth = 0);
  static Value NewNamespace(Namespace attributes) {
    return Value(std::make_shared<Namespace>(std::move(attributes)));
  }

  bool is_undefined() const { return std::holds_alternative<Undefined>(data_); }
  bool is_none() const { return std::holds_alternative<None>(data_); }
  bool is_string() const { return std::holds_alternative<StringPtr>(data_); }
  bool is_list() const { return std::holds_alternative<ListPtr>(data_); }
  bool is_dict() const { return std::holds_alternative<DictPtr>(data_); }
  bool is_namespace() const { return std::holds_alternative<NamespacePtr>(data_); }
  bool is_callable() const { return std::holds_alternative<FunctionPtr>(data_); }
  bool is_bool() const { return std::holds_alternative<bool>(data_); }
  bool is_int() const { return std::holds_alternative<int64_t>(data_); }
  bool is_big() const { return std::holds_alternative<BigInteger>(data_); }
  bool is_float() const { return std::holds_alternative<double>(data_); }
  bool is_number() const { return is_bool() || is_int() || is_float(); }
  bool is_integral() const { return is_bool() || is_int(); }

  // Each requires its kind; AsInt also takes a bool, AsDouble any number.
  const std::string& AsString() const { return *std::get<StringPtr>(data_); }
  const List& AsList() const { return std::get<ListPtr>(data_)->items; }
  // As Python names it, where a list is no list: "tuple", "dict_keys", "range(0, 3)".
  const std::string& ListForm() const { return std::get<ListPtr>(data_)->form; }
  const Dict& AsDict() const { return std::get<DictPtr>(data_)->items; }
  Namespace& AsNamespace() const { return *std::get<NamespacePtr>(data_); }
  std::weak_ptr<Namespace> WeakNamespace() const { return std::get<NamespacePtr>(data_); }
  const Callee& AsCallee() const { return *std::get<FunctionPtr>(data_); }
  const Function& AsCallable() const;
  bool AsBool() const { return std::get<bool>(data_); }
  const BigInteger& AsBig() const { return std::get<BigInteger>(data_); }
  int64_t AsInt() const { return is_bool() ? AsBool() : std::get<int64_t>(data_); }
  double AsDouble() const {
    return is_float() ? std::get<double>(data_) : static_cast<double>(AsInt());
  }
  const std::string& UndefinedName() const { return std::get<Undefined>(data_).name; }

  bool Truth() const;
  // As Python names the type, for messages.
  std::string_view TypeName() const;
  // Nesting of lists, dictionaries and what functions hold: 0 for a scalar.
  int depth() const;
  // A text, number or none: what a dictionary's key may be.
  bool is_key() const { return is_string() || is_number() || is_none(); }
  // Equal for keys that are the same, as 1, 1.0 and true are. Requires a key.
  std::string KeyText() const;

 private:
  friend class Context;
  template <typename Items>
  struct Nested {
    Items items;
    int depth;
    std::string form = {};
  };
  using StringPtr = std::shared_ptr<const std::string>;
  using ListPtr = std::shared_ptr<const Nested<List>>;
  using DictPtr = std::shared_ptr<const Nested<Dict>>;
  using NamespacePtr = std::shared_ptr<Namespace>;
  using FunctionPtr = std::shared_ptr<const Callee>;
  template <typename Pointer>
  requires std::is_class_v<Pointer>
  explicit Value(Pointer pointer) : data_(std::move(pointer)) {}

  std::variant<Undefined, None, bool, int64_t, double, StringPtr, ListPtr, DictPtr, NamespacePtr,
               FunctionPtr, BigInteger>
      data_;
};

struct Callee {
  Function call;
  Namespace attributes;
  int depth = 0;
};
inline Value Value::Callable(Function function, Namespace attributes, int depth) {
  return Value(
      std::make_shared<const Callee>(Callee{std::move(function), std::move(attributes), depth}));
}
inline const Function& Value::AsCallable() const { return AsCallee().call; }

// The budget of one rendering. A step is about a tenth of a microsecond: a node that is evaluated,
// an item that is walked, or kBytesPerStep bytes that are read or written. Bytes are of all that is
// ever made. The most that any model's own template needs is far below (bench/results has
// them).
//
//                 of any template    a message more    a byte of text more
//   steps         100,000 (10 ms)    500               1/4: sixteen passes over it
//   bytes         4 MiB              2 KiB             24
struct Budget {
  int64_t steps = 100'000;
  size_t bytes = size_t{4} << 20;
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();

  void Add(size_t messages, size_t text) {
    steps += static_cast<int64_t>(messages * 500 + text / 4);
    bytes += messages * 2048 + text * 24;
  }
};

// The budget of one rendering, and where it is.
class Context {
 public:
  static constexpr size_t kBytesPerStep = 64;
  static constexpr int kMaxDepth = 400;      // of evaluation: nested nodes and macro calls
  static constexpr int kMaxValueDepth = 64;  // of lists in lists

  explicit Context(const Budget& budget) : budget_(budget) {}

  int line = 1;  // of what is being evaluated

  template <typename... Parts>
  [[noreturn]] void Fail(const Parts&... parts) const {
    throw TemplateError{line, Str(parts...)};
  }
  void Step(int64_t steps = 1);
  // Before going over so many bytes.
  void Read(size_t bytes) { Step(static_cast<int64_t>(bytes / kBytesPerStep)); }
  void Read(const Value& value) {
    if (value.is_string()) Read(value.AsString().size());
  }
  // Before making something of that size.
  void Charge(size_t bytes);
  const Budget& budget() const { return budget_; }
  void Enter();  // one level deeper
  void Leave() { --depth_; }

  // The depth of what holds these. Fails where it is too much.
  int DepthAround(const List& values) const;
  Value MakeString(std::string text);
  Value MakeList(List items, std::string form = "");  // ListForm's
  Value MakeDict(Dict items);

  bool Equal(const Value& a, const Value& b);
  // Negative, zero, positive. Fails for values that have no order.
  int Order(const Value& a, const Value& b);
  // Visited by a for loop: items, keys, or characters. Fails for what cannot be iterated.
  List Items(const Value& value);
  int64_t Length(const Value& value);
  bool Contains(const Value& container, const Value& item);
  // The value of a key in a dictionary; nullptr if it has no such key.
  const Value* Find(const Value& dict, const Value& key);

 private:
  const Budget budget_;
  int64_t steps_ = 0;
  size_t bytes_ = 0;
  int depth_ = 0;
};

// Where `part` first stands in `text`; npos: nowhere. In time linear in both (glibc's memmem is
// Two-Way; std::string's is not).
size_t FindText(std::string_view text, std::string_view part);

// One character each, of valid UTF-8.
std::vector<std::string_view> Characters(std::string_view text);

}  // namespace treadle::jinja
