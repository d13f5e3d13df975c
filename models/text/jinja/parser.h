// Template source to tree.
#pragma once

#include <string_view>
#include <vector>

#include "models/text/jinja/ast.h"

namespace treadle::jinja {

// The statements of a template. Throws TemplateError, with the line, for what is not understood:
// also for a filter or a test that does not exist.
std::vector<NodePtr> ParseTemplate(std::string_view source);

}  // namespace treadle::jinja
