#include <limits>
#include <nlohmann/json.hpp>

#include "models/text/jinja/library.h"

namespace treadle::jinja {
namespace {

using Json = nlohmann::json;

// Makes values as their text goes by; lists and dictionaries when they close.
class Reader : public nlohmann::json_sax<Json> {
 public:
  explicit Reader(Context& context) : context_(context) {}

  const Value& value() const { return value_; }

  bool null() override { return Put(None{}); }
  bool boolean(bool value) override { return Put(value); }
  bool number_integer(number_integer_t value) override { return Put(int64_t{value}); }
  bool number_unsigned(number_unsigned_t value) override {
    if (value <= uint64_t{std::numeric_limits<int64_t>::max()}) {
      return Put(static_cast<int64_t>(value));
    }
    return Put(BigInteger{std::to_string(value)});
  }
  bool number_float(number_float_t value, const string_t& text) override {
    if (text.find_first_of(".eE") != text.npos) return Put(value);
    context_.Charge(text.size());
    return Put(BigInteger{text});
  }
  bool string(string_t& text) override { return Put(context_.MakeString(std::move(text))); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return Open(); }
  bool end_object() override { return Close(true); }
  bool start_array(size_t) override { return Open(); }
  bool end_array() override { return Close(false); }
  bool key(string_t& name) override {
    context_.Charge(name.size());
    open_.back().dict.emplace_back(Value::String(std::move(name)), Value());
    return true;
  }
  bool parse_error(size_t position, const std::string&, const Json::exception&) override {
    context_.Fail("the text is not valid JSON at byte ", position);
  }

 private:
  struct Nested {
    Dict dict;  // the last one's value is to come
    List list;
  };

  bool Put(Value value) {
    context_.Step();
    if (open_.empty()) {
      value_ = std::move(value);
    } else if (!open_.back().dict.empty()) {
      open_.back().dict.back().second = std::move(value);
    } else {
      open_.back().list.push_back(std::move(value));
    }
    return true;
  }
  bool Open() {
    open_.emplace_back();
    return true;
  }
  bool Close(bool dict) {
    Nested nested = std::move(open_.back());
    open_.pop_back();
    return Put(dict ? context_.MakeDict(std::move(nested.dict))
                    : context_.MakeList(std::move(nested.list)));
  }

  Context& context_;
  std::vector<Nested> open_;
  Value value_;
};

}  // namespace

Value FromJson(Context& context, std::string_view text) {
  Reader reader(context);
  Json::sax_parse(text, &reader);
  return reader.value();
}

}  // namespace treadle::jinja
