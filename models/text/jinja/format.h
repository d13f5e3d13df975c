// How a template's values are written: as output, as Python would show them, and as JSON.
#pragma once

#include <string>

#include "models/text/jinja/value.h"

namespace treadle::jinja {

// str(value): what {{ value }} writes. An undefined value writes nothing.
std::string Text(Context& context, const Value& value);

struct JsonStyle {
  int indent = -1;  // spaces per level; -1: on one line
  bool ascii_only = false;
  bool sort_keys = false;
};
// json.dumps(value). Fails for what JSON has no form for.
std::string ToJson(Context& context, const Value& value, const JsonStyle& style);

}  // namespace treadle::jinja
