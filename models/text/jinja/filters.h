// The filters ({{ x | trim }}) and tests ({% if x is defined %}) that templates can use.
#pragma once

#include <string_view>

#include "models/text/jinja/value.h"

namespace treadle::jinja {

// The input is the first positional argument.
using Filter = Value (*)(Context&, const Arguments&);
using Test = bool (*)(Context&, const Arguments&);

// nullptr if there is none of that name.
Filter FindFilter(std::string_view name);
Test FindTest(std::string_view name);

// x.attribute and x[key] as templates mean them: undefined where there is no such member. Fails for
// members of an undefined value.
Value GetAttribute(Context& context, const Value& object, std::string_view name);
Value GetItem(Context& context, const Value& object, const Value& key);

}  // namespace treadle::jinja
