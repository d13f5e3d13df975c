// A template as a tree.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "models/text/jinja/value.h"

namespace treadle::jinja {

struct Node;
using NodePtr = std::unique_ptr<Node>;

struct Node {
  enum class Kind {
    // Expressions                text; names; kids
    kLiteral,      // value
    kName,         // the name
    kAttribute,    // attribute; kids: object
    kSubscript,    // kids: object, key
    kSlice,        // kids: object, start, stop, step; each of the last three may be null
    kCall,         // names of the arguments, "" if positional; kids: callee, arguments
    kFilter,       // filter; names as for kCall; kids: input, arguments
    kTest,         // test; names as for kCall; kids: input, arguments
    kNot,          // kids: operand
    kSign,         // "-" or "+"; kids: operand
    kAnd,          // kids: left, right
    kOr,           // kids: left, right
    kArithmetic,   // operator; kids: left, right
    kCompare,      // names: the operators; kids: operands, one more than operators
    kConcat,       // kids: operands
    kConditional,  // kids: value, condition, other value or null
    kList,         // "tuple" or ""; kids: items
    kDict,         // kids: key, value, key, value...
    // Statements; bodies hold statements
    kText,      // what to write
    kOutput,    // kids: expression
    kFor,       // names: targets; kids: iterable, condition or null; bodies: loop, else
    kIf,        // kids: conditions; bodies: one for each, and one for else
    kSet,       // names: targets (text: the attribute of a namespace); kids: value
    kBlockSet,  // names: target (text: attribute); bodies: what is captured; kids: filter or null
    kFilterBlock,  // kids: filter; bodies: what is filtered
    kMacro,  // name; names: parameters; kids: defaults, null where there is none; bodies: body
    kGroup,  // bodies: body
    kBreak,
    kContinue,
  };
  Kind kind;
  int line = 0;
  int depth = 1;  // of this tree: bounds the stack that walking and freeing it takes
  std::string text;
  Value value;
  std::vector<std::string> names;
  std::vector<std::string>
      catches;  // of a macro: "varargs" and "kwargs", where its body names them
  std::vector<NodePtr> kids;
  std::vector<std::vector<NodePtr>> bodies;
};

// The statements of a template. Throws TemplateError, with the line, for what is not understood:
// also for a filter or a test that does not exist.
std::vector<NodePtr> ParseTemplate(std::string_view source);

}  // namespace treadle::jinja
