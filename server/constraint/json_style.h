// The white space of an answer in JSON. Thread safety: confined to one thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace treadle {

// How an answer writes JSON: the white space that it puts behind punctuation. A guess follows it.
class JsonStyle {
 public:
  void Read(std::string_view text) {
    for (const char c : text) {
      if (!in_string_ && (c == ' ' || c == '\n' || c == '\t')) {
        spaces_ += c;
        continue;
      }
      if (std::string* const kept = Kept()) *kept = spaces_;
      spaces_.clear();
      if (c == '"' && !escaped_) in_string_ = !in_string_;
      escaped_ = in_string_ && c == '\\' && !escaped_;
      last_ = c;
    }
  }

  // Texts that may come next where the grammar leaves a choice, the likelier first.
  std::vector<std::string> Next() {
    if (in_string_ || !spaces_.empty()) return {};
    if (last_ == '"') return {":", ","};
    const std::string* const spaces = Kept();
    if (spaces == nullptr) return {};
    if (!spaces->empty()) return {*spaces};
    if (last_ == '{' || last_ == ',') return {"\""};
    return {};
  }

 private:
  std::string* Kept() {
    const size_t at = in_string_ ? std::string_view::npos : std::string_view("{[,:").find(last_);
    return at == std::string_view::npos ? nullptr : &kept_[at];
  }

  std::string kept_[4] = {"", "", " ", " "};
  std::string spaces_;  // behind last_
  char last_ = 0;
  bool in_string_ = false, escaped_ = false;
};

}  // namespace treadle
